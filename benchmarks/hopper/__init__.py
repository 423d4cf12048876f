# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Kernels of differential attention for sm_90 (H100, H200), in Triton's Gluon: TMA, asynchronous wgmma and warps with
different tasks.

They are candidates, in no wheel and on no path of the package, and no GPU has run them yet.
"""
