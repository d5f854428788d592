"""decode.py with real tokenizers and in chats: what is fed, what is kept between turns, what comes out and where."""
import io
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import data.prompts
from data.chat import QWEN3, SMOLLM2, Conversation, encode_chat, end_ids
from data.scorer_files import save_scorers
from data.tokenizer import load_tokenizer
from decode import dense_spec, generate, main, prefill, step
from flex_masks import CacheSpec
from model import ModelConfig, Transformer, load_model, save_model
from scorer import make_scorer, make_scorers, state_entries
from tiny import make_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("real")
    return SimpleNamespace(qwen3=make_folder(root / "qwen3"), smollm2=make_folder(root / "smollm2", "smollm2"),
                           llama3=make_folder(root / "llama3", "llama3", template=False), root=root)


@pytest.fixture
def decode(capfdbinary, monkeypatch):
    """The command within this process; `fed` are the prompts that it gave to generate, `done` what that returned."""
    import decode as module

    def call(*args, stdin=b"", terminal=False):
        fed, done = [], []

        def spy(model, prompts, *rest, **options):
            fed.append((prompts[0], options))
            done.append(generate(model, prompts, *rest, **options))
            return done[-1]
        lines = io.TextIOWrapper(io.BytesIO(stdin))
        lines.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stdin", lines)
        monkeypatch.setattr(module, "generate", spy)
        try:
            code = main(["--device", "cpu", *map(str, args)])
        except SystemExit as stop:  # argparse
            code = stop.code
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return SimpleNamespace(returncode=code, out=out, err=err.decode(), fed=fed, done=done)
    return call


# ----------------------------------------------------------------------------- a turn more on a kept cache

WINDOW, N_SINK = 5, 2


def tiny(policy, n_select=9):
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=200, n_layer=2, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, intermediate_size=48,
                         max_seq_len=4096)
    model = Transformer(config).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.uniform_(0.3, 2.0) if "norm" in name else p.normal_(std=0.25)
    if policy == "dense":
        return model, None, None
    scorers = make_scorers(policy, n_layer=2, n_kv_head=2, head_dim=8, window=WINDOW).double()
    with torch.no_grad():
        for p in scorers.parameters():
            p.add_(torch.randn_like(p))
    charge = state_entries(policy, 8, group_size=2, window=WINDOW)
    return model, CacheSpec(N_SINK, WINDOW, N_SINK + WINDOW + n_select + charge, charge), scorers


def turns(sizes):
    ids = torch.randperm(190, generator=torch.Generator().manual_seed(1)).tolist()  # none twice: no ties in knorm
    return [[ids.pop() for _ in range(n)] for n in sizes]


@pytest.mark.parametrize("stop", ["max_new_tokens", "end token"])
@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp", "knorm", "streaming", "random", "dense", "h2o", "keydiff"])
def test_turns_on_a_kept_cache_are_one_prompt_with_everything(policy, stop):
    """Same positions kept in every layer and head, same logits, whether the turns came one by one or all at once."""
    model, spec, scorers = tiny(policy)
    result, whole = None, []
    for prompt in turns((3, 12, 1, 9)):
        options = dict(max_new_tokens=7, resume=result)
        if stop == "end token":  # the fifth new token ends the turn
            free = generate(model, [whole + prompt], spec, scorers, max_new_tokens=7, stop_ids=[])
            options["stop_ids"] = [free.tokens[0][4]]
        result = generate(model, [prompt], spec, scorers, **{"stop_ids": [], **options})
        assert result.stop == [stop]
        whole += prompt + result.tokens[0]
        assert result.seen == [len(whole) - (stop == "max_new_tokens")]  # the last one said was not fed
    fed = whole[:result.seen[0]]
    assert spec is None or len(fed) > 1.5 * spec.n_slots  # tokens were evicted, in earlier turns too
    once = generate(model, [fed], dense_spec(len(fed) + 9) if spec is None else spec, scorers, max_new_tokens=1,
                    stop_ids=[])
    for token in (11, 190, 42)[:3 if spec else 1]:  # a dense cache has room for one more
        for layer in range(2):
            assert result.cache.kept_positions(layer) == once.cache.kept_positions(layer)
        ids = torch.tensor([token])
        torch.testing.assert_close(step(model, ids, result.cache), step(model, ids, once.cache), rtol=0, atol=1e-9)


