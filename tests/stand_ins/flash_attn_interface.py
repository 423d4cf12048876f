# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The stand-in for flash-attn 3."""

from flash_attn import attention, kvcache_attention, varlen_attention


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False):
    return attention(q, k, v, softmax_scale, causal, window_size)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    deterministic=False,
):
    return varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal, window_size)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    cache_seqlens=None,
    page_table=None,
    max_seqlen_q=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    return kvcache_attention(q, k_cache, v_cache, k, v, cache_seqlens, page_table, softmax_scale, causal, window_size)
