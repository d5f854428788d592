r"""Questions with checkable answers: prompts, the answer a model gave, and whether it is the expected one.

- `read_questions`: maths (AIME, HMMT: the answer in \boxed{}) and multiple choice (GPQA) out of any file or hub set;
- `extract_boxed`, `extract_choice`: the final answer of a text, None when it gives none;
- `equivalent`: whether two answers are the same number, expression, tuple, set, interval or word.

Numbers are compared exactly (fractions) or to 40 digits (roots, pi), expressions with letters at a few points. What
cannot be read is compared as text, so that in doubt the verdict is "not the same". Not known: units of different
size (1 m and 100 cm), number bases, complex numbers, trigonometry. Programs (LiveCodeBench) are not run.
"""
import random
import re
import zlib
from dataclasses import dataclass
from decimal import Decimal, DecimalException, localcontext
from fractions import Fraction
from math import comb, factorial, isqrt

from data.text import read_rows

MATHS = "{}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
CHOICE = ("{}\n\n{}\n\nPlease reason step by step, and give the letter of the right answer at the end, within "
          "\\boxed{{}}.")
LETTERS = "ABCDEFGHIJ"
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
DIGITS = Decimal(10) ** -40  # two irrational numbers this close, relatively, are the same
NAME = r"([a-zA-Z](?:\([a-zA-Z]\))?(?:_\{?\w+\}?)?)\s*(?:=|\\in(?![a-z]))\s*"  # "x =", "f(x) =", "x \in"
UNITS = ("mm|cm|km|inch(?:es)?|in|ft|feet|foot|miles?|met(?:er|re)s?|degrees?|deg|hours?|minutes?|min|seconds?|sec|"
         "days?|years?|dollars?|cents?|percent|units?|kg|grams?|litres?|liters?|people|ways|points")


# ----------------------------------------------------------------------------- questions

@dataclass
class Question:
    prompt: str
    answer: str  # maths: what was expected; choice: its letter
    kind: str  # maths or choice


def read_questions(source, kind="maths", *, problem="problem", answer="answer", wrong=(), split="train", subset=None):
    """Questions of a file or hub set, `problem` and `answer` naming the fields. Choice: `wrong` names the fields of the
    wrong options (or one field with a list); their order is drawn from the question. ValueError for unknown fields."""
    out = []
    for row in read_rows(source, split, subset):
        gone = [name for name in (problem, answer, *wrong) if name not in row]
        if gone:
            raise ValueError(f"no field {gone[0]!r} in {source}: its rows have {', '.join(sorted(row))}")
        if kind == "maths":
            out.append(Question(MATHS.format(row[problem]), str(row[answer]), kind))
            continue
        others = [o for name in wrong for o in (row[name] if isinstance(row[name], list) else [row[name]])]
        if not others:
            raise ValueError("multiple choice needs the fields of the wrong options: name them in wrong")
        options = [str(row[answer]), *(str(o) for o in others if str(o) != str(row[answer]))]
        random.Random(str(row[problem])).shuffle(options)
        listed = "\n".join(f"({letter}) {option.strip()}" for letter, option in zip(LETTERS, options))
        out.append(Question(CHOICE.format(row[problem], listed), LETTERS[options.index(str(row[answer]))], kind))
    if not out:
        raise ValueError(f"{source} has no question")
    return out


def is_right(question: Question, text: str) -> bool:
    given = extract_choice(text) if question.kind == "choice" else extract_boxed(text)
    if given is None:
        return False
    return given == question.answer if question.kind == "choice" else equivalent(given, question.answer)


def extract_boxed(text: str) -> str | None:
    r"""What stands in the last whole \boxed{...} (or \fbox) of the answer, braces inside matched. Of a thinking model
    the part after </think> is the answer."""
    text = text.rsplit("</think>", 1)[-1]
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(\w+)", text))):
        if match[1]:
            return match[1]
        depth, start = 0, match.end() + 1
        for i in range(match.end(), len(text)):
            if text[i] in "{}" and text[i - 1] != "\\":
                depth += 1 if text[i] == "{" else -1
                if depth == 0:
                    return text[start:i].strip()
    return None  # none, or cut off before its end


