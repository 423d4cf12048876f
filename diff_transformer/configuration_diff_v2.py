# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Configuration of the Differential Transformer V2 (https://huggingface.co/blog/microsoft/diff-attn-v2)."""

from huggingface_hub.dataclasses import strict

from .configuration_diff_base import DiffTransformerBaseConfig


@strict
class DiffTransformerV2Config(DiffTransformerBaseConfig):
    r"""
    Configuration of a [`DiffTransformerV2Model`]. The defaults are the sizes of the 3B model of the paper on V1, with
    twice the query heads over the same keys and values.

    Args:
        num_attention_heads (`int`, defaults to 48): *Query* heads, 2h: what serving engines, caches and
            tensor-parallel plans count. Neighbours are a pair, whose outputs are subtracted: h heads remain.
        num_key_value_heads (`int`, *optional*): Key/value heads; by default one for each pair of query heads. Both
            heads of a pair must share a key/value head.
        head_dim (`int`, *optional*): d, the width of a query, key or value; by default `hidden_size / h`.
        num_signal_heads_per_noise_head (`int`, defaults to 1): n query heads in a row from each of which the output of
            the query head after them is subtracted. V2 has pairs, 1.
        attention_bias (`bool`, defaults to `False`): Biases of the query, key and value projections.
        attention_output_bias (`bool`, *optional*): Bias of the output projection; by default `attention_bias`.
        use_qk_norm (`bool`, defaults to `False`): An RMSNorm over each query and key before the rotation, as in Qwen3.
        sliding_window (`int`, *optional*): How many tokens a token sees, itself included, in every layer, as in
            Mistral; by default all before it.
        attention_dropout (`float`, defaults to 0.0): Probability of dropping an entry of the *differential* map
            `softmax1 - sigmoid(lambda) softmax2` while training. Only `attn_implementation="eager"` supports it.

    Sizes and the other arguments are those of [`DiffTransformerConfig`] and [`LlamaConfig`].

    ```python
    >>> from diff_transformer import DiffTransformerV2Config, DiffTransformerV2ForCausalLM

    >>> config = DiffTransformerV2Config(hidden_size=1024, num_hidden_layers=12, num_attention_heads=32)
    >>> model = DiffTransformerV2ForCausalLM(config)
    ```"""

    model_type = "diff_transformer_v2"
    # Llama's with the norms of Qwen3's, and each rank computes lambda for its own heads
    base_model_tp_plan = {
        **DiffTransformerBaseConfig.base_model_tp_plan,
        "layers.*.self_attn.lambda_proj": "colwise",
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    }

    num_attention_heads: int = 48
    num_signal_heads_per_noise_head: int = 1
    attention_output_bias: bool | None = None
    use_qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self, **kwargs):
        if self.num_signal_heads_per_noise_head < 1:
            raise ValueError(
                f"num_signal_heads_per_noise_head={self.num_signal_heads_per_noise_head} was given; it must be at "
                "least 1."
            )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = max(1, self.num_attention_heads // self.num_heads_per_group)
        if self.head_dim is None:
            heads = self.num_differential_heads
            if heads < 1 or self.hidden_size % heads != 0:
                raise ValueError(
                    f"hidden_size={self.hidden_size} and num_attention_heads={self.num_attention_heads} were given, "
                    f"which leave {heads} differential heads; without head_dim these must divide the hidden size."
                )
            self.head_dim = self.hidden_size // heads
        if self.attention_output_bias is None:
            self.attention_output_bias = self.attention_bias
        super().__post_init__(**kwargs)

    @property
    def num_heads_per_group(self) -> int:
        """Query heads of which one is subtracted from the others: 2 in V2."""
        return self.num_signal_heads_per_noise_head + 1

    @property
    def num_differential_heads(self) -> int:
        """h: the heads that remain after the subtraction, the width of `o_proj`'s input over `head_dim`."""
        return self.num_attention_heads // self.num_heads_per_group * self.num_signal_heads_per_noise_head

    def validate_architecture(self):
        super().validate_architecture()
        if self.head_dim < 2 or self.head_dim % 2 != 0:
            raise ValueError(
                f"head_dim={self.head_dim} was given, or derived as hidden_size / differential heads; it is rotated "
                "in pairs, so it must be a multiple of 2."
            )
        group, key_heads = self.num_heads_per_group, self.num_key_value_heads
        if key_heads < 1 or self.num_attention_heads % (key_heads * group) != 0:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} and num_key_value_heads={key_heads} were given. "
                f"num_attention_heads counts query heads, of which {group} neighbours are subtracted from one another "
                f"and must share a key/value head: it must be a multiple of {group} x num_key_value_heads. With the "
                f"keys and values of a Transformer, give {group} times its number of query heads; else choose fewer "
                "key/value heads."
            )
        if self.sliding_window is not None and self.sliding_window < 2:
            raise ValueError(
                f"sliding_window={self.sliding_window} was given; it must be at least 2, a token and the one before "
                "it, or None. The caches of transformers take a window of one token for none."
            )


__all__ = ["DiffTransformerV2Config"]
