# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The Differential Transformer (arXiv:2410.05258) for Hugging Face Transformers.

Importing the package registers the model with the Auto classes of transformers.
"""

import sys
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from .configuration_diff import PAPER_SIZES, DiffTransformerConfig
from .configuration_diff_v2 import DiffTransformerV2Config
from .flash_diff import flash_diff_attention, flash_diff_attention_varlen, flash_diff_attention_with_kvcache
from .modeling_diff import (
    DiffTransformerForCausalLM,
    DiffTransformerForQuestionAnswering,
    DiffTransformerForSequenceClassification,
    DiffTransformerForTokenClassification,
    DiffTransformerModel,
    DiffTransformerPreTrainedModel,
)
from .modeling_diff_v2 import (
    DiffTransformerV2ForCausalLM,
    DiffTransformerV2ForQuestionAnswering,
    DiffTransformerV2ForSequenceClassification,
    DiffTransformerV2ForTokenClassification,
    DiffTransformerV2Model,
    DiffTransformerV2PreTrainedModel,
)
from .tokenization_cl100k import cl100k_tokenizer

__version__ = "0.1.0"

for _config_class in (DiffTransformerConfig, DiffTransformerV2Config):
    AutoConfig.register(_config_class.model_type, _config_class)
    AutoTokenizer.register(_config_class, fast_tokenizer_class=PreTrainedTokenizerFast)
    # `register_for_auto_class` makes `save_pretrained` put the Hub files beside the weights, for machines without us
    _config_class.register_for_auto_class()
_model_class: Any
for _auto_class, *_model_classes in (
    (AutoModel, DiffTransformerModel, DiffTransformerV2Model),
    (AutoModelForCausalLM, DiffTransformerForCausalLM, DiffTransformerV2ForCausalLM),
    (
        AutoModelForSequenceClassification,
        DiffTransformerForSequenceClassification,
        DiffTransformerV2ForSequenceClassification,
    ),
    (AutoModelForTokenClassification, DiffTransformerForTokenClassification, DiffTransformerV2ForTokenClassification),
    (AutoModelForQuestionAnswering, DiffTransformerForQuestionAnswering, DiffTransformerV2ForQuestionAnswering),
):
    for _model_class in _model_classes:
        _auto_class.register(_model_class.config_class, _model_class)
        _model_class.register_for_auto_class(_auto_class.__name__)
        # By its name, `Trainer` knows a causal model, whose labels it must shift before it smooths them
        _model_type = _model_class.config_class.model_type
        _auto_class._model_mapping._model_mapping[_model_type] = _model_class.__name__
        # `transformers serve` looks up model classes by name, and only in transformers itself
        setattr(sys.modules["transformers"], _model_class.__name__, _model_class)

try:
    from peft.utils import constants as _peft_constants
except ImportError:  # optional package
    pass
else:
    # `LoraConfig()`, `IA3Config()`, ... without target_modules: as for Llama, whose linear layers have the same names
    for _name, _modules in vars(_peft_constants).items():
        if _name.startswith("TRANSFORMERS_MODELS_TO_") and "llama" in _modules:
            _modules.setdefault("diff_transformer", _modules["llama"])
            _modules.setdefault("diff_transformer_v2", _modules["llama"])

__all__ = [
    "PAPER_SIZES",
    "DiffTransformerConfig",
    "DiffTransformerForCausalLM",
    "DiffTransformerForQuestionAnswering",
    "DiffTransformerForSequenceClassification",
    "DiffTransformerForTokenClassification",
    "DiffTransformerModel",
    "DiffTransformerPreTrainedModel",
    "DiffTransformerV2Config",
    "DiffTransformerV2ForCausalLM",
    "DiffTransformerV2ForQuestionAnswering",
    "DiffTransformerV2ForSequenceClassification",
    "DiffTransformerV2ForTokenClassification",
    "DiffTransformerV2Model",
    "DiffTransformerV2PreTrainedModel",
    "cl100k_tokenizer",
    "flash_diff_attention",
    "flash_diff_attention_varlen",
    "flash_diff_attention_with_kvcache",
]
