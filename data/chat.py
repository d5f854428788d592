"""Chats as text and as ids: the templates of ChatML models (SmolLM2, Qwen3-Instruct-2507) and of Qwen3.

- `chat_style(folder)` recognises a style in the template text of a checkpoint, or refuses it by name. Templates are
  programs (jinja); none is run here: each style is written out below, and tested against recorded renderings;
- `parts` -> `render` (text) and `encode_chat` (ids): control tokens come from the template alone, so a user who types
  "<|im_end|>" has typed ten characters and ended nothing;
- `Conversation`: what to feed when a turn is added to a cache that already holds the turns before;
- `end_ids`, `sampling_defaults`: when to stop and how to sample, from the files of the checkpoint.

Thinking (Qwen3): "off" is what ADDS something, an empty think block that the model would otherwise write itself.
"""
import json
import re
from dataclasses import dataclass
from pathlib import Path

START, END = "<|im_start|>", "<|im_end|>"
NO_THOUGHTS = "<think>\n\n</think>\n\n"
# in all templates of Qwen3 that think: which answers keep their thoughts, and how those are written
QWEN3_WRITES = ("loop.index0 > ns.last_query_index", "loop.last or (not loop.last and reasoning_content)",
                "'\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n')")


@dataclass(frozen=True)
class Style:
    """How a family writes chats. system: the prompt it adds where the messages bring none, None for none.
    thinking: "never" (plain ChatML), "switch" (Qwen3: on or off), "always" (Qwen3-Thinking-2507)."""
    name: str
    system: str | None = None
    thinking: str = "never"


