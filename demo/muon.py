# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Muon for the matrices, AdamW for the rest, as one optimizer for Trainer.

`torch.optim.Muon` does the same but multiplies in bfloat16, which takes most of a step on a CPU without bfloat16
arithmetic. This version multiplies in float32. In so short a training, Muon
(https://kellerjordan.github.io/posts/muon/) reaches a clearly lower loss than AdamW.
"""

from collections import defaultdict

import torch


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz approximation of U V^T, where U S V^T is the singular value decomposition of each of the
    (number, rows, columns) matrices. The singular values of the result are about 0.7 to 1.2."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if is_tall else x


class MuonAdamW(torch.optim.AdamW):
    """AdamW, except that parameter groups with a `momentum` follow Muon with Nesterov momentum."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            if "momentum" in group:
                by_shape = defaultdict(list)  # matrices of the same shape are multiplied in one batch
                for p in group["params"]:
                    if p.grad is not None:
                        by_shape[p.shape].append(p)
                for matrices in by_shape.values():
                    self._muon_step(matrices, group["lr"], group["momentum"], group["weight_decay"])
        super().step()
        return loss

    def _muon_step(self, matrices, lr: float, momentum: float, weight_decay: float) -> None:
        updates = []
        for p in matrices:
            average = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            average.lerp_(p.grad, 1 - momentum)
            updates.append(p.grad.lerp(average, momentum))
            p.grad = None  # AdamW skips parameters without a gradient
        for p, update in zip(matrices, orthogonalize(torch.stack(updates)), strict=True):
            p.mul_(1 - lr * weight_decay)
            p.add_(update, alpha=-lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)
