# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Layers that `kernels.kernelize` puts in place of modules of the same interface."""

import torch
from torch import nn

from .flash_diff import LambdaVectors, flash_diff_attention


class DiffHeads(nn.Module):
    """The heads of causal differential attention (Eq. 1-3, arXiv:2410.05258), between the projections.

    `(1 - lambda_init) RMSNorm((softmax(q1 k1^T / sqrt d) - lambda softmax(q2 k2^T / sqrt d)) v)`
    """

    can_torch_compile = True

    lambda_q1: torch.Tensor  # (d,) like the other three
    lambda_k1: torch.Tensor
    lambda_q2: torch.Tensor
    lambda_k2: torch.Tensor
    lambda_init: float
    subln: nn.RMSNorm  # over 2d, with a weight and a number as eps

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (B, T, H, 2d) = [q1 | q2], k (B, T, K, 2d) = [k1 | k2], v (B, T, K, 2d). Returns (B, T, H, 2d)."""
        vectors = (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
        lambda_full = LambdaVectors(*vectors, self.lambda_init)
        norm = {"norm_weight": self.subln.weight, "norm_eps": self.subln.eps, "out_scale": 1 - self.lambda_init}
        return flash_diff_attention(q, k, v, lambda_full, causal=True, **norm)


__all__ = ["DiffHeads"]
