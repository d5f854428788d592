"""data/traces.py against an oracle of plain integers: what a problem asks, what each byte of its trace says, and what
`check` says about wrong ones. Nothing here calls `solve` to learn what is right.
"""
import os
import re
import string
import subprocess
import sys
import zlib
from pathlib import Path
from statistics import mean, pstdev

import pytest

from data.traces import (ALPHABET, FAMILIES, MAX_LENGTH, PROMPTS, TEST_SIZES, TRAIN_SIZES, check, make_problem, solve,
                         worth_keeping)

ROOT = Path(__file__).resolve().parent.parent
SPLITS = ("train", "validation", "test")
DEFINITION = re.compile(r"(?<= )([A-Za-z])=(?:(\d+)|([A-Za-z])([+-])([A-Za-z]))(?= )")
RECORD = re.compile(r"(?<= )([A-Za-z])>([A-Za-z])([A-Za-z])(\d+)(?= )")
GROUPS = r"(\d[+-]\d[+-][01]=\d[01](?: \d[+-]\d[+-][01]=\d[01])*)"
CHECKS = rf"(\d+)([+-])(\d+) {GROUPS} (\d+)(\w) (\d+)-(\d+) {GROUPS} (\d+)(\w) (\d+)\+(\d+) {GROUPS} (\d+)(\w)"
GIVEN_STEP = re.compile(r"(\w):(\d+);")
SUM_STEP = re.compile(rf"(\w)=(\w)([+-])(\w) (\w):(\d+) (\w):(\d+) {GROUPS} (\w):(\d+) {CHECKS};")
WALK_STEP = re.compile(rf"(\w)>(\w)(\w)(\d+) (\d+)\+(\d+) {GROUPS} (\d+)%([01])(\w) {CHECKS}-(\w);")


def problems(family, n, split="test", size=None):
    return [make_problem(family, i, split, size) for i in range(n)]


def arith_values(prompt):
    """name -> int, in the order of the definitions, from the text alone."""
    values = {}
    for name, number, x, op, y in DEFINITION.findall(prompt):
        assert name not in values, "a name is defined twice"
        values[name] = int(number) if number else {"+": 1, "-": -1}[op] * values[y] + values[x]
    return values


def walk_totals(prompt):
    """[(node, total after it)] up to the goal, from the text alone; fails on a walk that does not end."""
    records = RECORD.findall(prompt)
    table = {name: (left, right, int(weight)) for name, left, right, weight in records}
    assert len(table) == len(records), "a name has two records"
    node, goal = re.search(r" ([A-Za-z])-([A-Za-z])\?\n$", prompt).groups()
    assert goal not in table  # nothing leaves the goal
    total, path = 0, []
    while node != goal:
        total += table[node][2]
        path.append((node, total))
        assert len(path) < 200, "the walk runs in circles"
        node = table[node][total & 1]
    return path


def worked(groups, a, op, b):
    """The number that the digit groups work out, each one checked; a, b are the texts of the operands."""
    width, carry, result = max(len(a), len(b)), 0, 0
    parts = groups.split(" ")
    assert len(parts) == width, (groups, a, b)
    for i, part in enumerate(parts):
        x, first, y, second, c, digit, out = re.fullmatch(r"(\d)(.)(\d)(.)(\d)=(\d)(\d)", part).groups()
        assert (x, y) == (a.zfill(width)[-1 - i], b.zfill(width)[-1 - i]) and first == second == op and int(c) == carry
        sign = 1 if op == "+" else -1
        assert int(x) + sign * (int(y) + carry) == int(digit) + sign * 10 * int(out)
        result, carry = result + int(digit) * 10**i, int(out)
    return result + (carry * 10**width if op == "+" else -carry * 10**width)


