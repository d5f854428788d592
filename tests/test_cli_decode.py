"""decode.py as a command: what it prints, where, and that every bad input ends in one sentence and exit code 2."""
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.scorer_files import load_scorers, save_scorers
from data.tokenizer import EOT
from data.traces import ALPHABET, make_problem
from decode import generate, main
from flex_masks import CacheSpec
from model import load_model, save_model
from scorer import LEARNED, POLICIES, make_scorer, state_entries
from tiny import tiny_transformer

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = dict(n_sink=2, window=8, budget=40)  # kvpop's state costs 5 of them at head_dim 8


def make_checkpoint(folder, policy=None, seed=0, **changes):
    model = tiny_transformer(seed, **{**dict(vocab_size=257, eos_token_ids=[EOT], alphabet=ALPHABET), **changes})
    save_model(model, folder, torch.float32)
    if policy:
        scorers = torch.nn.ModuleList(make_scorer(policy, n_kv_head=2, head_dim=8, window=8, layer=i)
                                      for i in range(model.config.n_layer))
        for p in scorers.parameters():
            with torch.no_grad():
                p.add_(torch.randn_like(p))
        save_scorers(scorers, folder, {**SETTINGS, "base": "../base"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """base/ and two checkpoints that name it, as the assets do."""
    root = tmp_path_factory.mktemp("assets")
    make_checkpoint(root / "base", seed=1)
    make_checkpoint(root / "kvpop", "kvpop")
    make_checkpoint(root / "mlp", "kvpop-mlp")
    return root


@pytest.fixture
def decode(capfdbinary, monkeypatch):
    """The command within this process: importing torch again for every bad flag would take minutes."""
    def call(*args, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            code = main(["--device", "cpu", *map(str, args)])
        except SystemExit as stop:  # argparse
            code = stop.code
        sys.stdout.flush()
        return SimpleNamespace(returncode=code, **capfdbinary.readouterr()._asdict())
    return call


def command(*args, **options):
    """The same in a process of its own."""
    return subprocess.Popen([sys.executable, str(ROOT / "decode.py"), "--device", "cpu", *map(str, args)], cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
                            **options)


def lines(done):
    return done.err.decode().strip().splitlines()


def expected(folder, prompt, n, policy="kvpop", spec=None, **options):
    model, (scorers, _) = load_model(folder), load_scorers(folder)
    spec = spec or CacheSpec(**SETTINGS, state_entries=state_entries(policy, 8))
    ids = generate(model, [list(prompt.encode())], spec, scorers, max_new_tokens=n, **options).tokens[0]
    return bytes(t for t in ids if t < EOT) + b"\n"


# ---------------------------------------------------------------------------------------------------------------------
# what works

def test_text_on_stdout_and_the_summary_on_stderr(decode, folders):
    prompt = "A| M=913 U=54 n=U+M n?\n"
    done = decode("--model", folders / "kvpop", "--prompt", prompt, "--max-new-tokens", 60)
    assert done.returncode == 0, done.err
    assert done.out == expected(folders / "kvpop", prompt, 60)
    text = done.err.decode()
    slots, seen = 35, len(prompt) + 59
    bytes_ = 2 * 2 * 2 * slots * 8 * 4
    assert "policy: kvpop, budget 40 = 2 sinks + 8 window + 25 selected + 5 scorer state" in text
    assert f"{slots} at the peak of {seen} positions seen, 40 with the scorer state" in text
    assert f"compression {1 - 40 / seen:.1%}" in text
    assert f"cache: {bytes_} bytes measured; 2 layers * 2 * 2 KV heads * 35 slots * 8 * 4 bytes = {bytes_}" in text
    assert f"window ring: {2 * 2 * (slots * 8 + 8 * 4)} bytes" in text
    assert f"scorer state: {2 * 2 * (8 * 4 + 8 + 1) * 4} bytes, charged as 5 entries" in text
    speed = r"[1-9][\d.]* tokens/s"
    assert re.search(rf"prefill: {len(prompt)} tokens, {speed}; decode: 59 steps, {speed}", text)
    assert "stopped by: max_new_tokens" in text and "answer" not in text


def test_a_generated_problem_by_default(decode, folders):
    done = decode("--model", folders / "kvpop", "--problem", 3, "--family", "walk", "--max-new-tokens", 20)
    assert done.returncode == 0, done.err
    assert done.out == expected(folders / "kvpop", make_problem("walk", 3, "test").prompt, 20)
    assert re.search(r"^answer: wrong, trace: first error at \d+", lines(done)[-1])
    done = decode("--model", folders / "kvpop", "--max-new-tokens", 5)
    assert done.out == expected(folders / "kvpop", make_problem("arith", 0, "test").prompt, 5)


def test_the_record_is_of_the_task_alone(capsys):
    for family, known in (("walk", True), ("mark", False)):
        assert main(["--device", "cpu", "--family", family, "--max-new-tokens", "1"]) == 0
        assert ("this checkpoint: 499 of 512 right" in capsys.readouterr().err) == known


def test_prompt_file_stdin_sampling_and_flags(decode, folders, tmp_path):
    prompt = "W| k>zc57 c>kb8 k-g?\n"
    (tmp_path / "p.txt").write_text(prompt)
    flags = ("--model", folders / "kvpop", "--max-new-tokens", 40, "--temperature", 1.5, "--top-p", 0.9, "--top-k", 30,
             "--seed", 7, "--budget", 30, "--n-sink", 3)
    want = expected(folders / "kvpop", prompt, 40, spec=CacheSpec(3, 8, 30, 5), temperature=1.5, top_p=0.9, top_k=30,
                    seed=7)
    assert decode(*flags, "--prompt-file", tmp_path / "p.txt").out == want
    assert decode(*flags, "--prompt-file", "-", stdin=prompt.encode()).out == want
    assert decode(*flags[:-6], "--seed", 8, *flags[-4:], "--prompt", prompt).out != want


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in (*LEARNED, "oracle")])
def test_policies_without_training_run_on_the_base_model(decode, folders, policy):
    args = ("--policy", policy, "--prompt", "A| M=1 M?\n", "--max-new-tokens", 50)
    by_name, direct = decode("--model", folders / "kvpop", *args), None
    assert by_name.returncode == 0, by_name.err
    assert lines(by_name)[0] == f"policy {policy} needs no training: using the base model in {folders / 'base'}"
    flags = {"dense": (), "tova-layer": ("--budget", 40)}.get(policy, ("--budget", 40, "--n-sink", 2, "--window", 8))
    direct = decode("--model", folders / "base", *flags, *args)
    assert direct.out == by_name.out and len(direct.out) > 10
    kept = 10 + 49 if policy == "dense" else 40 - state_entries(policy, 8, group_size=2)
    assert f"entries per KV head: {kept} at the peak of 59 positions seen" in direct.err.decode()
    assert ("warning: n_sink 0" in direct.err.decode()) is False  # tova-layer has no sinks by definition


@pytest.mark.parametrize("policy", ["dms-cap", "kvpop-nodelay", "position"])
def test_learned_policies_run_from_their_checkpoint(decode, tmp_path, policy, monkeypatch):
    import decode as module
    caches, whole = [], module.KVCache
    monkeypatch.setattr(module, "KVCache", lambda *args, **how: (caches.append(whole(*args, **how)), caches[-1])[1])
    folder, prompt = make_checkpoint(tmp_path / "learned", policy), "A| M=1 M?\n"
    done = decode("--model", folder, "--prompt", prompt, "--max-new-tokens", 50)
    charge = state_entries(policy, 8, window=8)
    assert done.returncode == 0, done.err
    assert f"entries per KV head: {40 - charge} at the peak" in done.err.decode()
    assert caches[0].whole is not None  # layers decide together; in what it must equal they do not
    assert done.out == expected(folder, prompt, 50, spec=CacheSpec(**SETTINGS, state_entries=charge))


def test_picture(decode, folders, tmp_path):
    path = tmp_path / "kept.png"
    done = decode("--model", folders / "mlp", "--prompt", "A| M=1 M?\n", "--max-new-tokens", 300, "--picture", path)
    assert done.returncode == 0, done.err
    assert lines(done)[-1] == f"wrote {path}"
    import matplotlib.image
    image = matplotlib.image.imread(path)
    assert image.ndim == 2 and image.shape[1] > 1000  # in grey alone
    assert image.std() > 0.05  # something is drawn


def test_ctrl_c_ends_with_the_summary_and_130(tmp_path):
    make_checkpoint(tmp_path / "endless", "kvpop", max_seq_len=10**6, eos_token_ids=[5])
    process = command("--model", tmp_path / "endless", "--temperature", 5, "--prompt", "A| M=1 M?\n",
                      preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    process.stdout.read(20)  # it is generating
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"stopped by: interrupted" in err and b"Traceback" not in err
    assert int(re.search(rb"of (\d+) positions seen", err)[1]) >= 10 + 19


def test_a_process_of_its_own_streams_and_exits(folders):
    args = ("--model", folders / "kvpop", "--prompt", "A| M=1 M?\n")
    process = command(*args, "--max-new-tokens", 30)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out == expected(folders / "kvpop", "A| M=1 M?\n", 30) and b"stopped by" in err
    process = command(*args, "--budget", 3)
    assert process.communicate(timeout=60)[0] == b"" and process.returncode == 2
    process = command(*args, "--max-new-tokens", 1000)  # like `| head -c 1`
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 1 and b"Traceback" not in err and b"Exception" not in err


def test_max_seq_len_and_end_token_as_stop_reasons(decode, folders, tmp_path):
    prompt = "A| M=1 M?\n"
    done = decode("--model", folders / "kvpop", "--prompt", prompt, "--max-seq-len", 30)
    assert "stopped by: max_seq_len" in lines(done)
    first = done.out[0]
    make_checkpoint(tmp_path / "m", "kvpop", eos_token_ids=[int(first), EOT])  # either end token counts
    done = decode("--model", tmp_path / "m", "--prompt", prompt)
    assert done.out == b"\n" and "stopped by: end token" in lines(done)


def test_no_sinks_is_a_warning_and_a_huge_budget_is_dense(decode, folders):
    args = ("--model", folders / "kvpop", "--prompt", "A| M=1 M?\n", "--max-new-tokens", 60)
    done = decode(*args, "--n-sink", 0)
    assert done.returncode == 0 and lines(done)[0].startswith("warning: n_sink 0 evicts the attention sinks")
    done = decode(*args, "--budget", 10**9)
    assert done.returncode == 0, done.err
    assert "entries per KV head: 69 at the peak of 69 positions seen" in done.err.decode()


def test_help_names_every_option(decode, folders):
    done = decode("--help")
    assert done.returncode == 0
    for flag in ("model policy budget n-sink window prompt prompt-file problem family temperature top-p top-k seed "
                 "max-new-tokens max-seq-len device dtype picture").split():
        assert f"--{flag} " in done.out.decode(), flag


# ---------------------------------------------------------------------------------------------------------------------
# what does not: one sentence, exit 2, no traceback, nothing generated

def refused(done, *words):
    assert done.returncode == 2, (done.returncode, done.err)
    assert done.out == b""
    *before, last = lines(done)
    assert last.startswith("error: ") and "Traceback" not in done.err.decode()
    assert all(line.startswith(("policy ", "warning: ")) for line in before)
    for word in words:
        assert word in last, last


PROMPT = ("--prompt", "A| M=1 M?\n")


@pytest.mark.parametrize("args, words", [
    (("--policy", "h20"), ("unknown policy 'h20'", "streaming")),
    (("--policy", "oracle"), ("oracle", "future", "--policy")),
    (("--policy", "kvpop-mlp"), ("trained for policy kvpop", "--model")),
    (("--policy", "position"), ("trained for policy kvpop", "--model")),
    (("--policy", "tova-layer", "--window", "8"), ("tova-layer", "n_sink 0 and window 1", "drop --n-sink")),
    (("--policy", "random-prompt", "--budget", "19"), ("2 sinks + a prompt of 10 + 8 window", "--budget")),
    (("--policy", "snapkv", "--window", "7"), ("n_queries must be int, 1 to 7, got 8",)),
    (("--policy", "dense", "--budget", "40"), ("dense", "--budget")),
    (("--budget", "14"), ("budget 14", "15 or more")),
    (("--budget", "-1"), ("budget -1",)),
    (("--window", "0"), ("window 0",)),
    (("--window", "9"), ("trained with window 8", "9")),
    (("--n-sink", "-1"), ("n_sink -1",)),
    (("--max-new-tokens", "1100"), ("a prompt of 10 tokens and 1100 new ones need 1110", "1024")),
    (("--max-new-tokens", "0"), ("max_new_tokens is 0",)),
    (("--max-seq-len", "1025"), ("1025", "1024")),
    (("--max-seq-len", "0"), ("--max-seq-len 0",)),
    (("--max-seq-len", "10"), ("need 11 positions", "max_seq_len 10")),
    (("--temperature", "-0.5"), ("temperature",)),
    (("--temperature", "nan"), ("temperature",)),
    (("--top-p", "0"), ("top_p",)),
    (("--top-k", "-2"), ("top_k",)),
    (("--device", "tpu"), ("--device 'tpu'", "cpu")),
    (("--device", "cuda:99"), ("--device 'cuda:99'", "cpu")),
    (("--picture", "/no/such/folder/a.png"), ("/no/such/folder/a.png", "folder that exists")),
    (("--picture", "decode.py/a.png"), ("decode.py/a.png", "folder that exists")),
    (("--picture", "a.pdf"), ("a.pdf", ".png")),
    (("--problem", "1"), ("--problem",)),
    (("--model", "/no/such/checkpoint"), ("/no/such/checkpoint", "--model"))])
def test_bad_flags(decode, folders, args, words):
    refused(decode("--model", folders / "kvpop", *PROMPT, *args), *words)


@pytest.mark.parametrize("prompt, words", [
    (("--prompt", ""), ("prompt is empty",)),
    (("--prompt", "A| M=1 \u00e9"), ("byte 0xc3", "offset 7")),
    (("--prompt", "A| M=1 &"), ("byte 0x26", "offset 7")),
    (("--prompt-file", "/no/such/file"), ("/no/such/file", "--prompt-file")),
    (("--family", "sudoku"), ("unknown family 'sudoku'", "arith")), (("--problem", "-1"), ("--problem", "-1"))])
def test_bad_prompts(decode, folders, prompt, words):
    refused(decode("--model", folders / "kvpop", *prompt), *words)


def test_bad_bytes_on_stdin(decode, folders):
    refused(decode("--model", folders / "kvpop", "--prompt-file", "-", stdin=b"A| \xff"), "UTF-8", "position 3")
    refused(decode("--model", folders / "kvpop", "--prompt-file", "-", stdin=b""), "prompt is empty")


def test_argparse_refuses_what_it_does_not_know(decode, folders):
    for args in (("--compress",), ("--budget", "many"), (*PROMPT, "--prompt-file", "-"), ("--dtype", "int8")):
        done = decode("--model", folders / "kvpop", *args)
        assert done.returncode == 2 and b"error: " in done.err and b"Traceback" not in done.err


def damaged(tmp_path, change):
    folder = make_checkpoint(tmp_path / "damaged", "kvpop")
    change(folder)
    return folder


def edit(folder, **changes):
    path = folder / "scorer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("change, words", [
    (lambda f: cut(f / "model.safetensors"), ("model.safetensors",)),
    (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), ("pickle", "pytorch_model.bin")),
    (lambda f: (f / "model.safetensors").unlink(), ("model.safetensors",)),
    (lambda f: (f / "config.json").unlink(), ("config.json",)),
    (lambda f: (f / "config.json").write_text("{"), ("config.json", "JSON")),
    (lambda f: cut(f / "scorer.safetensors"), ("scorer.safetensors",)),
    (lambda f: (f / "scorer.safetensors").rename(f / "scorer.pt"), ("pickle", "scorer.pt")),
    (lambda f: (f / "scorer.safetensors").unlink(), ("scorer.safetensors",)),
    (lambda f: (f / "scorer.json").write_text("[]"), ("scorer.json",)),
    (lambda f: edit(f, head_dim=16), ("scorer.safetensors", "does not fit")),
    (lambda f: edit(f, n_layer=1), ("scorer.safetensors", "does not fit")),
    (lambda f: edit(f, policy="kvp"), ("unknown policy 'kvp'",)),
    (lambda f: make_checkpoint(f, n_layer=3), ("(2, 2, 8)", "(3, 2, 8)")),
    (lambda f: make_checkpoint(f, vocab_size=1000, alphabet=None), ("no tokenizer.json",))])
