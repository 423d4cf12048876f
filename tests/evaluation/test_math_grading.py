# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Final answers, which of them are correct, and grading that no answer can hang."""

import time
from pathlib import Path

import pytest

from diff_transformer.evaluation.protocols.math import answers, grading
from diff_transformer.evaluation.protocols.math.answers import final_answer, is_correct, last_boxed
from diff_transformer.evaluation.protocols.math.grading import CRASHED, RIGHT, TIMED_OUT, WRONG, grade

SOLUTIONS = [
    ("First \\boxed{1}, then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
    ("\\boxed{\\text{Yes}} is the answer: no doubt, 3 times.", "\\text{Yes}"),
    ("so $\\boxed 5$ it is", "5"),
    ("The answer is $\\left( 1 \\right. )$. So.", "$\\left( 1 \\right. )$"),
    ("\\boxed{7}, or rather \\boxed{\\frac{1}{", "7"),  # cut off by the limit
    ("\\fbox{ 8 }", "8"),
    ("The answer is 3. Wait, the answer is 4. Done in 5 minutes.", "4"),
    ("The answer is $3.50 per egg.", "$3.50 per egg"),
    ("**Answer:** Mrs. Hilt\nShe has 3.", "Mrs. Hilt"),
    ("The answer is:\n\\[\n12\n\\]", "12"),
    ("2 + 3 = 5, the answer is", "5"),
    ("That makes $1,250.", "1,250"),
    ("3/4 of it", "3/4"),
    ("from -10 to -2", "-2"),
    ("pages 10-12", "12"),
    ("I do not know.", None),
    ("", None),
]

RIGHT_ANSWERS = {
    # numbers, with units and percent
    "18": ["18.00", "$18", "\\$18.00", "18 dollars per day", "18\\text{ dollars}", "18 cm", "18 \\mathrm{~m}"],
    "1500": ["1,500", "1{,}500", "1\\,500"],
    "0.5": [".5"],
    "-5": ["- 5"],
    "0.6666666667": ["\\frac{2}{3}"],
    "9 hours": ["9"],
    "2\\sqrt{3}": ["2\\sqrt{3}\\text{ cm}^2", "\\sqrt{12}"],
    "64^{\\circ}": ["64°"],
    "50%": ["50\\%", "0.5", "50"],
    "15": ["15 percent"],
    # fractions, expressions
    "\\frac{3}{2^{2}}": ["0.75"],
    "1.75": ["1 3/4", "1\\frac{3}{4}"],
    "- \\frac { 2 } { 9 }": ["$-2/9$"],
    "b ^ { 2 } - 9 a ^ { 2 }": ["(b - 3a)(b + 3a)"],
    "\\frac{x+10}{x+4}": ["1+\\frac{6}{x+4}"],
    "10 \\ln (2)": ["\\ln 1024"],
    "\\left[\\begin{array}{c}1 \\\\ 2\\end{array}\\right]": ["\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"],
    # relations, intervals, several answers
    "x = 5": ["5"],
    "5": ["x = 5"],
    "x > - 2": ["x>-2"],
    "x \\ge - 4": ["[-4, \\infty)"],
    "(1,2]": ["\\left(1, 2\\right]"],
    "\\{x \\mid x<0\\}": ["\\{x \\mid x < 0\\}"],
    "x=2, x=3": ["3 and 2"],
    "3,-2": ["x=-2 \\text{ or } x=3"],
    "\\pm 6, \\pm 2": ["6, 2, -2, -6"],
    # words
    "surplus": ["Surplus."],
    "Yes": ["\\text{yes}"],
    "Mrs. Hilt": ["Mrs. Hilt"],
    "3:30 p.m.": ["3:30 p.m"],
    "C": ["C"],
}

WRONG_ANSWERS = {
    "18": ["81"],
    "5": ["-5", "I do not know", "\\frac{", ""],
    "1500": ["1.5"],
    "12": ["1,2"],
    "0.67": ["\\frac{2}{3}"],
    "11/2": ["1 1/2"],
    "3/4": ["1 3/4"],
    "50%": ["5"],
    "2": ["2x", "2 pi", "2 or 3"],
    "3 xy": ["3"],
    "4 t": ["4"],
    "4": ["4t"],
    "2 or 3": ["2"],
    "2\\sqrt{3}": ["\\sqrt{6}"],
    "[1,2)": ["(1,2)"],
    "(1,2)": ["(2,1)"],
    "x > - 2": ["x \\ge -2"],
    "x=2, x=3": ["x=2"],
    "surplus": ["shortage"],
    "no": ["on"],
    "Yes": ["1"],
    "The 60th caller.": ["60"],
}

ENDLESS = "9^{9^{9^9}}"


def test_final_answer():
    for solution, answer in SOLUTIONS:
        assert final_answer(solution) == answer, solution


def test_last_boxed():
    assert last_boxed("\\boxed{a{b}c} {d}") == "a{b}c"
    assert last_boxed("\\boxed{\\left\\{ 1 \\right.} and so on") == "\\left\\{ 1 \\right."
    assert last_boxed("} \\boxed{1} { \\boxed{") == "1"
    assert last_boxed("boxed{1} \\boxed") is None
    start = time.perf_counter()
    assert last_boxed("\\boxed{" * 100_000) is None
    assert time.perf_counter() - start < 10


def test_is_correct_accepts():
    for gold, found in RIGHT_ANSWERS.items():
        assert all(is_correct(gold, answer) for answer in [gold, *found]), gold


def test_is_correct_rejects():
    for gold, found in WRONG_ANSWERS.items():
        assert not any(is_correct(gold, answer) for answer in found), gold


@pytest.fixture
def deadly(tmp_path, monkeypatch):
    """The answer "deadly" ends the process that grades it."""
    script = tmp_path / "deadly.py"
    script.write_text(
        f"import os, sys; sys.path.insert(0, {str(Path(answers.__file__).parent)!r}); import answers\n"
        "is_correct = answers.is_correct\n"
        "answers.is_correct = lambda gold, x: os._exit(3) if x == 'deadly' else is_correct(gold, x)\n"
        "answers.serve(float(sys.argv[1]))\n"
    )
    monkeypatch.setattr(grading, "_SCRIPT", str(script))


@pytest.mark.process
def test_grade_keeps_the_order_after_any_answer(deadly):
    pairs = [("1", "1.0"), ("2", "3"), ("2", ENDLESS), ("4", None), ("5", "deadly"), ("6", "6"), ("1", "\ud800")]
    start = time.perf_counter()
    outcomes = grade([*pairs, ("é", "\\text{é}\n")], processes=2, time_limit=0.5)
    assert outcomes == [RIGHT, WRONG, TIMED_OUT, WRONG, CRASHED, RIGHT, WRONG, RIGHT]
    assert time.perf_counter() - start < 60, "the time limit does not hold"
    assert grade([("1", None)]) == [WRONG] and grade([]) == [], "no answer starts a process"


@pytest.mark.process
def test_grade_rejects_a_process_that_does_not_start(tmp_path, monkeypatch):
    script = tmp_path / "ends.py"
    script.write_text("raise SystemExit(4)")
    monkeypatch.setattr(grading, "_SCRIPT", str(script))
    with pytest.raises(RuntimeError, match="did not start: its exit code is 4"):
        grade([("1", "1")], processes=1)
