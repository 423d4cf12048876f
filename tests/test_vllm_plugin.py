# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""vLLM loads the plugin at every start, for every model: one that is too old for it must start."""

import sys
from types import ModuleType

from diff_transformer import vllm_plugin


def test_an_older_vllm_starts_with_a_warning(monkeypatch):
    messages = []
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(vllm_plugin.logger, "warning", messages.append)
    vllm_plugin.register()
    assert len(messages) == 1 and "calls attention twice" in messages[0]
