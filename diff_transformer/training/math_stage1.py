# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Mathematics, stage 1: synthetic questions and answers, from the 64K model (arXiv:2410.05258).

accelerate launch -m diff_transformer.training.math_stage1 --config recipes/math_stage1/config.yaml
"""

from functools import partial

from . import smoke
from .math_data import question_and_answer
from .sft_math import SMOKE, run_stage


def main(argv: list[str] | None = None) -> None:
    run_stage(
        lambda data: {data.prompt_column, data.completion_column},
        lambda data: partial(
            question_and_answer, prompt_column=data.prompt_column, completion_column=data.completion_column
        ),
        smoke.write_questions,
        {**SMOKE, "output_dir": "runs/smoke_math_stage1"},
        argv,
    )


if __name__ == "__main__":
    main()
