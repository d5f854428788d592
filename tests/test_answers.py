r"""data/answers.py: answers written by hand, those that must count as the same and those that must not."""
import json

import pytest

from data.answers import CHOICE, Question, equivalent, extract_boxed, extract_choice, is_right, read_questions

SAME = [
    ("42", "42"), ("042", "42"), ("42.0", "42"), ("42.", "42"), ("$42$", "42"), (" 42 ", "42"), ("+7", "7"),
    ("1,234", "1234"), ("1{,}234,567", "1234567"), (r"12\,345", "12345"), ("-5", "\u22125"),
    (r"\frac{3}{4}", "3/4"), (r"\dfrac{3}{4}", "0.75"), (r"\frac34", ".75"), (r"\frac{6}{8}", r"\tfrac{3}{4}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"-\frac12", "-0.5"), (r"1\frac{1}{2}", "3/2"), (r"\frac{1}{-2}", "-1/2"),
    (r"2\sqrt{2}", r"\sqrt{8}"), (r"\sqrt2", r"\sqrt{2}"), (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"\sqrt[3]{54}", r"3\sqrt[3]{2}"), (r"\sqrt{16}", "4"), ("sqrt(2)/2", r"\frac{\sqrt 2}{2}"),
    (r"\frac{\sqrt{5}-1}{2}", r"\frac{2}{1+\sqrt5}"), (r"\sqrt{3+2\sqrt2}", r"1+\sqrt{2}"),
    (r"2\pi", r"2 \cdot \pi"), ("2pi", r"2\pi"), (r"\frac{\pi}{3}", r"\pi/3"), ("\u03c0/2", r"\frac{\pi}{2}"),
    (r"2^{10}", "1024"), ("2^10", "1024"), (r"10^{-2}", "0.01"), (r"8^{1/3}", "2"), (r"1.5\times10^3", "1500"),
    (r"2^{100}-1", r"-1+2^{100}"), (r"5!", "120"), (r"\binom{6}{2}", "15"), (r"\log_2 8", "3"),
    (r"2\ln 3", r"\ln 9"), ("|-3|", "3"),
    (r"(1,2)", r"\left(1, 2\right)"), (r"(\frac12, 3)", "(0.5,3)"), (r"\{1,2,3\}", r"\left\{3, 1, 2\right\}"),
    ("1, 2", "2,1"), ("1, 2", r"\{1,2\}"), ("1 and 2", "1,2"), (r"1 \text{ or } 2", "2, 1"), (r"\{5\}", r"\{ 5.0 \}"),
    (r"\pm 3", "3, -3"), (r"1\pm\sqrt{2}", r"\{1-\sqrt2, 1+\sqrt2\}"), ("100,200", "200, 100"), ("100,200", "100200"),
    ("[0,1)", r"\left[0, 1\right)"), (r"(-\infty, 1]", r"(-\infty,1.0]"),
    (r"(-\infty,-1)\cup(1,\infty)", r"(1, \infty) \cup (-\infty, -1)"), ("(1,(2,3))", "(1, (2, 3.0))"),
    (r"x=5", "5"), ("x = 5", "x=5.0"), (r"f(x)=x^2", "x^2"), ("x=1,y=2", "y=2, x=1"), ("x=1, y=2", "(1,2)"),
    (r"x \in [0,1]", "[0,1]"), (r"5\text{ cm}", "5"), (r"5\text{ cm}^2", r"5 \mathrm{cm}^2"), ("12 hours", "12"),
    (r"90^\circ", "90"), (r"90^{\circ}", r"90 \text{ degrees}"), (r"50\%", "50"), (r"\$20", "20"), ("3 units", "3"),
    ("x^2+1", "1+x^2"), ("n(n+1)/2", r"\frac{n^2+n}{2}"), (r"(a+b)^2", "a^2+2ab+b^2"), (r"\frac{2x}{4}", "x/2"),
    (r"\text{Even}", "even"), (r"\textbf{yes}", "Yes"), ("Evelyn", r"\text{Evelyn}"),
]
DIFFERENT = [
    ("42", "43"), ("42", "-42"), ("", ""), ("", "0"), ("1234", "1.234"), ("3.14", r"\pi"), ("0.333", "1/3"),
    ("3.14159265358979323846", r"\pi"), (r"\frac{3}{4}", r"\frac{4}{3}"), ("1/2", "12"), (r"1\frac12", "1/2"),
    (r"\sqrt{2}", "1.41421356237"), (r"\sqrt{2}", r"\sqrt{3}"), (r"2\sqrt3", r"3\sqrt2"), (r"\sqrt[3]{2}", r"\sqrt{2}"),
    (r"\pi", r"2\pi"), ("2^{10}", "210"), ("2^{100}", "2^{100}+1"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"),
    ("[0,1)", "(0,1]"), ("(1,2)", r"\{1,2\}"), (r"\{1,2\}", r"\{1,2,3\}"), (r"\{1,1,2\}", r"\{1,2,2\}"), ("1,2", "1"),
    (r"\pm 3", "3"), ("x=5", "y=5"), ("x=1,y=2", "x=2,y=1"), ("x=1, y=2", "(2,1)"), (r"5\text{ cm}", r"5\text{ m}"),
    (r"5\text{ cm}^2", r"5\text{ cm}^3"), (r"50\%", "0.5"), ("x^2", "x^3"), ("2x", "x"), ("a-b", "b-a"), ("xy", "x+y"),
    (r"\text{even}", r"\text{odd}"), ("cat", "act"), ("1011_2", "1011"), (r"(-\infty,1)", r"(-\infty,2)"),
    (r"(0,1)\cup(2,3)", "(0,1)"), ("1/0", "1/0 + 1"), (r"\sin x", r"\cos x"), ("10^{10^{10}}", "10^{10^{11}}"),
    ("10", "1,0"), ("x", "y"), ("5", "5!"), ("0.1", "0.10000000001"), (r"\frac{1}{2", "1/2"), ("(((", ")))"),
    (r"a_1", r"a_2"), ("3:4", "3:5"), ("no", "yes"), ("9" * 400, "9" * 399 + "8"),
]


@pytest.mark.parametrize("a, b", SAME, ids=range(len(SAME)))
def test_the_same(a, b):
    assert equivalent(a, b) and equivalent(b, a)


@pytest.mark.parametrize("a, b", DIFFERENT, ids=range(len(DIFFERENT)))
def test_not_the_same(a, b):
    assert not equivalent(a, b) and not equivalent(b, a)


def test_every_answer_is_itself():
    for a, b in SAME:
        assert equivalent(a, a) and equivalent(b, b)
    for text in (r"\sin x", "1011_2", r"\frac{1}{2", "3:4", "9" * 400):
        assert equivalent(text, f" {text} ")


@pytest.mark.parametrize("text, answer", [
    (r"so \boxed{42}.", "42"), (r"\boxed{1} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"$\boxed{ \{1,2\} }$", r"\{1,2\}"),
    (r"\boxed{\text{a {b} c}} then \boxed{un", r"\text{a {b} c}"), (r"\boxed 7", "7"), (r"\fbox{3}", "3"),
    (r"<think>\boxed{1}</think> it is \boxed{2}", "2"), (r"<think>\boxed{1}</think> no box", None), ("42", None),
    (r"\boxed{", None), (r"\boxed{\left\{ x : x > 1 \right\}}", r"\left\{ x : x > 1 \right\}"), (r"\boxed{}", ""),
])
def test_boxed(text, answer):
    assert extract_boxed(text) == answer


@pytest.mark.parametrize("text, letter", [
    (r"\boxed{C}", "C"), (r"\boxed{(B)}", "B"), (r"\boxed{\text{D}}", "D"), (r"\boxed{\textbf{(A)}}", "A"),
    (r"\boxed{B. 5 m/s}", "B"), (r"\boxed{A) red}", "A"), ("The answer is (C).", "C"), ("Answer: B", "B"),
    ("**Answer: D**", "D"), ("answer is A. No, the answer is B", "B"), ("Answer: **C**", "C"),
    ("Answer is A's", None), ("A nice question", None), (r"\boxed{42}", None), ("the answer is All of them", None),
    (r"<think>Answer: A</think> The answer is B.", "B"), (r"\boxed{Carbon}", None),
])
def test_choice(text, letter):
    assert extract_choice(text) == letter


def test_questions(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(dict(question="1+1? {}", solution=2)) + "\n")
    (question,) = read_questions(path, problem="question", answer="solution")
    assert question.prompt.startswith("1+1? {}\n\n") and question.prompt.endswith(r"\boxed{}.")
    assert question.answer == "2"
    assert is_right(question, r"\boxed{2.0}") and not is_right(question, "2") and not is_right(question, r"\boxed{3}")
    with pytest.raises(ValueError, match="no field 'problem' in .*: its rows have question, solution"):
        read_questions(path)
    rows = [dict(q=f"which {i}?", right=f"r{i}", w1="x", w2="y", w3=["z", "v"]) for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = dict(problem="q", answer="right", wrong=("w1", "w2", "w3"))
    questions = read_questions(path, "choice", **fields)
    assert questions == read_questions(path, "choice", **fields)
    assert {q.answer for q in questions} == set("ABCDE")
    for i, q in enumerate(questions):
        assert f"({q.answer}) r{i}" in q.prompt and "(F)" not in q.prompt
        other = "B" if q.answer == "A" else "A"
        assert is_right(q, rf"\boxed{{{q.answer}}}") and not is_right(q, rf"\boxed{{{other}}}")
    with pytest.raises(ValueError, match="needs the fields of the wrong options"):
        read_questions(path, "choice", problem="q", answer="right")
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no question"):
        read_questions(path)
    assert CHOICE.count("{}") == 3 and Question("p", "A", "choice").kind == "choice"
