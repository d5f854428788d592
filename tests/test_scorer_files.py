"""
Scorers by name and in files: what a state is charged, what is saved comes back, and names, options, windows and files
that do not fit are refused by name.
"""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import scorer as S
from data.scorer_files import check_window, load_scorers, save_scorers
from scorer import make_scorer
from test_scorer import D, H, STEPPABLE, W, make, tokens

SPEC = {"n_sink": 4, "window": W, "budget": 64}


def test_state_is_charged_as_stored():
    """State entries = bytes of C, which has its normaliser as its last row, over the bytes of a bf16 key and value."""
    assert S.state_entries("kvpop", 128) == 65
    for policy in S.POLICIES:  # the others with a state: test_policies.py
        if policy not in ("kvpop-nodelay", "snapkv", "rkv"):
            assert S.state_entries(policy, D) == (D // 2 + 1 if policy == "kvpop" else 0)
    s = make("kvpop")
    state = s.init_state(1, "cpu")
    assert s.state_entries == S.state_entries("kvpop", D)
    assert state["C"][0, 0].numel() * 4 == s.state_entries * 4 * D
    assert all(make(p).init_state(1, "cpu") == {} for p in STEPPABLE if p != "kvpop")


@pytest.mark.parametrize("policy, options, message", [
    ("dense", {}, "dense keeps every token"),
    ("h2oo", {}, "unknown policy 'h2oo'.*streaming.*kvpop"),
    ("kvpop", {"with_skip": 3}, "kvpop has no option 'with_skip'"),
    ("knorm", {"hidden": 3}, "knorm has no option 'hidden'"),
    ("kvpop", {"window": 0}, "at least 1, got 0"),
    ("kvpop", {"delay": 3}, "delay must be the window"),
    ("kvpop", {"head_dim": 7}, "even, got 7"),
])
def test_make_scorer_refuses(policy, options, message):
    with pytest.raises(ValueError, match=message):
        make_scorer(policy, **{"n_kv_head": 2, "head_dim": 8, "window": W, "layer": 0, **options})


def test_window_mismatch_is_refused_for_learned_scorers():
    check_window([make("kvpop"), make("kvpop-mlp")], W)
    check_window([make(p) for p in ("streaming", "random", "knorm", "oracle")], 3)
    for policy in ("kvpop", "kvpop-mlp"):
        with pytest.raises(ValueError, match=f"{policy} scorer of layer 1 .*window {W}, not 3"):
            check_window([make("knorm"), make(policy)], 3)


def saved(folder, policy="kvpop", **options):
    layers = torch.nn.ModuleList(make(policy, layer=i, seed=3, dtype=torch.float32, **options) for i in range(2))
    save_scorers(layers, folder, SPEC)
    return layers


@pytest.mark.parametrize("policy, options", [("kvpop", {"skip_width": 5, "chunk": 32}), ("kvpop-mlp", {"hidden": 11}),
                                             ("kvpop", {"decay": False}), ("random", {})])
def test_save_and_load(tmp_path, policy, options):
    layers = saved(tmp_path / "new", policy, **options)
    loaded, settings = load_scorers(tmp_path / "new")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["scorer.json", "scorer.safetensors"]
    assert settings == {"policy": policy, "n_layer": 2, "n_kv_head": H, "head_dim": D, **SPEC,
                        "options": {"seed": 3, **options}}
    k, v = tokens(50, dtype=torch.float32)
    for a, b in zip(layers, loaded):
        assert torch.equal(a(k, v), b(k, v)) and a.layer == b.layer
        assert {n: p.dtype for n, p in b.named_parameters()} == {n: torch.float32 for n, _ in a.named_parameters()}
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(loaded[0](k, v), loaded[1](k, v))


@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp"])
def test_half_the_bytes_in_fp16_and_fp32_in_use(tmp_path, policy):
    layers = saved(tmp_path / "fp32", policy)
    save_scorers(layers, tmp_path / "fp16", SPEC, dtype=torch.float16)
    assert {t.dtype for t in load_file(tmp_path / "fp16" / "scorer.safetensors").values()} == {torch.float16}
    loaded, settings = load_scorers(tmp_path / "fp16")
    assert settings == load_scorers(tmp_path / "fp32")[1]
    for p, q in zip(layers.parameters(), loaded.parameters(), strict=True):
        assert q.dtype == torch.float32 and torch.equal(p.half().float(), q)
    assert any(not torch.equal(p, q) for p, q in zip(layers.parameters(), loaded.parameters()))
    k, v = tokens(50, dtype=torch.float32)
    assert torch.allclose(layers[0](k, v), loaded[0](k, v), atol=1e-2)
    save_scorers(loaded, tmp_path / "again", SPEC)  # fp32 again, unless asked
    assert {t.dtype for t in load_file(tmp_path / "again" / "scorer.safetensors").values()} == {torch.float32}
    with torch.no_grad():
        loaded[1].alpha.fill_(1e5)  # above what fp16 has
    with pytest.raises(ValueError, match="1.alpha is not finite in float16"):
        save_scorers(loaded, tmp_path / "large", SPEC, dtype=torch.float16)
    assert not (tmp_path / "large").exists()


def test_save_refuses_what_it_could_not_load(tmp_path):
    for dtype in (torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"{dtype} is not supported: store float32 or float16"):
            save_scorers([make("kvpop")], tmp_path, SPEC, dtype=dtype)
    with pytest.raises(ValueError, match="lack 'budget'"):
        save_scorers([make("kvpop")], tmp_path, {"n_sink": 4, "window": W})
    with pytest.raises(ValueError, match="window 16, not 8"):
        save_scorers([make("kvpop")], tmp_path, {**SPEC, "window": 8})
    with pytest.raises(ValueError, match="same policy and options"):
        save_scorers([make("kvpop"), make("kvpop", chunk=32)], tmp_path, SPEC)
    assert list(tmp_path.iterdir()) == []


def test_load_names_what_is_wrong(tmp_path):
    saved(tmp_path)
    path = tmp_path / "scorer.safetensors"
    good = load_file(path)

    def refused(tensors, *messages):
        save_file(tensors, path)
        with pytest.raises(ValueError) as err:
            load_scorers(tmp_path)
        assert all(m in str(err.value) for m in messages), err.value

    refused({n: t for n, t in good.items() if n != "1.w_v"}, "1.w_v is missing")
    refused({**good, "0.w_extra": torch.zeros(2)}, "0.w_extra is not ours")
    refused({**good, "0.alpha": torch.zeros(H + 1)}, "0.alpha", f"[{H + 1}]", f"[{H}]")
    refused({**good, "1.w_gate": good["1.w_gate"].bfloat16()}, "1.w_gate is BF16", "not F32 or F16")
    refused({**good, "1.w_gate": good["1.w_gate"].double()}, "1.w_gate is F64")
    refused({**good, "1.w_gate": good["1.w_gate"].int()}, "1.w_gate is I32")
    refused({**good, "1.w_gate": good["1.w_gate"].half()[:-1]}, "1.w_gate is F16")
    refused({"0.alpha": torch.zeros(1), "x": torch.zeros(1)}, "0.w_q is missing", "1.w_q is missing", "x is not ours",
            "0.alpha is F32 [1]")
    save_file(good, path)
    load_scorers(tmp_path)  # the good file still loads: the refusals above were not about the folder

    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_scorers(tmp_path)
    torch.save(good, path)  # a pickle under the right name
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_scorers(tmp_path)
    path.rename(tmp_path / "scorer.pt")
    with pytest.raises(ValueError, match="scorer.pt is a pickle"):
        load_scorers(tmp_path)
    (tmp_path / "scorer.pt").unlink()
    with pytest.raises(FileNotFoundError, match="scorer.safetensors is missing"):
        load_scorers(tmp_path)


@pytest.mark.parametrize("edit, message", [
    (lambda s: s.pop("head_dim"), "head_dim"),
    (lambda s: s.update(policy="kvpopp"), "unknown policy 'kvpopp'"),
    (lambda s: s.update(options={"skips": 1}), "no option 'skips'"),
    (lambda s: s.update(options=None), "not a scorer description"),
    (lambda s: s.update(n_layer=3), "2.w_q is missing"),
    (lambda s: s.update(n_layer=1), "1.w_q is not ours"),
    (lambda s: s.update(n_kv_head=H + 1), "0.w_q is F32"),
])
def test_a_description_that_does_not_fit(tmp_path, edit, message):
    saved(tmp_path)
    settings = json.loads((tmp_path / "scorer.json").read_text())
    edit(settings)
    (tmp_path / "scorer.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError) as err:
        load_scorers(tmp_path)
    assert message in str(err.value)


def test_a_missing_or_broken_description(tmp_path):
    saved(tmp_path)
    (tmp_path / "scorer.json").write_text("{")
    with pytest.raises(ValueError, match="not a scorer description"):
        load_scorers(tmp_path)
    (tmp_path / "scorer.json").unlink()
    with pytest.raises(FileNotFoundError, match="scorer.json is missing"):
        load_scorers(tmp_path)