def extract_choice(text: str) -> str | None:
    r"""The letter of the last \boxed{}, else of the last "answer is (C)" or "Answer: C"."""
    boxed = extract_boxed(text)
    if boxed is not None:
        found = re.fullmatch(r"(?:\\text\w*|\\math\w+)?\s*\{?\s*[(\[]?\s*([A-J])\s*[)\].:]?(?:[\s}].*)?", boxed, re.S)
        return found[1] if found else None
    found = re.findall(r"answer(?:\s+is)?\s*:?\s*\**\s*[(\[]?([A-J])(?![\w'])", text.rsplit("</think>", 1)[-1],
                       re.I)
    return found[-1].upper() if found else None


# ----------------------------------------------------------------------------- equivalence

def equivalent(given: str, expected: str) -> bool:
    """Whether the two answers say the same."""
    given, expected = clean(given), clean(expected)
    if given == expected:
        return given != ""
    units = [unit for _, unit in (split_unit(given), split_unit(expected))]
    if None not in units and units[0] != units[1]:
        return False
    given, expected = split_unit(given)[0], split_unit(expected)[0]
    return any(same(a, b) for a in readings(given) for b in readings(expected))


def clean(text: str) -> str:
    """Without what only changes the looks."""
    text = text.strip().strip("$").strip()
    text = re.sub(r"\\(?:left|right|displaystyle|bigl?|bigr?|Bigl?|Bigr?)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[,!;: ]|~|\\quad|\\hspace\{[^}]*\}", " ", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    for old, new in (("\u2212", "-"), ("\u03c0", r"\pi "), ("\u221e", r"\infty "), ("\u221a", r"\sqrt "), ("{,}", ","),
                     ("\u00b0", r"^\circ"), (r"\lbrace", r"\{"), (r"\rbrace", r"\}"), (r"\$", ""), (r"\%", "%")):
        text = text.replace(old, new)
    text = re.sub(r"\\(?:cdot|times|ast)(?![a-zA-Z])|[\u00b7\u00d7]", "*", text)
    text = re.sub(r"\\div(?![a-zA-Z])", "/", text)
    text = re.sub(r"(?<![\\a-zA-Z])(sqrt|pi)(?![a-zA-Z])", r"\\\1", text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".").strip()


def split_unit(text: str) -> tuple[str, str | None]:
    r"""(rest, unit) of "5\text{ cm}^2", "12 hours", "50%", "90^\circ"; (text, None) without one."""
    worded = re.fullmatch(r"(.*[\d})\]i])\s*\\(?:text|mathrm|textrm|mbox)\{\s*([^{}]*?)\s*\}\s*((?:\^\{?\d\}?)?)", text)
    bare = re.fullmatch(rf"(.*[\d}})\]])\s*(%|\^\{{?\s*\\circ\s*\}}?)\s*()|(.*\S) ((?:square |cubic )?(?:{UNITS}))"
                        r"((?:\^\{?\d\}?)?)", text)
    if worded:
        return worded[1].strip(), worded[2].lower() + worded[3].strip("^{}")
    if bare and bare[2]:
        return bare[1].strip(), "%" if bare[2] == "%" else "degrees"
    if bare and re.search(r"\d|\\", bare[4]):
        return bare[4].strip(), bare[5].lower() + bare[6].strip("^{}")
    return text, None


def readings(text: str) -> list:
    """The ways to read an answer: ("one", text), or (kind, parts) of a tuple, set, interval, list or union."""
    named = re.fullmatch(NAME + r"([(\[].*|\\\{.*)", text)  # "x = (1, 2)", "x in [0, 1)"
    inside = readings(named[2]) if named else []
    if any(kind != "one" for kind, _ in inside):
        return inside
    out = []
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text):
        out.append(("one", text.replace(",", "")))  # and as a list: below
    if r"\cup" in text:
        return [("set", [readings(part.strip()) for part in text.split(r"\cup")])]
    if r"\pm" in text:
        return [("set", [readings(text.replace(r"\pm", sign).strip().removeprefix("+")) for sign in "+-"])]
    body, kind = text, "set"
    if text.startswith(r"\{") and text.endswith(r"\}") and closes(text[1:-2] + "}"):
        body = text[2:-2]
        if not cut_commas(body)[1:]:
            return [("set", [readings(body)])] if body.strip() else [("set", [])]
    elif text[:1] in "([" and text[-1:] in ")]" and closes(text) and cut_commas(text[1:-1])[1:]:
        body, kind = text[1:-1], text[0] + text[-1]
    if kind == "set":
        body = re.sub(r"(?:,\s*)?(?:\\text\{\s*)?\b(?:and|or)\b(?:\s*\})?", ",", body)
    pieces = cut_commas(body)
    if len(pieces) == 1:
        return out + [("one", text)]
    named = [re.fullmatch(r"([a-zA-Z](?:_\{?\w+\}?)?)\s*=\s*(.+)", piece) for piece in pieces]
    if kind == "set" and all(named):
        return out + [("named", {m[1]: readings(m[2]) for m in named}), ("()", [readings(m[2]) for m in named])]
    return out + [(kind, [readings(piece) for piece in pieces])]