def test_the_answer_of_a_later_turn_is_that_of_one_prompt():
    model, spec, scorers = tiny("kvpop")
    one, two = turns((20, 15))
    first = generate(model, [one], spec, scorers, max_new_tokens=6, stop_ids=[])
    later = generate(model, [two], spec, scorers, max_new_tokens=9, stop_ids=[], resume=first)
    direct = generate(model, [one + first.tokens[0] + two], spec, scorers, max_new_tokens=9, stop_ids=[])
    assert later.tokens == direct.tokens and later.seen == direct.seen
    assert later.cache is first.cache and later.steps == direct.steps == 8


def test_a_dense_cache_grows_and_a_budget_does_not():
    model, _, _ = tiny("dense")
    one, two = turns((10, 10))
    first = generate(model, [one], max_new_tokens=5, stop_ids=[])
    later = generate(model, [two], max_new_tokens=50, stop_ids=[], resume=first)
    assert first.cache.spec.n_slots == 15 and later.cache.spec.n_slots == 14 + 11 + 50
    assert later.cache.kept_positions(1) == [[list(range(14 + 11 + 49))] * 2]
    for slots in later.cache.layers:  # token t in slot t, as if it had never been smaller
        assert (slots.position[..., :74] == torch.arange(74)).all() and (slots.position[..., 74:] == -1).all()
    model, spec, scorers = tiny("streaming")
    first = generate(model, [one], spec, scorers, max_new_tokens=5, stop_ids=[])
    assert generate(model, [two], spec, scorers, max_new_tokens=50, resume=first).cache is first.cache


def test_room_of_a_resumed_row_counts_what_is_kept():
    model, spec, scorers = tiny("kvpop")
    one, two = turns((10, 10))
    first = generate(model, [one], spec, scorers, max_new_tokens=5, stop_ids=[])  # 14 seen, one pending
    with pytest.raises(ValueError, match="a prompt of 25 tokens and 4 new ones need 29 positions"):
        generate(model, [two], spec, scorers, max_new_tokens=4, max_seq_len=28, resume=first)
    with pytest.raises(ValueError, match="single row"):
        generate(model, [one, two], spec, scorers, max_new_tokens=4, resume=first)
    last = generate(model, [two], spec, scorers, max_seq_len=28, stop_ids=[], resume=first)
    assert last.stop == ["max_seq_len"] and len(last.tokens[0]) == 28 - 14 - 11
    with pytest.raises(ValueError, match="once"):  # its cache has gone on
        generate(model, [two], spec, scorers, max_new_tokens=4, resume=first)
    last.stop = ["interrupted"]  # perhaps within a step
    with pytest.raises(ValueError, match="not after an interruption"):
        generate(model, [two], spec, scorers, max_new_tokens=4, resume=last)


# ----------------------------------------------------------------------------- raw prompts

@pytest.mark.parametrize("kind", ["qwen3", "smollm2", "llama3"])
def test_raw_prompts_use_the_checkpoints_tokenizer(decode, folders, kind):
    folder = getattr(folders, kind)
    tokenizer, text = load_tokenizer(folder), "Caf\u00e9 <|im_end|> 12 \U0001f600\n"
    done = decode("--model", folder, "--prompt", text, "--max-new-tokens", 40)
    assert done.returncode == 0, done.err
    [(ids, options)] = done.fed
    assert ids == tokenizer.prefix + tokenizer.encode(text) and len(tokenizer.prefix) == (kind == "llama3")
    assert tokenizer.added["<|im_end|>"] not in ids  # what a user types is text
    assert options["temperature"] == 0 and options["max_new_tokens"] == 40
    expected = generate(load_model(folder), [ids], max_new_tokens=40, stop_ids=end_ids(folder, tokenizer)).tokens[0]
    assert done.out.decode() == tokenizer.decode(expected) + "\n"  # whole characters, control tokens unseen
    assert "policy: dense" in done.err and "stopped by: max_new_tokens" in done.err and "answer" not in done.err


def test_characters_of_several_tokens_come_out_whole(capfdbinary, folders):
    tokenizer = load_tokenizer(folders.qwen3)
    ids = tokenizer.encode("\u7e41\U0001f600")
    assert len(ids) > 4
    write, seen = data.prompts.Writer(tokenizer), []
    for token in ids + ids[:1]:
        write(0, token)
        seen.append(capfdbinary.readouterr().out)
    write.finish()
    assert all(piece.decode() for piece in seen if piece) and seen.count(b"") == len(ids) - 1
    assert b"".join(seen).decode() == "\u7e41\U0001f600" and capfdbinary.readouterr().out.decode() == "\ufffd\n"


