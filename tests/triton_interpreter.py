# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Lets triton 3.6's interpreter run with numpy 2.4 and later, in tests and benchmarks; imported for this effect."""

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor, scope):
    """triton 3.6 takes int() of a number that it keeps in an array of one element, which numpy 2.4 forbids."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_and_index