def test_damaged_checkpoints(decode, tmp_path, change, words):
    refused(decode("--model", damaged(tmp_path, change), *PROMPT), *words)


@pytest.mark.parametrize("key", ["n_sink", "window", "budget", "policy"])
def test_a_scorer_json_without_a_setting(decode, tmp_path, key):
    def drop(folder):
        path = folder / "scorer.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != key}))
    refused(decode("--model", damaged(tmp_path, drop), *PROMPT), key)


def test_policies_that_need_what_a_folder_lacks(decode, folders, tmp_path):
    refused(decode("--model", folders / "base", *PROMPT, "--policy", "kvpop"), "no scorer in", "base")
    make_checkpoint(tmp_path / "lonely", "kvpop")
    refused(decode("--model", tmp_path / "lonely", *PROMPT, "--policy", "knorm"), "base")  # names ../base, not there
    edit(tmp_path / "lonely", base=None)
    refused(decode("--model", tmp_path / "lonely", *PROMPT, "--policy", "knorm"), "names no base model", "--model")


@pytest.mark.parametrize("policy", [(), ("--policy", "streaming"), ("--policy", "dense")])
def test_the_shipped_scorer_of_a_real_model_says_where_its_checkpoint_belongs(decode, tmp_path, policy):
    folder = shutil.copytree(ROOT / "assets/smollm2-2048", tmp_path / "assets/smollm2-2048")
    scorers, settings = load_scorers(folder)
    assert sum(p.numel() for p in scorers.parameters()) == 1_875_150 and settings["budget"] == 2048
    done = decode("--model", folder, *PROMPT, *policy)
    refused(done, f"put its folder at {tmp_path / 'out/smollm2'}, or name another under \"base\"", "scorer.json")
