"""Generated reasoning problems with worked traces: long-range, checkable to the byte, endless, offline.

Two families share one way of doing sums: digit by digit, units first, then checked three times.
  arith   definitions over one-letter variables; the trace copies each definition, recalls its operands by name from
          anywhere before, works, states the value, and checks it by the inverse operations:
              A| U=754 .,_ M=213 n=U+M ~. x=n-M ... x?
              U:754;M:213;n=U+M U:754 M:213 4+3+0=70 5+1+0=60 7+2+0=90 n:967 967-213 7-3-0=40 ... 967n;...x?#754
  walk    a graph whose nodes name two successors and a weight; the walk adds the weight to a running total, goes left
          when the total is even and right when it is odd, and stops at the goal:
              W| k>zc57 ._ c>kb8 ... k-g?
              k>zc57 348+57 8+7+0=51 4+5+1=01 3+0+1=40 405%1c 405-57 5-7-0=81 ... 348c ... 405c-g;c>kb8 ...#405
  mark    (diagnostic, not part of FAMILIES) values in filler; up to 48 bytes after a value a "!" says that it will be
          asked for, and nothing else does until the end. At the time of the value itself nobody can know:
              M| ..~ a=421 ,_~.~_ ! ~,.,.~,~.. b=77 ,._.~,~ ... k=5 ~,..,_ ! ._~... ka?
              #k:5;a:421;
What a KV cache must hold for them: definitions until they are used once, values and records for as long as they may be
named again, scratch never again after its step. Roles drift over positions: numbers have 1 to 3 digits, unpadded, a
problem has 2 to 6 given values, filler of random length stands between definitions. Inside a step nothing reaches back
further than 60 bytes (each check repeats the numbers and the name that it needs), so that what lies beyond a
window of 64 is needed by name or not at all.

A trace is a pure function of the prompt (`solve`), so pass@1 is exact, and `check` names the first wrong step.
The split of a problem is a hash of its prompt: train, validation and test cannot share a problem.
"""
import random
import string
import zlib
from dataclasses import dataclass

FAMILIES = ("arith", "walk")  # the task; make_problem also knows "mark"
NAMES = string.ascii_letters
FILLER = ".,_~"
ALPHABET = "".join(sorted(NAMES + string.digits + FILLER + "|=+-:;?#>%! \n"))
LIMIT = 1000  # values stay below, so that they have at most 3 digits
# variables / steps / values of validation and test problems (inclusive); smaller problems are what teaches the digits
TEST_SIZES = {"arith": (15, 18), "walk": (11, 15), "mark": (24, 30)}
TRAIN_SIZES = {"arith": (4, 21), "walk": (3, 17), "mark": (3, 32)}
MARK_WITHIN = 48                                      # bytes from the end of a value to its mark, at most
MAX_LENGTH = 2816                                     # longer problems of these sizes are drawn again
SPLIT_OF_16 = {0: "test", 1: "validation"}            # the rest is train


@dataclass(frozen=True)
class Problem:
    family: str
    split: str
    index: int
    size: int    # variables (arith), steps (walk) or values (mark)
    prompt: str
    trace: str   # ends with "#" and the answer; the end-of-text token is not part of it
    answer: str


@dataclass(frozen=True)
class Verdict:
    answer_right: bool
    trace_right: bool
    first_error: int | None  # byte offset in the trace, None when it is right
    message: str


# ---------------------------------------------------------------------------------------------------------------------
# Working a problem out: the trace is a function of the prompt

def digits(a, op, b):
    """One group a digit, units first: digit op digit op carry = result digit and new carry; a op b >= 0."""
    groups, carry = [], 0
    for i in range(max(len(str(a)), len(str(b)))):
        da, db = a // 10**i % 10, b // 10**i % 10
        total = da + db + carry if op == "+" else da - db - carry
        out = int(total > 9 if op == "+" else total < 0)
        groups.append(f"{da}{op}{db}{op}{carry}={total % 10}{out}")
        carry = out
    return " ".join(groups)


def checks(a, op, b, c, name):
    """c = a op b undone by both inverse operations, then done again from the last number, all from numbers alone.
    `name` is handed on, so that the next step finds it nearby."""
    undo = "-" if op == "+" else "+"
    top, rest = (c, a) if op == "+" else (a, c)  # top - rest = b
    return (f"{c}{undo}{b} {digits(c, undo, b)} {a}{name} {top}-{rest} {digits(top, '-', rest)} {b}{name} "
            f"{b}+{rest} {digits(b, '+', rest)} {top}{name};")


