# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Motif-2.6B (arXiv:2508.09148) and Motif-2-12.7B (arXiv:2510.06949) as a Differential Transformer.

Their tensors are ours, names and order included. They count vectors of d: as heads of keys, two for each of ours, and
as heads of queries, the signal heads, which are ours, and the noise heads. PolyNorm gates their feed-forward; their
head norm has its own eps; and their lambda_init is Eq. 2 with layers counted from 0, not from 1.
"""

import math
from dataclasses import dataclass
from typing import Any

from ...configuration_diff import DiffTransformerConfig
from .base import SAME, Layout, OurConfig

# Without them, defaults of a class that nobody can read would decide what the model computes
REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("num_key_value_heads", "rms_norm_eps", "attn_rms_norm_eps", "rope_theta"),
)
# The first two are left over from Qwen2, and do nothing without use_sliding_window; the next belong to their training
# code. head_dim is read where it is stated, and checked with the shapes
UNUSED = ("sliding_window", "max_window_layers", "bfloat16", "expanded", "fused_rope", "loss_reduction", "head_dim")
YARN = ("rope_type", "factor", "original_max_position_embeddings")
CITATION = """\
@misc{lim2025motif,
  title         = {Motif 2.6B Technical Report},
  author        = {Lim, Junghwan and Lee, Sungmin and Kim, Dongseok and Park, Eunhwan and Park, Hyunbyung and
    Lee, Junhyeok and Cheung, Wai Ting and Choi, Dahye and Her, Jaeheui and Huh, Jaeyeon and Jung, Hanbin and
    Kang, Changjin and Kim, Beomgyu and Kim, Jihwan and Kim, Minjae and Kim, Taehwan and Kim, Youngrok and
    Lee, Haesol and Lee, Jeesoo and Lee, Kungyu and Oh, Dongpin and Park, Yeongjae and Ryu, Bokki and
    Suh, Daewon and Weon, Dongjoo},
  year          = {2025},
  eprint        = {2508.09148},
  archivePrefix = {arXiv},
  primaryClass  = {cs.CL}
}"""
GROUPED_CITATION = """\
@misc{lim2025grouped,
  title         = {Grouped Differential Attention},
  author        = {Lim, Junghwan and Lee, Sungmin and Kim, Dongseok and Cheung, Wai Ting and Kim, Beomgyu and
    Kim, Taehwan and Lee, Haesol and Lee, Junhyeok and Oh, Dongpin and Park, Eunhwan},
  year          = {2025},
  eprint        = {2510.06949},
  archivePrefix = {arXiv},
  primaryClass  = {cs.LG}
}"""


@dataclass(frozen=True)
class MotifLayout(Layout):
    is_strict = True

    def complete(self, stated: dict[str, Any]) -> dict[str, Any]:
        """With the present name of `rope_type`."""
        scaling = {"rope_type" if key == "type" else key: x for key, x in (stated.get("rope_scaling") or {}).items()}
        return stated | {"rope_scaling": scaling or None}

    def to_ours(self, stated: dict[str, Any]) -> dict[str, Any]:
        """Raises ValueError for noise heads that cannot be shared evenly and for a rope_scaling other than YaRN."""
        queries, keys = stated["num_attention_heads"], stated["num_key_value_heads"]
        noise_heads = stated.get("num_noise_heads")
        if noise_heads is not None and not (0 < noise_heads < queries and queries % noise_heads == 0):
            raise ValueError(
                f"num_noise_heads={noise_heads} is stated for num_attention_heads={queries}, which counts signal and "
                "noise heads; noise heads must divide it, so that each has the same number of signal heads."
            )
        if noise_heads is not None and 2 * noise_heads % keys != 0:
            raise ValueError(
                f"num_key_value_heads={keys} is stated, which counts k1 and k2; it must divide twice num_noise_heads="
                f"{noise_heads}, because the signal heads of a noise head share its keys."
            )
        rope = self.complete(stated)["rope_scaling"] or {"rope_type": "default"}
        is_yarn = rope.get("rope_type") == "yarn" and {key for key, x in rope.items() if x is not None} == {*YARN}
        if stated.get("rope_scaling") and not is_yarn:
            raise ValueError(
                f"rope_scaling={stated['rope_scaling']} is stated; it must be null, or state rope_type 'yarn' with "
                f"{YARN[1]} and {YARN[2]}, and nothing else."
            )
        return {name: stated[name] for name in SAME if stated.get(name) is not None} | {
            "hidden_act": "poly_norm",
            "num_attention_heads": queries // 2 if noise_heads is None else queries - noise_heads,
            "num_noise_heads": noise_heads,
            "num_key_value_heads": keys // 2,
            "head_dim": 2 * (stated.get("head_dim") or stated["hidden_size"] // queries),
            "subln_eps": stated["attn_rms_norm_eps"],
            "lambda_init": [0.8 - 0.6 * math.exp(-0.3 * (i - 1)) for i in range(stated["num_hidden_layers"])],
            "rope_parameters": {**rope, "rope_theta": stated["rope_theta"]},
        }

    def to_theirs(self, config: OurConfig) -> dict[str, Any]:
        rope: dict[str, Any] = config.to_dict()["rope_parameters"]
        theirs = {"architectures": ["MotifForCausalLM"], "model_type": self.model_type} | {
            **{name: getattr(config, name) for name in SAME},
            "attn_rms_norm_eps": config.subln_eps,
            "num_attention_heads": config.num_query_heads,
            "num_key_value_heads": 2 * config.num_key_value_heads,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {name: rope[name] for name in YARN} if rope["rope_type"] == "yarn" else None,
        }
        # k_ratio is the number of signal keys for each noise key. The code of Motif-2.6B knows none of these three
        grouped = {"num_noise_heads": config.num_noise_heads, "head_dim": config.diff_head_dim, "k_ratio": 1}
        return theirs | (grouped if config.num_noise_heads else {})

    def citation(self, config: OurConfig) -> str:
        is_grouped = config.num_query_heads < 2 * config.num_attention_heads
        return GROUPED_CITATION if is_grouped else CITATION


MOTIF = MotifLayout("motif", DiffTransformerConfig, "Motif", ("_proj.bias",), required=REQUIRED, no_effect=UNUSED)