def test_policies_on_a_folder_without_scorer_have_the_papers_settings(decode, folders):
    args = ("--model", folders.smollm2, "--prompt", "one two three", "--max-new-tokens", 300)
    done = decode(*args, "--policy", "streaming", "--max-seq-len", 2048)
    assert "budget 2048 = 4 sinks + 256 window + 1788 selected" in done.err
    done = decode(*args, "--policy", "streaming", "--budget", 270)
    assert "budget 270 = 4 sinks + 256 window + 10 selected" in done.err
    assert "entries per KV head: 270 at the peak" in done.err


def test_a_retrofit_may_name_its_base_by_hub_id(decode, folders, monkeypatch):
    from data import resolve as module
    scorers = torch.nn.ModuleList(make_scorer("kvpop", n_kv_head=2, head_dim=8, window=8, layer=i) for i in range(2))
    folder = folders.root / "retrofit"
    save_scorers(scorers, folder, dict(n_sink=2, window=8, budget=40, base="someone/tiny"))
    asked = []
    resolve = module.resolve_checkpoint
    monkeypatch.setattr(module, "resolve_checkpoint", lambda name: (
        asked.append(name), folders.qwen3 if name == "someone/tiny" else resolve(name))[-1])
    for policy in ((), ("--policy", "knorm")):
        done = decode("--model", folder, "--prompt", "one two", "--max-new-tokens", 60, *policy)
        assert done.returncode == 0 and "2 sinks + 8 window" in done.err, done.err
        assert asked.pop() == "someone/tiny"
    done = decode("--model", "someone/tiny", "--prompt", "one two", "--max-new-tokens", 3)
    assert done.returncode == 0 and "policy: dense" in done.err


def test_picture_with_token_strings(decode, folders, tmp_path, monkeypatch):
    import data.prompts as module
    drawn, draw = [], module.draw_kept
    monkeypatch.setattr(module, "draw_kept", lambda *args: (drawn.append(args), draw(*args)))
    path = tmp_path / "kept.png"
    done = decode("--model", folders.qwen3, "--prompt", "What is $5 and $6?\n", "--max-new-tokens", 60, "--policy",
                  "knorm", "--window", 8, "--budget", 40, "--picture", path)
    assert done.returncode == 0 and done.err.endswith(f"wrote {path}\n"), done.err
    ids, texts = done.fed[0][0], drawn[0][2]
    assert len(texts) == len(ids) + 59 and drawn[0][5] == 32
    tokenizer = load_tokenizer(folders.qwen3)
    plain = "".join(texts[:len(ids)]).replace("\u2423", " ").replace("\u21b5", "\n").replace(r"\$", "$")
    assert plain == "What is $5 and $6?\n" == tokenizer.decode(ids)
    assert max(len(text.replace("\\$", "$")) for text in texts) <= 6
    assert path.stat().st_size > 10_000


# ----------------------------------------------------------------------------- chats

QUESTIONS = b"Who?\n\nAnd why, <|im_end|>?\nYes.\n"


def whole_chat(style, answers, system=None, thinking=True):
    """Ids of each turn, as a Conversation gives them."""
    talk = Conversation(style, system, thinking)
    for question, answer in zip(("Who?", "And why, <|im_end|>?", "Yes."), answers):
        yield talk.say(question)
        talk.heard(answer, ended=False)


@pytest.mark.parametrize("kind, style, flags, how", [
    ("smollm2", SMOLLM2, (), {}), ("smollm2", SMOLLM2, ("--system", "Be brief."), dict(system="Be brief.")),
    ("qwen3", QWEN3, (), {}), ("qwen3", QWEN3, ("--no-thinking",), dict(thinking=False))])