def solve(prompt):
    """The steps of the trace, in order; the answer follows the '#'. Raises ValueError for a prompt of no family."""
    head, _, body = prompt.rstrip("\n").rstrip("?").partition("| ")
    items = [item for item in body.split(" ") if item and item[0] not in FILLER]
    if head == "A":
        *items, asked = items
        value, steps = {}, []
        for item in items:
            name, _, right = item.partition("=")
            if right.isdigit():
                value[name] = int(right)
                steps.append(f"{name}:{right};")
            else:
                x, op, y = right
                a, b = value[x], value[y]
                c = value[name] = a + b if op == "+" else a - b
                steps.append(f"{item} {x}:{a} {y}:{b} {digits(a, op, b)} {name}:{c} {checks(a, op, b, c, name)}")
        return steps + [f"{asked}?#{value[asked]}"]  # the question is the last item of the list
    if head == "W":
        *items, ends = items
        node, goal = ends.split("-")
        record = {item[0]: item for item in items}
        total, steps = 0, []
        while node != goal:
            left, right, weight = record[node][2], record[node][3], int(record[node][4:])
            new = total + weight
            nxt = right if new % 2 else left
            steps.append(f"{record[node]} {total}+{weight} {digits(total, '+', weight)} {new}%{new % 2}{nxt} "
                         f"{checks(total, '+', weight, new, nxt)[:-1]}-{goal};")  # there yet?
            node, total = nxt, new
        return steps + [f"#{total}"]
    if head == "M":
        *items, asked = items
        value = dict(item.split("=") for item in items if item != "!")
        return ["#"] + [f"{name}:{value[name]};" for name in asked]
    raise ValueError(f"the prompt starts with {prompt[:2]!r}: a problem starts with 'A| ', 'W| ' or 'M| '")


# ---------------------------------------------------------------------------------------------------------------------
# Making problems

def filler(rng):
    return "".join(rng.choices(FILLER, k=rng.randint(1, 9))) + " " if rng.random() < 0.5 else ""


def number(rng):
    return rng.randrange(10 ** rng.randint(1, 3))  # its width, not its size, is uniform


def arith_prompt(rng, size):
    n_given = min(rng.randint(2, 6), size - 1)
    names = rng.sample(NAMES, size)
    # two given values come first; the others stand anywhere, since a definition names only what stands before it
    given = {0, 1, *rng.sample(range(2, size), n_given - 2)} if size > 2 else {0}
    value, items = {}, []
    for i, name in enumerate(names):
        if i in given:
            value[name] = number(rng)
            items.append(f"{name}={value[name]}")
            continue
        for _ in range(8):  # prefer a value that is not there yet: equal values would hide a wrong recall
            x, y = rng.sample(list(value), 2)
            sums = rng.random() < 0.5 and value[x] + value[y] < LIMIT
            if not sums and value[x] < value[y]:
                x, y = y, x
            value[name] = value[x] + value[y] if sums else value[x] - value[y]
            if list(value.values()).count(value[name]) == 1:
                break
            del value[name]
        else:
            value[name] = value[x] + value[y] if sums else value[x] - value[y]
        items.append(f"{name}={x}{'+' if sums else '-'}{y}")
    return "A| " + "".join(f"{filler(rng)}{item} " for item in items) + f"{names[-1]}?\n"


def walk_prompt(rng, size):
    """`size` steps from the first name to the goal. Edges are drawn as the walk needs them, always towards a node whose
    next edge is still open: a walk on random edges would soon run in circles, since node and parity decide the rest.
    """
    names = rng.sample(NAMES, min(len(NAMES), size + rng.randint(2, 5)))
    width = 2 if size <= 24 else 1  # digits of the largest weight: a long walk's total must stay below LIMIT
    weight = {name: rng.randrange(1, 10 ** rng.randint(1, width)) for name in names}
    edges = {name: [None, None] for name in names}  # left, right
    start = node = names[0]
    unseen, total = set(names[1:]), 0
    for _ in range(size - 1):
        total += weight[node]
        fresh = rng.random() < 0.7
        choices = [n for n in names if n != node and edges[n][(total + weight[n]) % 2] is None and
                   (n in unseen) == fresh] or sorted(unseen)
        edges[node][total % 2] = node = rng.choice(choices)
        unseen.discard(node)
    if total + weight[node] >= LIMIT:
        return None
    total += weight[node]
    goal = edges[node][total % 2] = rng.choice(sorted(unseen))
    rng.shuffle(names)
    for name in names:
        edges[name] = [n or rng.choice(names) for n in edges[name]]
    records = (f"{filler(rng)}{n}>{''.join(edges[n])}{weight[n]} " for n in names if n != goal)
    return "W| " + "".join(records) + f"{start}-{goal}?\n"


def mark_prompt(rng, size):
    """One value every 68 to 80 bytes, further apart than a window of 64: a mark that follows within it is its own."""
    names, text = rng.sample(NAMES, size), ""
    marked = {*rng.sample(names, min(size, 2)), *(name for name in names if rng.random() < 0.2)}
    for name in names:
        value = f"{name}={number(rng)}"
        noise = "".join(rng.choices(FILLER, k=rng.randint(68, 80) - len(value)))
        at = rng.randint(2, MARK_WITHIN - 3)  # where the mark stands, with a space on either side
        text += f"{value} {noise[:at]} {'! ' if name in marked else ''}{noise[at:]} "
    return f"M| {text}{''.join(rng.sample(sorted(marked), len(marked)))}?\n"