def parsed(problem):
    """The steps as regex matches; every byte of the trace is part of one, or of the question and answer at its end."""
    at, steps, end = 0, [], f"#{problem.answer}"
    if problem.family == "arith":
        end = problem.prompt[-3:-1] + end
    while problem.trace[at:] != end:
        patterns = (GIVEN_STEP, SUM_STEP) if problem.family == "arith" else (WALK_STEP,)
        steps.append(next(m for m in (p.match(problem.trace, at) for p in patterns) if m))
        at = steps[-1].end()
    return steps


def verify_checks(a, op, b, c, name, fields):
    """fields: the groups of CHECKS. c = a op b is undone for a and for b, and done once more, in plain numbers."""
    c1, undo, b1, groups1, a1, name1, m, s, groups2, b2, name2, b3, s3, groups3, m3, name3 = fields
    assert (c1, b1, a1, b2) == (c, b, a, b) and name1 == name2 == name3 == name
    assert undo == {"+": "-", "-": "+"}[op] and worked(groups1, c, undo, b) == int(a)
    assert (m, s) == ((c, a) if op == "+" else (a, c)) and worked(groups2, m, "-", s) == int(b)
    assert (b3, s3, m3) == (b, s, m) and worked(groups3, b, "+", s) == int(m)


# ---------------------------------------------------------------------------------------------------------------------
# what a trace says is true

@pytest.mark.parametrize("split, size", [("test", None), ("validation", None), ("train", None), ("train", 48)])
def test_arith_traces_against_plain_integers(split, size):
    for problem in problems("arith", 12 if size else 150, split, size):
        definitions = DEFINITION.findall(problem.prompt)
        values = arith_values(problem.prompt)
        asked = problem.prompt[-3]
        assert problem.prompt.startswith("A| ") and problem.prompt.endswith(f" {asked}?\n")
        assert asked == definitions[-1][0] and problem.answer == str(values[asked])
        assert len(values) == len(definitions) == problem.size
        assert all(0 <= v < 1000 for v in values.values())
        steps = parsed(problem)
        assert len(steps) == len(definitions)
        for step, (name, number, x, op, y) in zip(steps, definitions):
            if number:
                assert step.re is GIVEN_STEP and step.groups() == (name, number)
                continue
            a, b, c = str(values[x]), str(values[y]), str(values[name])
            assert x != y
            fields = step.groups()
            assert fields[:8] == (name, x, op, y, x, a, y, b)
            assert worked(fields[8], a, op, b) == values[name] and fields[9:11] == (name, c)
            verify_checks(a, op, b, c, name, fields[11:])


@pytest.mark.parametrize("split, size", [("test", None), ("validation", None), ("train", None), ("train", 48)])
def test_walk_traces_against_plain_integers(split, size):
    for problem in problems("walk", 4 if size else 150, split, size):
        path = walk_totals(problem.prompt)
        table = {name: rest for name, *rest in RECORD.findall(problem.prompt)}
        goal = problem.prompt[-3]
        assert problem.prompt.startswith("W| ") and len(path) == problem.size
        assert problem.answer == str(path[-1][1]) and path[-1][1] < 1000
        steps, before = parsed(problem), 0
        assert len(steps) == len(path)
        for step, (node, total), (following, _) in zip(steps, path, path[1:] + [(goal, None)]):
            left, right, weight = table[node]
            a, c = str(before), str(total)
            fields = step.groups()
            assert fields[:6] == (node, left, right, weight, a, weight)
            assert worked(fields[6], a, "+", weight) == total
            assert fields[7:10] == (c, str(total % 2), following) and following == (left, right)[total % 2]
            verify_checks(a, "+", weight, c, following, fields[10:-1])
            assert fields[-1] == goal  # named in each step, to see whether it is reached
            before = total


def test_walks_revisit_nodes_and_both_parities_matter():
    """Otherwise a walk could be copied from the prompt without keeping the total."""
    paths = [walk_totals(p.prompt) for p in problems("walk", 100)]
    assert sum(len({n for n, _ in path}) < len(path) for path in paths) > 50
    odd = mean(total % 2 for path in paths for _, total in path)
    assert 0.3 < odd < 0.7


