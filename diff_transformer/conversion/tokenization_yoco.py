# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The vocabulary of the authors' code: four symbols in front of cl100k, whose ids are shifted by four."""

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from ..tokenization_cl100k import NUM_RANKS, SPECIAL_TOKENS, cl100k_tokenizer

SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
CL100K_SPECIAL_TOKENS = ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
# cl100k ids from 100264 on, before the shift. <jupyter_code>, 100276, is also cl100k's <|endofprompt|>; one name fits.
FIRST_EXTRA = 100264
EXTRA_SPECIAL_TOKENS = (
    *("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<reponame>", "<filename>", "<gh_stars>"),
    *("<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>", "<jupyter_code>"),
    *("<jupyter_output>", "<empty_output>", "<commit_before>", "<commit_msg>", "<commit_after>"),
)


def yoco_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the authors' YOCO code (cl100k id + 4; `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3), which adds no
    symbol to a text by itself. Its ids end at 100,285; the models have 100,288 embeddings, a multiple of 8."""
    data = json.loads(cl100k_tokenizer().backend_tokenizer.to_str())
    shift = len(SYMBOLS)
    vocab = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    vocab |= {token: i + shift for token, i in data["model"]["vocab"].items() if i < NUM_RANKS}
    specials = {token: SPECIAL_TOKENS[token] for token in CL100K_SPECIAL_TOKENS}
    specials |= {token: FIRST_EXTRA + i for i, token in enumerate(EXTRA_SPECIAL_TOKENS)}
    vocab |= {token: i + shift for token, i in specials.items()}
    taken = set(vocab.values())
    vocab |= {f"<|reserved {i}|>": i for i in range(max(taken)) if i not in taken}
    data["model"]["vocab"], data["added_tokens"] = vocab, []
    backend = Tokenizer.from_str(json.dumps(data))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SYMBOLS, *specials)])
    options: dict[str, Any] = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SYMBOLS, strict=True))
    options |= {"model_input_names": ["input_ids", "attention_mask"], "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=list(specials), **options)
