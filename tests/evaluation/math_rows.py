# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A row of each of the eight benchmarks, with the columns that are read, its question and gold answer by hand."""

import json

ROWS = {
    "gsm8k": (
        {
            "question": "Ann sells 40 eggs a day for 25 dollars each. What does she make in a day and a half?",
            "answer": "She sells 40 * 1.5 = <<40*1.5=60>>60 eggs.\nThat is 60 * 25 = $<<60*25=1500>>1500.\n#### 1,500",
        },
        "Ann sells 40 eggs a day for 25 dollars each. What does she make in a day and a half?",
        "1500",
    ),
    "math": (
        {
            "problem": "What is $\\frac{1}{2}$ of $\\frac{3}{2}$?",
            "solution": "It is not $\\boxed{\\frac{3}{2}}$ but $\\boxed{\\frac{3}{2^{2}}}$.",
        },
        "What is $\\frac{1}{2}$ of $\\frac{3}{2}$?",
        "\\frac{3}{2^{2}}",
    ),
    "svamp": (
        {
            "Body": "There are 87 oranges and 290 bananas",
            "Question": "How many bananas more are there? ",
            "Answer": 203.0,
        },
        "There are 87 oranges and 290 bananas. How many bananas more are there?",
        "203",
    ),
    "asdiv": (
        {"body": "Ann has 7 apples and Ben 9.", "question": "How many have they?", "answer": "16 (apples)"},
        "Ann has 7 apples and Ben 9. How many have they?",
        "16",
    ),
    "mawps": (
        {"input": "What is two thirds of 1 ?", "target": 0.6666666667},
        "What is two thirds of 1 ?",
        "0.6666666667",
    ),
    "carp_en": (
        {"content": "If $x + 2 > 0$, then ____?", "answer": "x > - 2"},
        "If $x + 2 > 0$, then ____?",
        "x > - 2",
    ),
    "tabmwp": (
        {
            "table_title": "Rice",
            "table": "Price | Demand | Supply\n$985 | 7,900 | 12,200",
            "question": "Look at the table. Is there a shortage or a surplus?",
            "choices": ["shortage", "surplus"],
            "answer": "surplus",
        },
        'Read this table about "Rice" and answer the question.\nPrice | Demand | Supply\n$985 | 7,900 | 12,200\n'
        "Look at the table. Is there a shortage or a surplus? Choose from: shortage, surplus.",
        "surplus",
    ),
    "college_math": (
        {"question": "Solve: $x^2=5x-6$", "answer": "$x=2$, $x=3$ ", "data_topic": "college_math.algebra"},
        "Solve: $x^2=5x-6$",
        "x=2, x=3",
    ),
}


def write_rows(folder, copies: int = 1) -> str:
    """A folder for `--data_dir` in which every benchmark has its row `copies` times."""
    for name, (row, *_) in ROWS.items():
        path = folder / name / "test.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text((json.dumps(row) + "\n") * copies)
    return str(folder)