def closes(text: str) -> bool:
    """Whether the first bracket is closed by the last character: not so in (1)+(2)."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False


def cut_commas(text: str) -> list[str]:
    """Cut at the commas and semicolons outside of brackets."""
    pieces, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c in ",;" and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += c
    return [piece.strip() for piece in pieces if piece.strip()]


def same(a, b) -> bool:
    (kind, left), (other, right) = a, b
    if kind == other == "one":
        return same_value(left, right)
    if kind != other or len(left) != len(right):
        return False

    def match(x, y):
        return any(same(p, q) for p in x for q in y)
    if kind == "named":
        return left.keys() == right.keys() and all(match(left[name], right[name]) for name in left)
    if kind != "set":
        return all(map(match, left, right))
    rest = list(right)
    for x in left:  # sameness is transitive, so the first partner will do
        partner = next((i for i, y in enumerate(rest) if match(x, y)), None)
        if partner is None:
            return False
        del rest[partner]
    return True


def same_value(a: str, b: str) -> bool:
    names = [re.match(NAME + r"(?=\S)", text) for text in (a, b)]
    if all(names) and names[0][1] != names[1][1]:
        return False
    a, b = (text[name.end():] if name else text for text, name in zip((a, b), names))
    if plain(a) == plain(b):
        return True
    try:
        for point in range(3):
            x, y = Expression(a, point).value(), Expression(b, point).value()
            if isinstance(x, Fraction) and isinstance(y, Fraction):
                if x != y:
                    return False
                continue
            x, y = decimal(x), decimal(y)
            with localcontext() as context:
                context.prec = 60
                if abs(x - y) > DIGITS * max(abs(x), abs(y)):
                    return False
        return True
    except (Unreadable, ArithmeticError, ValueError, RecursionError, DecimalException):
        return False


def plain(text: str) -> str:
    r"""Words and what cannot be calculated: \text{Even} is even."""
    text = re.sub(r"\\(?:text\w*|math\w+|mbox)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[\s{}]", "", text).lower()


class Unreadable(Exception):
    """Not an expression that is known here."""


def decimal(x) -> Decimal:
    with localcontext() as context:
        context.prec = 60
        return x if isinstance(x, Decimal) else Decimal(x.numerator) / Decimal(x.denominator)


class Expression:
    """Value of a LaTeX or plain expression: a Fraction while exact, else a Decimal of 60 digits. Letters stand for
    numbers that depend on the letter and on `point`."""

    def __init__(self, text: str, point: int = 0):
        if len(text) > 300:
            raise Unreadable(text)
        if re.search(r"(?<!\\)(?<![a-zA-Z])[a-zA-Z]{3,}", text):
            raise Unreadable(f"words: {text}")
        self.tokens = re.findall(r"\d+\.\d*|\.\d+|\d+|\\[a-zA-Z]+|[a-zA-Z]|\S", text)
        self.i, self.point = 0, point

    def value(self):
        with localcontext() as context:
            context.prec = 60
            result = self.sum()
        if self.i != len(self.tokens):
            raise Unreadable(f"left over: {self.tokens[self.i:]}")
        return result

    def peek(self):
        return self.tokens[self.i] if self.i < len(self.tokens) else ""

    def take(self, wanted=None):
        token = self.peek()
        if not token or wanted is not None and token != wanted:
            raise Unreadable(f"{token!r} instead of {wanted!r}")
        self.i += 1
        return token

    def sum(self):
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take() == "-"
        total = self.product()
        total = -total if negative else total
        while self.peek() in ("+", "-"):
            sign = -1 if self.take() == "-" else 1
            total = add(total, times(Fraction(sign), self.product()))
        return total

    def product(self):
        total = self.factor()
        while True:
            token = self.peek()
            if token in ("*", "/"):
                self.take()
                sign = 1
                while self.peek() in ("+", "-"):
                    sign *= -1 if self.take() == "-" else 1
                other = times(Fraction(sign), self.factor())
                total = times(total, other) if token == "*" else over(total, other)
            elif token and token not in ("+", "-", ")", "}", "]", "|", ","):
                mixed = token == r"\frac" and self.tokens[self.i - 1].isdigit()  # 1\frac12 is 3/2
                other = self.factor()
                total = add(total, other) if mixed else times(total, other)
            else:
                return total

    def factor(self):
        base = self.atom()
        while self.peek() in ("^", "!"):
            if self.take() == "!":
                base = Fraction(factorial(whole(base, 2000)))
            else:
                base = power(base, self.argument())
        return base

    def argument(self):
        """{...}, or one atom: of a number its first digit, as LaTeX reads \\frac12; a sign may come first."""
        token = self.peek()
        if token == "-":
            self.take()
            return times(Fraction(-1), self.argument())
        if token.isdigit() and len(token) > 1 and self.tokens[self.i - 1] != "^":
            self.tokens[self.i:self.i + 1] = [token[0], token[1:]]
        return self.atom()

    def atom(self):
        token = self.take()
        if re.fullmatch(r"\d+\.?\d*|\.\d+", token):
            return Fraction("0" + token if token[0] == "." else token)
        if token in ("(", "{", "[", "|"):
            inside = self.sum()
            self.take({"(": ")", "{": "}", "[": "]", "|": "|"}[token])
            return abs(inside) if token == "|" else inside
        if token == r"\pi":
            return PI
        if token == r"\frac":
            return over(self.argument(), self.argument())
        if token == r"\sqrt":
            degree = Fraction(2)
            if self.peek() == "[":
                degree = self.atom()
            return power(self.argument(), over(Fraction(1), degree))
        if token in (r"\binom", r"\dbinom", r"\tbinom"):
            n, k = self.argument(), self.argument()
            return Fraction(comb(whole(n, 2000), whole(k, 2000)))
        if token in (r"\ln", r"\log"):
            base = None
            if self.peek() == "_":
                self.take()
                base = self.argument()
            inside = decimal(self.factor()).ln()
            return inside if base is None else inside / decimal(base).ln()
        if re.fullmatch(r"[a-zA-Z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega)", token) and self.peek() != "_":
            number = zlib.crc32(f"{token} {self.point}".encode())
            return Fraction(number % 9973 + 1000, 1009)  # positive, so that roots exist
        raise Unreadable(token)


def whole(x, most) -> int:
    if not isinstance(x, Fraction) or x.denominator != 1 or not 0 <= x <= most:
        raise Unreadable(str(x))
    return int(x)


def add(x, y):
    return x + y if type(x) is type(y) else decimal(x) + decimal(y)


def times(x, y):
    return x * y if type(x) is type(y) else decimal(x) * decimal(y)


def over(x, y):
    return x / y if type(x) is type(y) else decimal(x) / decimal(y)


def power(x, y):
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        if y.denominator == 1:
            if abs(y) * max(x.numerator.bit_length(), x.denominator.bit_length()) > 200_000:
                raise Unreadable(f"{x}^{y}")
            return x ** int(y)
        if y == Fraction(1, 2) and x >= 0:
            root = Fraction(isqrt(x.numerator), isqrt(x.denominator))
            if root * root == x:
                return root
        if x < 0 and y.denominator % 2:  # an odd root
            return (-1) ** (y.numerator % 2) * power(-x, y)
    x, y = decimal(x), decimal(y)
    if x < 0 or abs(y) > 4000:
        raise Unreadable(f"{x}^{y}")
    return x ** y