def test_a_prompt_of_no_family():
    with pytest.raises(ValueError, match="'X\\|'.*'A\\| ', 'W\\| ' or 'M\\| '"):
        solve("X| a=1 a?\n")


# ---------------------------------------------------------------------------------------------------------------------
# which problems there are

def test_splits_are_disjoint():
    """By a hash of the prompt, so no two splits can ever share one; and none is drawn twice in a few thousand."""
    class_of = {0: "test", 1: "validation"}
    prompts = {}
    for split in SPLITS:
        for family in FAMILIES:
            for i in range(300):  # small problems: the likeliest to meet again
                problem = make_problem(family, i, split, size=4)
                assert (problem.family, problem.split, problem.index, problem.size) == (family, split, i, 4)
                assert class_of.get(zlib.crc32(problem.prompt.encode()) % 16, "train") == split
                assert problem.prompt not in prompts
                prompts[problem.prompt] = split
    for split in SPLITS:
        for problem in problems("arith", 200, split):
            assert class_of.get(zlib.crc32(problem.prompt.encode()) % 16, "train") == split


DIGEST = "import hashlib; from data.traces import make_problem as m; print(hashlib.sha256(''.join(p.prompt + p.trace " \
         "for f in ('arith', 'walk') for s in ('train', 'validation', 'test') for i in (0, 1, 999) " \
         "for p in [m(f, i, s)]).encode()).hexdigest())"