def test_only_the_new_turn_is_fed(decode, folders, kind, style, flags, how):
    folder = getattr(folders, kind)
    tokenizer = load_tokenizer(folder)
    done = decode("--model", folder, "--chat", *flags, "--policy", "streaming", "--window", 8, "--budget", 40,
                  "--max-new-tokens", 30, stdin=QUESTIONS)
    assert done.returncode == 0, done.err
    answers = [tokenizer.decode(result.tokens[0]) for result in done.done]
    assert [ids for ids, _ in done.fed] == [encode_chat(tokenizer, p) for p in whole_chat(style, answers, **how)]
    assert done.out.decode() == "".join(answer + "\n" for answer in answers)
    assert [options["resume"] for _, options in done.fed] == [None, *done.done[:2]]
    assert len({id(result.cache) for result in done.done}) == 1 and done.done[-1].cache.peak_entries() == 40
    ends = [tokenizer.added["<|endoftext|>"], tokenizer.added["<|im_end|>"]]
    assert all(options["stop_ids"] == sorted(ends) for _, options in done.fed)
    n_turn = re.findall(r"^turn (\d): (\d+) tokens fed, (\d+) new, stopped by: (.*)$", done.err, re.M)
    assert n_turn == [(str(i + 1), str(len(ids)), str(len(result.tokens[0])), result.stop[0])
                      for i, ((ids, _), result) in enumerate(zip(done.fed, done.done))]
    assert f"prefill: {sum(len(ids) for ids, _ in done.fed)} tokens" in done.err
    # and the state is that of the whole as one prompt
    whole = [t for (ids, _), result in zip(done.fed, done.done) for t in ids + result.tokens[0]]
    whole, cache = whole[:done.done[-1].seen[0]], done.done[-1].cache
    held = cache.kept_positions(0)
    prefill(load_model(folder), torch.tensor([whole]), torch.tensor([len(whole)]), cache)
    assert cache.kept_positions(0) == held


def test_first_turn_from_the_flag_and_the_seed_moves_on(decode, folders):
    args = ("--model", folders.qwen3, "--chat", "--prompt", "Who?", "--max-new-tokens", 12, "--temperature", 1)
    alone, more = decode(*args, "--seed", 3), decode(*args, "--seed", 3, stdin=b"Who?\n")
    assert [len(alone.fed), len(more.fed)] == [1, 2] and more.out.startswith(alone.out)
    assert [options["seed"] for _, options in more.fed] == [3, 4]
    on_terminal = decode(*args, "--seed", 3, stdin=b"Who?\n", terminal=True)
    assert on_terminal.out == more.out and on_terminal.err.count("> ") == 2 and "> " not in more.err
    (folders.root / "turn.txt").write_text("Who?\nAnd who else?")  # a file is one turn, whatever its lines
    tokenizer, talk = load_tokenizer(folders.qwen3), Conversation(QWEN3)
    done = decode(*args[:3], "--prompt-file", "-", "--max-new-tokens", 2, stdin=b"Who?\nAnd who else?")
    same = decode(*args[:3], "--prompt-file", folders.root / "turn.txt", "--max-new-tokens", 2)
    assert [ids for ids, _ in done.fed] == [ids for ids, _ in same.fed] == [
        encode_chat(tokenizer, talk.say("Who?\nAnd who else?"))]


def test_sampling_comes_from_the_checkpoint_unless_flags_say(decode, tmp_path):
    folder = make_folder(tmp_path / "m", generation=dict(do_sample=True, temperature=0.6, top_p=0.95, top_k=20,
                                                         eos_token_id=[858, 7]))
    args = ("--model", folder, "--prompt", "Who?", "--max-new-tokens", 3)
    keys = ("temperature", "top_p", "top_k")
    for flags, values, told in (
            (("--chat",), (0.6, 0.95, 20), "temperature 0.6, top_p 0.95, top_k 20"),
            (("--chat", "--temperature", "0"), (0.0, 0.95, 20), "top_p 0.95, top_k 20"),
            (("--chat", "--temperature", "2", "--top-p", "0.5", "--top-k", "0"), (2.0, 0.5, 0), None),
            ((), (0.0, 1.0, 0), None)):
        done = decode(*args, *flags)
        assert done.returncode == 0, done.err
        assert tuple(done.fed[0][1][key] for key in keys) == values
        assert ("from generation_config.json" in done.err) == (told is not None)
        assert told is None or done.err.startswith(f"from generation_config.json: {told}\n")
        assert done.fed[0][1]["stop_ids"] == [7, 856, 858]


