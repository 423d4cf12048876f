# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The label that a model chooses from many, after a context that is already in a cache.

Constrained greedy decoding (Ratner et al., ACL 2023) repeatedly takes the likeliest token among those that can
continue a label. A label ends with the first token of what follows it in the prompt; otherwise "transfer" would be at
least as likely as "transfer timing" for every model.
"""

import copy
from collections.abc import Sequence
from itertools import count, groupby, permutations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ...generate import Batches, prefill
from ...text import text_ids


def continuation_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text that continues another: nothing precedes them, neither a special token nor the space that
    sentencepiece puts before a first word. Special tokens in the text are plain text."""
    before = "a" if text.startswith("\n") else "\n"  # no tokenizer merges it with the text
    head, whole = text_ids(tokenizer, before), text_ids(tokenizer, before + text)
    if whole[: len(head)] != head:
        raise ValueError(f"{type(tokenizer).__name__} merges {text!r} with {before!r} before it. Change its start.")
    return whole[len(head) :]


def label_ids(tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], follows: str) -> list[list[int]]:
    """The tokens of each label, as the prompt shows it with its leading space, then the first token of `follows`.

    Raises ValueError if the tokens of one label begin with those of another: the two could not be distinguished.
    """
    end = continuation_ids(tokenizer, follows)[:1]
    ids = [continuation_ids(tokenizer, label) + end for label in labels]
    for (label, tokens), (other, longer) in permutations(zip(labels, ids, strict=True), 2):
        if longer[: len(tokens)] == tokens:
            raise ValueError(f"The tokenizer begins {other!r} with the tokens of {label!r}. Rename one of them.")
    return ids


@torch.inference_mode()
def greedy_labels(
    model: PreTrainedModel, cache: Cache, prompts: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
) -> list[int]:
    """The index of the label that constrained greedy decoding finds for each prompt, after the context in `cache`,
    which is not changed. All prompts have the same length.

    Equal to `generate(prefix_allowed_tokens_fn=...)`, without the steps after only one label is left.
    """
    cache, tokens = copy.deepcopy(cache), torch.tensor(prompts)
    cache.batch_repeat_interleave(len(prompts))
    left = [list(range(len(labels))) for _ in prompts]  # the labels that begin with what was chosen
    for step in count():
        if all(len(indices) == 1 for indices in left):
            break
        cache, logits = prefill(model, tokens, cache)
        scores = logits.cpu()
        tokens = torch.zeros(len(prompts), 1, dtype=torch.long)  # 0 after a decision: its logits are not used
        for i, indices in enumerate(left):
            if len(indices) > 1:
                allowed = sorted({labels[index][step] for index in indices})
                chosen = allowed[int(scores[i, allowed].argmax())]
                tokens[i] = chosen
                left[i] = [index for index in indices if labels[index][step] == chosen]
    return [indices[0] for indices in left]


def choose_labels(
    model: PreTrainedModel,
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    batches: Batches,
) -> list[int]:
    """`greedy_labels` of prompts of any lengths."""
    chosen: dict[int, int] = {}
    # Prompts of one length at a time: the tokens after a cache need no padding
    by_length = groupby(sorted(range(len(prompts)), key=lambda i: len(prompts[i])), key=lambda i: len(prompts[i]))

    def choose(batch: Sequence[int]) -> list[int]:
        return greedy_labels(model, cache, [prompts[i] for i in batch], labels)

    for _, group in by_length:
        chosen |= batches.map(choose, list(group), cache.get_seq_length() + 1)  # each has a copy of the cache
    return [chosen[i] for i in range(len(prompts))]