PROMPTS = {"arith": arith_prompt, "walk": walk_prompt, "mark": mark_prompt}


def split_of(prompt):
    return SPLIT_OF_16.get(zlib.crc32(prompt.encode()) % 16, "train")


def make_problem(family, index, split="test", size=None):
    """Problem number `index` of a family and split: the same on every machine and every Python.

    size: number of variables (arith), steps (walk) or values (mark); default drawn from TRAIN_SIZES or TEST_SIZES.
    Raises ValueError for an unknown family or split, or a size that the 52 names cannot hold.
    """
    if family not in PROMPTS:
        raise ValueError(f"unknown family {family!r}: choose one of {', '.join(PROMPTS)}")
    if split not in ("train", "validation", "test"):
        raise ValueError(f"unknown split {split!r}: choose train, validation or test")
    if size is not None and not 3 <= size <= 48:
        raise ValueError(f"size {size} is out of range: problems have 3 to 48 variables or steps")
    rng = random.Random(f"{family}/{split}/{index}")
    low, high = (TRAIN_SIZES if split == "train" else TEST_SIZES)[family]
    n = size or rng.randint(low, high)
    while True:  # redraw until the prompt falls into the split
        prompt = PROMPTS[family](rng, n)
        if prompt and split_of(prompt) == split:
            steps = solve(prompt)
            trace = "".join(steps)
            if len(prompt) + len(trace) < MAX_LENGTH or n > TRAIN_SIZES[family][1]:
                return Problem(family, split, index, n, prompt, trace, trace.rpartition("#")[2])


def worth_keeping(problem):
    """-> list of bool, one a byte of prompt + trace: True for what may be named again once a window has passed, namely
    the items of the prompt and, in arith, the statement of each value. Filler and worked digits are False."""
    keep = [False] * (len(problem.prompt) + len(problem.trace))
    start = 0
    for item in problem.prompt.split(" "):
        if item[:1] not in FILLER:
            end = min(start + len(item) + 1, len(problem.prompt))
            keep[start:end] = [True] * (end - start)
        start += len(item) + 1
    if problem.family == "arith":
        start = len(problem.prompt)
        for step in solve(problem.prompt)[:-1]:
            at = 0 if step[1] == ":" else step.index(f" {step[0]}:") + 1  # given, or stated after the digits
            end = next(i for i in range(at + 2, len(step)) if not step[i].isdigit())
            keep[start + at:start + end + 1] = [True] * (end + 1 - at)
            start += len(step)
    return keep


def check(problem, text):
    """Compare a generated trace with the problem's own: Verdict names the first wrong step.

    The answer is what stands between the last '#' and the end; it can be right though a step is wrong.
    """
    answer = text.rpartition("#")[2].strip() if "#" in text else ""
    answer_right = answer == problem.answer
    if text == problem.trace:
        return Verdict(True, True, None, "right")
    pairs = zip(text, problem.trace)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(problem.trace)))
    start, number = 0, 0
    for number, step in enumerate(solve(problem.prompt), 1):
        if at < start + len(step):
            break
        start += len(step)
    else:
        return Verdict(answer_right, False, at,
                       f"first error at {at}: text goes on after the answer: {text[at:at + 20]!r}")
    got = text[start:start + len(step)]
    return Verdict(answer_right, False, at, f"first error at {at}, in step {number}: expected {step!r}, got {got!r}")


if __name__ == "__main__":
    import argparse
    parser = argparse.ArgumentParser(description="Print generated problems, or their lengths.")
    parser.add_argument("--family", choices=list(PROMPTS), default="arith")
    parser.add_argument("--split", choices=("train", "validation", "test"), default="test")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--size", type=int, help="variables, steps or values (default: drawn as the split says)")
    parser.add_argument("--lengths", type=int, metavar="N", help="print the lengths of N problems instead")
    args = parser.parse_args()
    if args.size is not None and not 3 <= args.size <= 48 or args.lengths is not None and args.lengths < 1:
        parser.error("--size wants 3 to 48, --lengths at least 1")
    if args.lengths:
        lengths = sorted(len(p.prompt) + len(p.trace) for p in
                         (make_problem(args.family, i, args.split, args.size) for i in range(args.lengths)))
        mean = sum(lengths) / len(lengths)
        std = (sum((n - mean)**2 for n in lengths) / len(lengths))**0.5
        print(f"{args.family}: mean {mean:.0f} bytes, standard deviation {std:.0f}, "
              f"least {lengths[0]}, most {lengths[-1]}")
    else:
        p = make_problem(args.family, args.index, args.split, args.size)
        print(p.prompt + p.trace)