def test_both_end_tokens_end_a_turn(decode, folders, tmp_path):
    """The model is made to say each of them at once: nothing is printed, and the next turn closes the answer."""
    tokenizer = load_tokenizer(folders.smollm2)
    for name in ("<|im_end|>", "<|endoftext|>"):
        folder = make_folder(tmp_path / name[2:-2], "smollm2", tie_embeddings=False)
        model = load_model(folder)
        with torch.no_grad():
            model.model.norm.weight.fill_(0)
            model.lm_head.weight.fill_(0)
        save_model(model, folder, torch.float32)  # all logits are 0, and the first id is <|endoftext|>
        if name == "<|im_end|>":
            spec = json.loads((folder / "tokenizer.json").read_text())
            for token in spec["added_tokens"]:
                token["id"] = {0: 2, 2: 0}.get(token["id"], token["id"])
            spec["model"]["vocab"].update({"<|endoftext|>": 2, "<|im_end|>": 0})
            (folder / "tokenizer.json").write_text(json.dumps(spec))
        done = decode("--model", folder, "--chat", stdin=b"Who?\nWhy?\n")
        assert done.returncode == 0 and done.out == b"\n\n", done.err
        assert done.err.count("0 new, stopped by: end token") == 2
        text = load_tokenizer(folder).decode(done.fed[1][0], skip_special=False)
        assert text == "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.added["<|im_end|>"] == 2


def test_a_chat_ends_where_its_room_does(decode, folders):
    args = ("--model", folders.smollm2, "--chat", "--prompt", "Who?", "--policy", "streaming", "--window", 8,
            "--budget", 40)
    n = len(decode(*args, "--max-new-tokens", 1).fed[0][0])
    done = decode(*args, "--max-seq-len", n + 5, stdin=b"And why?\n")
    assert done.returncode == 0 and len(done.fed) == 1
    assert "5 new, stopped by: max_seq_len" in done.err and "the chat is full" in done.err
    assert f"{n + 4} positions seen" in done.err  # with its summary
    capped = decode(*args, "--max-seq-len", n + 60, "--max-new-tokens", 4, stdin=b"And why?\n")
    assert capped.err.count("4 new, stopped by: max_new_tokens") == 2
    assert decode(*args, "--max-seq-len", 2000).fed[0][1]["max_new_tokens"] is None
    assert decode(*args, "--max-seq-len", n + 40, "--max-new-tokens", 39).fed[0][1]["max_new_tokens"] == 39


# ----------------------------------------------------------------------------- what does not work

def test_refused_in_one_sentence(decode, folders, tmp_path):
    base = make_folder(tmp_path / "base", template=False)
    small = make_folder(tmp_path / "small", vocab_size=880)
    bare = make_folder(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    odd = make_folder(tmp_path / "odd", generation=dict(repetition_penalty=1.1))
    for args, words in (
            (("--model", base, "--chat", "--prompt", "a"), ("no chat template", "raw prompt")),
            (("--model", small, "--prompt", "a"), ("882 tokens, the model 880",)),
            (("--model", bare, "--prompt", "a"), ("no tokenizer.json",)),
            (("--model", odd, "--prompt", "a", "--chat"), ("repetition_penalty 1.1",)),
            (("--model", folders.qwen3), ("no prompt", "--prompt-file", "--chat")),
            (("--model", folders.qwen3, "--chat"), ("a chat without a turn",)),
            (("--model", folders.qwen3, "--prompt", ""), ("prompt is empty",)),
            (("--model", folders.qwen3, "--prompt", "a\udcff"), ("no UTF-8 bytes",)),
            (("--model", folders.qwen3, "--prompt", "a", "--system", "b"), ("--system", "add --chat")),
            (("--model", folders.qwen3, "--prompt", "a", "--no-thinking"), ("--thinking", "add --chat")),
            (("--model", folders.qwen3, "--chat", "--problem", "1"), ("--problem",)),
            (("--model", folders.smollm2, "--chat", "--prompt", "a", "--thinking"), ("knows no thinking",)),
            (("--model", folders.qwen3, "--chat", "--prompt", "a", "--max-new-tokens", "0"), ("max_new_tokens is 0",)),
            (("--model", folders.qwen3, "--chat", "--prompt", "a", "--max-seq-len", "5"), ("max_seq_len 5",)),
            (("--model", "no such folder", "--prompt", "a"), ("--model", "no hub id"))):
        done = decode(*args)
        assert done.returncode == 2 and done.out == b"" and not done.fed, args
        assert done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
        assert all(word in done.err for word in words), done.err
    done = decode("--model", folders.qwen3, "--chat", stdin=b"\xff\n")
    assert done.returncode == 2 and "not UTF-8" in done.err
    assert decode("--model", odd, "--prompt", "a", "--chat", "--temperature", 1, "--top-p", 1, "--top-k", 5,
                  "--max-new-tokens", 2).returncode == 0


def test_help_names_the_options_of_a_chat(decode):
    done = decode("--help")
    assert done.returncode == 0 and all(flag in done.out.decode() for flag in ("--chat ", "--system ", "--no-thinking"))
