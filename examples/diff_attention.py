# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Differential attention in plain PyTorch, to read, or to paste into nanoGPT, nanochat or a model of your own:

    self.attn = DiffAttention(config.n_embd, config.n_head // 2, layer_idx)  # V1: half as many heads, twice as wide
    self.attn = DiffAttentionV2(config.n_embd, config.n_head)  # V2: as many heads, each with a second query

Both are causal, rotate their queries and keys, and take the weights of diff_transformer's modules. Shapes: B batch,
T tokens, C channels, h heads, d the width of queries and keys. x is (B, T, C), and so is the output.
"""

import torch
import torch.nn.functional as F
from torch import nn


def split_heads(x, width):  # (B, T, heads * width) -> (B, heads, T, width)
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def rotary(x, base):
    """Rotates the pair (x[i], x[i + d/2]) of token t by the angle t / base^(2i/d). x is (B, heads, T, d)."""
    tokens, d = x.shape[-2:]
    frequency = 1 / base ** (torch.arange(0, d, 2, device=x.device) / d)
    angle = torch.arange(tokens, device=x.device)[:, None] * frequency  # (T, d/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class DiffAttention(nn.Module):
    """head = (1 - λ_init) RMSNorm((softmax(q1 k1ᵀ / √d) - λ softmax(q2 k2ᵀ / √d)) v)
    λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ_init,  λ_init = 0.8 - 0.6 exp(-0.3 layer_idx), layer_idx from 0
    Eq. 1-3 of https://arxiv.org/abs/2410.05258; q1, q2, k1 and k2 have the width d, v and the head have 2d."""

    def __init__(self, hidden_size, num_heads, layer_idx, num_key_value_heads=None, rope_base=10000.0):
        super().__init__()
        self.d, self.rope_base = hidden_size // num_heads // 2, rope_base
        size, key_size = 2 * self.d * num_heads, 2 * self.d * (num_key_value_heads or num_heads)
        self.q_proj = nn.Linear(hidden_size, size, bias=False)  # [q1 | q2] of each head
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)  # [k1 | k2]
        self.v_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(size, hidden_size, bias=False)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(0.1 * torch.randn(self.d)))
        self.lambda_init = 0.8 - 0.6 * torch.e ** (-0.3 * layer_idx)
        self.subln = nn.RMSNorm(2 * self.d, eps=1e-5)  # over each head; the heads share its weight

    def forward(self, x):
        q = rotary(split_heads(self.q_proj(x), self.d), self.rope_base)  # (B, 2h, T, d): q1 and q2 by turns
        k, v = rotary(split_heads(self.k_proj(x), self.d), self.rope_base), split_heads(self.v_proj(x), 2 * self.d)
        # Copied to the heads that share them: SDPA has no fused kernel for enable_gqa and values wider than keys
        k1, k2, v = (y.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for y in (k[:, 0::2], k[:, 1::2], v))
        y1 = F.scaled_dot_product_attention(q[:, 0::2], k1, v, is_causal=True)  # softmax(q1 k1ᵀ / √d) v
        y2 = F.scaled_dot_product_attention(q[:, 1::2], k2, v, is_causal=True)  # softmax(q2 k2ᵀ / √d) v
        # Sums of products: autocast would round a dot product
        lam = (self.lambda_q1 * self.lambda_k1).sum().exp() - (self.lambda_q2 * self.lambda_k2).sum().exp()
        y = (1 - self.lambda_init) * self.subln(y1 - (lam + self.lambda_init) * y2)  # (B, h, T, 2d)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class DiffAttentionV2(nn.Module):
    """head = (softmax(q1 kᵀ / √d) - λ softmax(q2 kᵀ / √d)) v,  λ = sigmoid(x W_λ) for each token and head
    https://huggingface.co/blog/microsoft/diff-attn-v2; everything has the width d, and there is no norm."""

    def __init__(self, hidden_size, num_heads, num_key_value_heads=None, rope_base=10000.0):
        super().__init__()
        self.d, self.rope_base = hidden_size // num_heads, rope_base
        size, key_size = self.d * num_heads, self.d * (num_key_value_heads or num_heads)
        self.q_proj = nn.Linear(hidden_size, 2 * size, bias=False)  # [q1 | q2] of each head
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(size, hidden_size, bias=False)
        self.lambda_proj = nn.Linear(hidden_size, num_heads, bias=False)

    def forward(self, x):
        q = rotary(split_heads(self.q_proj(x), self.d), self.rope_base)  # (B, 2h, T, d): q1 and q2 by turns
        k, v = rotary(split_heads(self.k_proj(x), self.d), self.rope_base), split_heads(self.v_proj(x), self.d)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # both softmaxes, times v
        y = y[:, 0::2] - split_heads(self.lambda_proj(x), 1).sigmoid() * y[:, 1::2]  # (B, h, T, d), λ (B, h, T, 1)
        return self.o_proj(y.transpose(1, 2).flatten(2))