CHATML = Style("chatml")
SMOLLM2 = Style("chatml", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")
QWEN3 = Style("qwen3", thinking="switch")


def chat_style(folder) -> Style:
    """Style of a checkpoint folder, from chat_template.jinja or the chat_template of tokenizer_config.json.
    FileNotFoundError without a template (a base model: prompt it with raw text), ValueError for one not known."""
    folder = Path(folder)
    template = (folder / "chat_template.jinja").read_text() if (folder / "chat_template.jinja").is_file() else None
    if template is None:
        template = read_settings(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if not template:
        raise FileNotFoundError(f"{folder} has no chat template: it is a base model; give it a raw prompt")
    return detect_style(template)


def detect_style(template: str) -> Style:
    """ValueError names the first thing in the template that no style here writes."""
    other = re.search(r"<\|(start_header_id|start_of_role|user|system)\|>|<start_of_turn>|\[INST\]|<<SYS>>", template)
    if other or START not in template or END not in template:
        what = f"with {other[0]}" if other else f"without {START} and {END}"
        raise ValueError(f"a chat template {what} is not supported: only ChatML and Qwen3 are")
    if re.search(r"\|\s*trim|strip\(", template.replace("strip('\\n')", "")):
        raise ValueError("a chat template that trims the messages is not supported")
    thinks = all(text in template for text in QWEN3_WRITES)
    if thinks and "enable_thinking" in template and "'<think>\\n\\n</think>\\n\\n'" in template:
        return QWEN3
    if thinks and re.search(r"assistant\\n<think>\\n'", template) and "enable_thinking" not in template:
        return Style("qwen3", thinking="always")
    if "<think>" in template or "enable_thinking" in template:
        raise ValueError("a chat template with <think> or enable_thinking that is not Qwen3's is not supported")
    default = re.search(rf"{re.escape(START)}system(?:\\n|\n)([^'\"{{}}]+?){re.escape(END)}", template)
    return Style("chatml", default[1].replace("\\n", "\n") if default else None)


# ----------------------------------------------------------------------------- rendering

def parts(messages: list[dict], style: Style, thinking: bool = True, prompt: bool = True) -> list[tuple[str, bool]]:
    """[(text, is it a control token)] of messages [{"role": system|user|assistant, "content": str}], an assistant's
    perhaps with "reasoning_content": str.
    prompt: end with the opening of the assistant's turn. Of Qwen3's own earlier answers the thoughts are left out, as
    its template does. ChatML's templates drop reasoning_content; to learn from it, `keep_thoughts` first.
    ValueError for other roles, for contents that are no text, for thinking that cannot be."""
    check(messages, style, thinking)
    out = []
    if style.system is not None and messages[0]["role"] != "system":
        out += turn("system", style.system)
    # thoughts stay only in answers after the last question: an answer under way, or one to learn from
    asked = max((i for i, m in enumerate(messages) if m["role"] == "user" and not (
        m["content"].startswith("<tool_response>") and m["content"].endswith("</tool_response>"))),
        default=len(messages) - 1)  # the result of a tool asks nothing
    for i, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "assistant" and style.name == "qwen3":
            thoughts, content = split_thoughts(content, message.get("reasoning_content"))
            if i > asked and (i == len(messages) - 1 or thoughts):
                content = with_thoughts(thoughts, content)
        out += turn(message["role"], content)
    return out + opening(style, thinking) if prompt else out


def with_thoughts(thoughts, content):
    return "<think>\n" + thoughts.strip("\n") + "\n</think>\n\n" + content.lstrip("\n")


def keep_thoughts(messages: list[dict], style: Style) -> list[dict]:
    """messages as an example to learn from: where the template has no place for reasoning_content (ChatML), every
    answer opens with it, written as Qwen3 writes it."""
    if style.name == "qwen3":
        return messages
    check(messages, style, thinking=True)
    return [dict(role=m["role"], content=with_thoughts(m["reasoning_content"], m["content"]))
            if m.get("reasoning_content") else m for m in messages]


def split_thoughts(content: str, thoughts: str | None = None) -> tuple[str, str]:
    """(thoughts, answer) of what a thinking model wrote, unless a data set gives the thoughts apart."""
    if thoughts is not None:
        return thoughts, content
    if "</think>" not in content:
        return "", content
    thoughts = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return thoughts, content.split("</think>")[-1].lstrip("\n")


def turn(role, content):
    return [(START, True), (f"{role}\n{content}", False), (END, True), ("\n", False)]


def opening(style, thinking):
    block = {"never": "", "always": "<think>\n", "switch": "" if thinking else NO_THOUGHTS}[style.thinking]
    return [(START, True), (f"assistant\n{block}", False)]


def check(messages, style, thinking):
    if not messages:
        raise ValueError("a chat needs at least one message")
    for message in messages:
        if message.get("role") not in ("system", "user", "assistant"):
            raise ValueError(f"role {message.get('role')!r} is not supported: use system, user or assistant")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"the content of a {message['role']} message must be text")
        thoughts = message.get("reasoning_content")
        if thoughts and (message["role"] != "assistant" or not isinstance(thoughts, str)):
            raise ValueError("reasoning_content must be text, and an assistant's: no other message has thoughts")
    if not thinking and style.thinking == "always":
        raise ValueError("this model always thinks: thinking cannot be switched off")


def render(messages, style: Style, thinking: bool = True, prompt: bool = True) -> str:
    """The text, equal to what the template gives (with add_generation_prompt=prompt, enable_thinking=thinking)."""
    return "".join(text for text, _ in parts(messages, style, thinking, prompt))


def encode_chat(tokenizer, some: list[tuple[str, bool]]) -> list[int]:
    """Ids of parts. Text between two control tokens is encoded in one piece, as the whole rendering would be."""
    ids, text = [], ""
    for part, control in some:
        if not control:
            text += part
            continue
        if part not in tokenizer.added:
            raise ValueError(f"the tokenizer has no {part}: this is no model for ChatML")
        ids += tokenizer.encode(text) + [tokenizer.added[part]]
        text = ""
    return ids + tokenizer.encode(text)


class Conversation:
    """Turns on a cache that is kept: `say` gives the parts to feed next, `heard` takes what the model answered.

    What has been fed and sampled stays as it was. For ChatML the whole is exactly `render(messages)`. Qwen3's template
    would drop the thoughts of earlier answers; here they stay in the cache, for its policy to keep or evict."""

    def __init__(self, style: Style, system: str | None = None, thinking: bool = True):
        self.style, self.thinking = style, thinking
        self.messages = [] if system is None else [dict(role="system", content=system)]
        self._ended = False

    def say(self, content: str) -> list[tuple[str, bool]]:
        first = not any(message["role"] == "user" for message in self.messages)
        message = dict(role="user", content=content)
        check([*self.messages, message], self.style, self.thinking)
        self.messages.append(message)
        if first:
            return parts(self.messages, self.style, self.thinking)
        closing = [("\n", False)] if self._ended else [(END, True), ("\n", False)]
        return closing + turn("user", content) + opening(self.style, self.thinking)

    def heard(self, content: str, ended: bool):
        """The answer, without its end token. ended: whether <|im_end|> was sampled AND fed to the cache; an answer cut
        by a cap, ended by another token or whose end token was not fed is closed by the next `say`."""
        self.messages.append(dict(role="assistant", content=content))
        self._ended = ended


# ----------------------------------------------------------------------------- settings of a checkpoint

def end_ids(folder, tokenizer) -> list[int]:
    """Ids that end an answer, ascending: eos of generation_config.json, config.json and tokenizer_config.json, and both
    of <|im_end|> and <|endoftext|> where the tokenizer has them; a model may end a chat with either."""
    ids = set(tokenizer.eos_ids)
    for name in ("generation_config.json", "config.json"):
        eos = read_settings(Path(folder) / name).get("eos_token_id")
        ids |= set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return sorted(ids | {tokenizer.added[text] for text in (END, "<|endoftext|>") if text in tokenizer.added})


def sampling_defaults(folder) -> dict:
    """temperature, top_p, top_k of generation_config.json, those that it gives; do_sample false is temperature 0.
    ValueError for a setting that would change the samples and that decoding here does not have."""
    settings = read_settings(Path(folder) / "generation_config.json")
    for name, off in (("repetition_penalty", 1.0), ("min_p", 0.0), ("typical_p", 1.0), ("num_beams", 1),
                      ("no_repeat_ngram_size", 0), ("penalty_alpha", 0.0)):
        if settings.get(name) not in (None, off):
            raise ValueError(f"generation_config.json asks for {name} {settings[name]}, which is not supported: give "
                             "temperature, top_p and top_k yourself")
    if settings.get("do_sample") is False:
        return dict(temperature=0.0)
    return {name: settings[name] for name in ("temperature", "top_p", "top_k") if settings.get(name) is not None}


def read_settings(path: Path) -> dict:
    """A JSON object, {} when the file is not there."""
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content
