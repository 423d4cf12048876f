# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Choosing among labels, compared with constrained `generate`, and logits set by hand."""

import pytest
import torch
from bigrams import Bigrams
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import DynamicCache, PreTrainedTokenizerFast

from diff_transformer import cl100k_tokenizer
from diff_transformer.evaluation.generate import Batches, prefill
from diff_transformer.evaluation.protocols.many_shot.labels import choose_labels, continuation_ids, label_ids

TOKENIZER = cl100k_tokenizer(vocab_size=300)
LABELS = [" transfer", " transfer timing", " refund", " refund not showing up", " card arrival", " cash"]
PROMPTS = ["query: hello\nintent:", "query: where is my card?\nintent:", "query: now!!\nintent:", "query: a\nintent:"]
LABEL_IDS = label_ids(TOKENIZER, LABELS, "\n==\n")
PROMPT_IDS = [continuation_ids(TOKENIZER, text) for text in PROMPTS]


@pytest.mark.parametrize(("end", "longer", "expected"), [(0.3, 0.7, 1), (0.7, 0.3, 0)])
def test_choose_labels_between_a_label_and_its_beginning(end, longer, expected):
    # 5 9 is "transfer", 5 6 9 is "transfer timing": without its end, the first would never be less likely
    model = Bigrams({0: {5: 1.0}, 5: {9: end, 6: longer}, 6: {9: 1.0}})
    assert choose_labels(model, DynamicCache(), [[0]], [(5, 9), (5, 6, 9)], Batches()) == [expected]


@pytest.mark.slow
def test_greedy_labels_equal_constrained_generate(loaded):
    """Equal to transformers' constrained decoding without a shared cache, one prompt at a time."""
    end = loaded.tokenizer.eos_token_id
    found = set()

    def following(path):
        return [ids[len(path)] for ids in LABEL_IDS if ids[: len(path)] == path != ids] or [end]

    for seed in range(2):  # contexts after which the model chooses different labels
        context = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(seed))
        cache, _ = prefill(loaded.model, context, size=7)
        chosen = choose_labels(loaded.model, cache, PROMPT_IDS, LABEL_IDS, Batches())
        for prompt, label in zip(PROMPT_IDS, chosen, strict=True):
            ids = torch.cat([context, torch.tensor([prompt])], dim=1)
            length = ids.shape[1]
            sequence = loaded.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                prefix_allowed_tokens_fn=lambda _, ids, n=length: following(ids[n:].tolist()),
                max_new_tokens=60,
                do_sample=False,
            )[0, length:].tolist()
            assert [i for i in sequence if i != end] == LABEL_IDS[label], "constrained generate finds another label"
            found.add(label)
    assert len(found) > 1, "the test covers only one label"


def test_choose_labels_in_batches_changes_nothing(loaded):
    context = TOKENIZER("query: hi\nintent: cash\n==\nquery: no\nintent: refund\n==\n" * 3)["input_ids"]
    prompts = [*PROMPT_IDS[:3], PROMPT_IDS[0][:-1] + [40], *PROMPT_IDS[:2]]
    cache, _ = prefill(loaded.model, torch.tensor([context]))
    before = [layer.keys.clone() for layer in cache.layers]
    alone = choose_labels(loaded.model, cache, prompts, LABEL_IDS, Batches(1))
    assert choose_labels(loaded.model, cache, prompts, LABEL_IDS, Batches(64)) == alone
    assert alone[-2:] == alone[:2], "the same prompt got another label"
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys), "the shared cache changed"


def test_continuation_ids_equal_those_of_the_whole_text():
    tokenizer = cl100k_tokenizer(vocab_size=5000)
    for text in ("How did serfdom develop in and then leave Russia ?", "12 apples", "“quote” é", "<|endoftext|>"):
        parts = [f"Question: {text}\nType:", " size, area and volume", "\n==\n"]
        whole = tokenizer("".join(parts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert [i for part in parts for i in continuation_ids(tokenizer, part)] == whole


@pytest.fixture
def sentencepiece():
    """Like Llama 2's tokenizer: a space before the first word, and a token before every text."""
    alphabet = {chr(i) for i in range(97, 123)} | set(":=\n▁")
    vocab = {token: i for i, token in enumerate(["<s>", "<unk>", *sorted(alphabet)])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")


def test_continuation_ids_without_the_space_of_sentencepiece(sentencepiece):
    assert sentencepiece.convert_ids_to_tokens(sentencepiece("ab")["input_ids"]) == ["<s>", "▁", "a", "b"]
    parts = [continuation_ids(sentencepiece, part) for part in ("q: a", " ab", "\n==\n")]
    tokens = [" ".join(sentencepiece.convert_ids_to_tokens(ids)) for ids in parts]
    assert tokens == ["q : ▁ a", "▁ a b", "\n = = \n"]


def test_label_ids_rejects_labels_that_cannot_be_told_apart(sentencepiece):
    for labels, follows in (([" A", " B"], "\n"), ([" A", " AA"], "B")):  # capital letters are all unknown
        with pytest.raises(ValueError, match=f"begins '{labels[1]}' with the tokens of '{labels[0]}'. Rename one"):
            label_ids(sentencepiece, labels, follows)
