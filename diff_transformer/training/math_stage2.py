# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Mathematics, stage 2: long reasoning, OpenThoughts-114k-math, outputs to 16K (arXiv:2410.05258).

accelerate launch -m diff_transformer.training.math_stage2 --config recipes/math_stage2/config.yaml
"""

from functools import partial

from . import smoke
from .math_data import reasoning_trace
from .sft_math import SMOKE, run_stage


def main(argv: list[str] | None = None) -> None:
    run_stage(
        lambda data: {"conversations", "correct"} if data.only_correct else {"conversations"},
        lambda data: partial(reasoning_trace, only_correct=data.only_correct),
        smoke.write_traces,
        {**SMOKE, "output_dir": "runs/smoke_math_stage2"},
        argv,
    )


if __name__ == "__main__":
    main()
