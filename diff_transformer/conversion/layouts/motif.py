# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Motif-2.6B (arXiv:2508.09148) as a Differential Transformer.

Its tensors are ours, names and order included. It counts heads of d, two for each of ours; PolyNorm gates its
feed-forward; its head norm has its own eps; and its lambda_init is Eq. 2 with layers counted from 0, not from 1.
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
# The first two are left over from Qwen2, and do nothing without use_sliding_window; the last follows from others
UNUSED = ("sliding_window", "max_window_layers", "head_dim")
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


@dataclass(frozen=True)
class MotifLayout(Layout):
    is_strict = True

    def to_ours(self, stated: dict[str, Any]) -> dict[str, Any]:
        return {name: stated[name] for name in SAME if stated.get(name) is not None} | {
            "hidden_act": "poly_norm",
            "num_attention_heads": stated["num_attention_heads"] // 2,
            "num_key_value_heads": stated["num_key_value_heads"] // 2,
            "head_dim": 2 * stated["hidden_size"] // stated["num_attention_heads"],
            "subln_eps": stated["attn_rms_norm_eps"],
            "lambda_init": [0.8 - 0.6 * math.exp(-0.3 * (i - 1)) for i in range(stated["num_hidden_layers"])],
            "rope_parameters": {"rope_type": "default", "rope_theta": stated["rope_theta"]},
        }

    def to_theirs(self, config: OurConfig) -> dict[str, Any]:
        return {"architectures": ["MotifForCausalLM"], "model_type": self.model_type} | {
            **{name: getattr(config, name) for name in SAME},
            "attn_rms_norm_eps": config.subln_eps,
            "num_attention_heads": 2 * config.num_attention_heads,
            "num_key_value_heads": 2 * config.num_key_value_heads,
            "rope_theta": config.rope_parameters["rope_theta"],
        }


MOTIF = MotifLayout(
    "motif", DiffTransformerConfig, "Motif", ("_proj.bias",), required=REQUIRED, no_effect=UNUSED, citation=CITATION
)
