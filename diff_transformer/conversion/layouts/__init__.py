# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""How other code bases lay out a Differential Transformer: one module for each, and `LAYOUTS` by name.

V1 (`diff_transformer`). Every tensor has the same shape on both sides; only names and the order of rows differ:

| | rotary pairs | order of heads | weight of the head norm |
| --- | --- | --- | --- |
| ours | halves (0, d/2), ... | neighbours: q1, q2 of head 0, then of head 1, ... | yes |
| unilm, yoco (the authors' code) | neighbours (0, 1), ... | neighbours | yes |
| diffllama (transformers) | halves | blocks: q1 of all heads, then q2 of all; values of width d likewise | no |
| motif (Motif-2.6B) | halves | neighbours | yes |

V2 (`diff_v2`):

| | rotary pairs | query heads | lambda_proj | o_proj |
| --- | --- | --- | --- | --- |
| ours | halves | pairs of neighbours | yes | |
| unilm_v2 (the authors' code) | neighbours | pairs of neighbours | yes | as ours |
| llama, qwen2, qwen3, mistral (transformers) | halves | one of an equal pair | no, zero in ours | half of ours |
"""

from .authors import UNILM, UNILM_V2, YOCO
from .base import OURS, OURS_V2, Layout, OurConfig
from .diffllama import DIFFLLAMA
from .llama import LLAMA_FAMILY
from .motif import MOTIF

LAYOUTS = {x.name: x for x in (OURS, UNILM, YOCO, DIFFLLAMA, MOTIF, OURS_V2, UNILM_V2, *LLAMA_FAMILY)}

__all__ = ["LAYOUTS", "Layout", "OurConfig"]
