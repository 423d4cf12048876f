# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
from collections.abc import Callable

import pytest

from diff_transformer.training.run_arguments import RunArguments


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets_cache")


@pytest.fixture
def training_arguments(tmp_path) -> Callable:
    """A function that makes quiet RunArguments for the CPU."""

    def make(**kwargs) -> RunArguments:
        defaults = {"output_dir": str(tmp_path / "run"), "report_to": [], "use_cpu": True, "disable_tqdm": True}
        return RunArguments(**{**defaults, "remove_unused_columns": False, "logging_steps": 1, **kwargs})

    return make