# another value means that shipped weights and results no longer speak of these problems
KNOWN = "cf660d5fe250f9c850040fb186a54a6b3f1cb8b5e1b6bff9555da7cd056181c2"


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_problems_are_the_same_in_every_process(hash_seed):
    done = subprocess.run([sys.executable, "-c", DIGEST], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONHASHSEED": hash_seed})
    assert done.stdout.strip() == KNOWN, done.stderr


def test_a_problem_is_its_index_and_split():
    """Drawing others before it changes nothing; another index, split or family is another problem."""
    want = make_problem("arith", 7)
    make_problem("walk", 3)
    assert make_problem("arith", 7) == want == make_problem("arith", 7, "test")
    others = [make_problem("arith", 8), make_problem("arith", 7, "train"), make_problem("walk", 7)]
    assert len({p.prompt for p in (want, *others)}) == 4


def test_bytes_and_alphabet():
    """decode.py refuses what is not in ALPHABET: it holds each byte that occurs, and none that was never trained."""
    seen = set()
    for family in PROMPTS:
        for split in SPLITS:
            for problem in problems(family, 60, split):
                assert problem.prompt.count("\n") == 1 and problem.prompt.endswith("\n") and "\n" not in problem.trace
                seen |= set(problem.prompt + problem.trace)
    assert sorted(seen) == list(ALPHABET) and ALPHABET.isascii()
    assert set(string.ascii_letters + string.digits) < seen


@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_spread(family):
    lengths = [len(p.prompt) + len(p.trace) for p in problems(family, 300)]
    average = mean(lengths)
    print(f"{family}: mean {average:.0f}, deviation {pstdev(lengths) / average:.3f}, "
          f"range {(max(lengths) - min(lengths)) / average:.2f} of it")
    assert 1900 < average < 2200 and max(lengths) < MAX_LENGTH
    assert pstdev(lengths) / average > 0.10 and (max(lengths) - min(lengths)) / average > 0.5
    train = [len(p.prompt) + len(p.trace) for p in problems(family, 300, "train")]
    assert max(train) < MAX_LENGTH and min(train) < 500 and max(train) > 2500


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_cover_their_range(family):
    for split, sizes in (("test", TEST_SIZES), ("validation", TEST_SIZES), ("train", TRAIN_SIZES)):
        low, high = sizes[family]
        drawn = {p.size for p in problems(family, 250, split)}
        assert min(drawn) >= low and max(drawn) <= high
        assert len(drawn) > 0.8 * (high - low + 1)  # the longest are often drawn again
    for size in (3, 20, 48):
        problem = make_problem(family, 0, "train", size)
        found = len(DEFINITION.findall(problem.prompt)) if family == "arith" else len(walk_totals(problem.prompt))
        assert found == problem.size == size
    assert len(make_problem(family, 0, size=48).trace) > MAX_LENGTH  # a size that is asked for may exceed the limit


def test_numbers_have_one_to_three_digits_and_no_padding():
    given = [n for p in problems("arith", 200) for _, n, *_ in DEFINITION.findall(p.prompt) if n]
    weights = [w for p in problems("walk", 100) for *_, w in RECORD.findall(p.prompt)]
    assert all(str(int(n)) == n for n in given + weights)
    assert {len(n) for n in given} == {1, 2, 3} and {len(w) for w in weights} == {1, 2}
    assert min(sum(len(n) == k for n in given) for k in (1, 2, 3)) > 0.2 * len(given)  # no width is rare
    for family in FAMILIES:
        for problem in problems(family, 60):
            for step in parsed(problem):
                numbers = [g for g in step.groups() if g.isdigit() and step.re is not GIVEN_STEP]
                assert all(len(n) <= 3 and str(int(n)) == n for n in numbers)


def test_two_to_six_values_are_given_anywhere():
    given = [[bool(n) for _, n, *_ in DEFINITION.findall(p.prompt)] for p in problems("arith", 300)]
    assert {sum(g) for g in given} == {2, 3, 4, 5, 6}
    assert all(g[0] and g[1] for g in given)  # nothing to add before
    late = [i / len(g) for g in given for i in range(2, len(g)) if g[i]]
    assert min(late) < 0.2 and max(late) > 0.8


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_drift_over_positions(family):
    """No position means the same in two problems, so a policy cannot keep by position."""
    pattern = DEFINITION if family == "arith" else RECORD
    some = problems(family, 200)
    for k in (4, 8, 10):
        in_prompt = [[m.start() for m in pattern.finditer(p.prompt)][k] for p in some]
        in_trace = [parsed(p)[k].start() for p in some]
        assert pstdev(in_prompt) > 6 and pstdev(in_trace) > 40, k  # bytes
        assert max(in_trace.count(x) for x in in_trace) < (0.2 if k == 4 else 0.1) * len(some), k


def test_values_rarely_repeat():
    """Equal values would hide a wrong recall."""
    values = [list(arith_values(p.prompt).values()) for p in problems("arith", 200)]
    assert sum(len(v) - len(set(v)) for v in values) < 0.05 * sum(map(len, values))


def spans(step, previous):
    """(from, to) byte spans over which something is handed on within a step without being named again."""
    at, end = step.start, step.end
    if step.re is SUM_STEP:
        yield at(1), end(10)             # the name defined -> "name:value"
        yield at(6), end(9)              # first operand -> its digits
        yield at(8), end(9)
        yield at(8), end(14)             # second operand -> first check
        yield at(9), end(11)             # digits -> value
        base, c_at, name_at = 12, at(11), at(10)
    else:
        yield at(2), end(10)             # successors -> the one taken
        yield at(4), end(6)              # weight -> sum
        yield at(5), end(7)
        yield at(6), end(13)         # weight -> first check
        yield at(7), end(8)
        if previous is not None:         # total and node: the last check of the step before ends with them
            yield previous.start(25), end(5)
            yield previous.start(26), end(1)
        base, c_at, name_at = 11, at(8), at(10)
    c1, _, b1, groups1, a1, name1, m, s, groups2, b2, name2, b3, s3, groups3, m3, name3 = range(base, base + 16)
    yield c_at, end(c1)
    yield at(c1), end(groups1)
    yield at(b1), end(groups1)
    yield at(groups1), end(a1)
    yield name_at, end(name1)
    yield at(c1), end(s)                 # c comes back in the second check
    yield at(a1), end(s)
    yield at(m), end(groups2)
    yield at(groups2), end(b2)
    yield at(name1), end(name2)
    yield at(b2), end(b3)                # the last check: from the one before it
    yield at(s), end(s3)
    yield at(b3), end(groups3)
    yield at(groups3), end(m3)
    yield at(name2), end(name3)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_reaches_further_back_than_a_window(family):
    """What lies more than 60 bytes back is needed by name or not at all; the window of the retrofit is 64."""
    reach = 0
    for problem in problems(family, 200):
        previous = None
        for step in parsed(problem):
            if step.re is not GIVEN_STEP:
                for start, stop in spans(step, previous):
                    assert start < stop
                    reach = max(reach, stop - start)
                previous = step
    print(f"{family}: {reach} bytes at most")
    assert 40 < reach <= 60


def test_what_is_worth_keeping():
    """Names, records and stated values are; filler, digits being worked and copies are not. Counted from the text."""
    for problem in problems("arith", 40):
        text = "".join(c if k else " " for c, k in zip(problem.prompt + problem.trace, worth_keeping(problem)))
        prompt, trace = text.split("\n")
        assert prompt.split() == [w for w in problem.prompt.split() if w[0] not in ".,_~"]
        values = arith_values(problem.prompt)
        assert re.findall(r"[^ ;]+", trace) == [f"{name}:{n}" for name, n in values.items()]
    for family in ("walk", "mark"):
        for problem in problems(family, 40):
            keep = worth_keeping(problem)
            kept = "".join(c for c, k in zip(problem.prompt, keep) if k)
            assert kept == re.sub(r"(?<= )[.,_~]+ ", "", problem.prompt) and not any(keep[len(problem.prompt):])


def test_a_mark_says_within_a_window_what_nothing_said_before():
    """Values of equal looks; those that a mark follows within 48 bytes, before the next value, are asked for."""
    asked_counts, unmarked = [], 0
    for problem in problems("mark", 100) + problems("mark", 100, "train"):
        body, asked = re.fullmatch(r"M\| (.*) ([A-Za-z]+)\?\n", problem.prompt).groups()
        values = [(m.end(), *m.groups()) for m in re.finditer(r"(?<![^ ])([A-Za-z])=(\d+)(?= )", body)]
        marks = [m.start() for m in re.finditer("!", body)]
        assert len(values) == problem.size and len(marks) == len(asked) == len(set(asked)) >= 2
        starts = [end - len(number) - 2 for end, _, number in values]
        assert all(b - a > 64 for a, b in zip(starts, starts[1:]))  # when a value leaves, the next has no mark yet
        marked = {name: number for (end, name, number), following in zip(values, [*starts[1:], len(body)])
                  if any(end < mark < following and mark - end <= 48 for mark in marks)}
        assert marked.keys() == set(asked)
        assert problem.trace == "#" + "".join(f"{name}:{marked[name]};" for name in asked)
        assert problem.answer == problem.trace[1:] and check(problem, problem.trace).trace_right
        wrong = check(problem, problem.trace.replace(":", ":9", 1))
        assert not wrong.answer_right and wrong.first_error is not None
        asked_counts.append(len(asked))
        unmarked += len(values) - len(asked)
    assert unmarked > 2 * sum(asked_counts) and max(asked_counts) <= 16


# ---------------------------------------------------------------------------------------------------------------------
# check

def steps_of(trace):
    """(start, text) of each step: they end in ';', and the answer is the last."""
    starts = [0, *(i + 1 for i, c in enumerate(trace) if c == ";")]
    return [(a, trace[a:b]) for a, b in zip(starts, starts[1:] + [len(trace)])]


@pytest.mark.parametrize("family", FAMILIES)
def test_check_finds_each_flipped_digit(family):
    problem = make_problem(family, 11, "test", 12)
    right = check(problem, problem.trace)
    assert (right.answer_right, right.trace_right, right.first_error, right.message) == (True, True, None, "right")
    steps = steps_of(problem.trace)
    assert len(steps) == 13
    flipped = 0
    for number, (start, step) in enumerate(steps, 1):
        for i in range(start, start + len(step)):
            if not problem.trace[i].isdigit():
                continue
            other = str((int(problem.trace[i]) + 1 + i % 9) % 10)
            verdict = check(problem, problem.trace[:i] + other + problem.trace[i + 1:])
            got = step[:i - start] + other + step[i - start + 1:]
            assert not verdict.trace_right and verdict.first_error == i
            assert verdict.answer_right is (number < len(steps))
            assert verdict.message == f"first error at {i}, in step {number}: expected {step!r}, got {got!r}"
            flipped += 1
    assert flipped > 200


def test_check_truncated_texts():
    problem = make_problem("walk", 2, "test", 5)
    steps = steps_of(problem.trace)
    for cut in (0, 1, 30, steps[1][0], steps[3][0] + 7, len(problem.trace) - len(problem.answer) - 1,
                len(problem.trace) - 1):
        verdict = check(problem, problem.trace[:cut])
        number, (start, step) = [(n, s) for n, s in enumerate(steps, 1) if s[0] <= cut][-1]
        assert (verdict.answer_right, verdict.trace_right, verdict.first_error) == (False, False, cut)
        assert f"in step {number}: " in verdict.message
        assert repr(step) in verdict.message and verdict.message.endswith(f"got {step[:cut - start]!r}")


def test_check_missing_and_extra_bytes():
    problem = make_problem("arith", 5, "test", 6)
    n, steps = len(problem.trace), steps_of(problem.trace)
    for extra, answer_right in (("x", False), ("7", False), ("\n", True), (f"#{problem.answer}", True)):
        verdict = check(problem, problem.trace + extra)
        assert (verdict.answer_right, verdict.trace_right, verdict.first_error) == (answer_right, False, n)
        assert "goes on after the answer" in verdict.message and repr(extra) in verdict.message
    at = steps[-2][0] + 4
    verdict = check(problem, problem.trace[:at] + "Q" + problem.trace[at:])  # everything after it is shifted
    assert (verdict.answer_right, verdict.first_error) == (True, at) and "in step 6: " in verdict.message
    verdict = check(problem, problem.trace.rpartition("#")[0] + "#" + "0" * len(problem.answer))
    assert not verdict.answer_right and "in step 7: " in verdict.message
    assert f"#{problem.answer}', got '" in verdict.message
    assert verdict.message.endswith(f"#{'0' * len(problem.answer)}'")
    assert check(problem, f"{problem.answer}").answer_right is False  # an answer stands behind '#'
    assert check(problem, f"#{problem.answer}").answer_right is True  # though no step is right
    assert check(problem, f"#{problem.answer}0").answer_right is False


# ---------------------------------------------------------------------------------------------------------------------
# what is refused, and the command

@pytest.mark.parametrize("args, words", [
    (("sudoku", 0), ("unknown family 'sudoku'", "arith, walk")),
    (("arith", 0, "dev"), ("unknown split 'dev'", "train, validation or test")),
    (("arith", 0, "test", 2), ("size 2", "3 to 48")),
    (("walk", 0, "test", 49), ("size 49", "3 to 48")),
    (("walk", 0, "test", 0), ("size 0", "3 to 48"))])
def test_refusals_name_what_is_wrong(args, words):
    with pytest.raises(ValueError) as error:
        make_problem(*args)
    assert all(word in str(error.value) for word in words)


def test_command_prints_problems_and_lengths():
    def run(*args):
        return subprocess.run([sys.executable, "data/traces.py", *args], cwd=ROOT, capture_output=True, text=True)
    problem = make_problem("walk", 3, "validation", 5)
    shown = run("--family", "walk", "--index", "3", "--split", "validation", "--size", "5")
    assert shown.stdout == problem.prompt + problem.trace + "\n"
    lengths = [len(p.prompt) + len(p.trace) for p in problems("arith", 20)]
    assert f"mean {mean(lengths):.0f} bytes" in run("--lengths", "20").stdout
    assert run("--family", "sudoku").returncode == 2
