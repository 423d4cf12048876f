# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Greedy texts: batches, padding and stops must not change what a row alone gives."""

import copy
from dataclasses import replace

import pytest
import torch

from diff_transformer import cl100k_tokenizer
from diff_transformer.evaluation.generate import Batches, Generated, iterate_texts
from diff_transformer.evaluation.text import prompt_ids

pytestmark = pytest.mark.oldest

TOKENIZER = cl100k_tokenizer(vocab_size=300, model_max_length=2048)
PROMPTS = ["def f(x):", "The capital of France is Paris, and that of Germany is", "a", "ABCDE", "a b"]
ROWS = [prompt_ids(TOKENIZER, prompt) for prompt in PROMPTS]


def generate_texts(loaded, rows, *more, **options):
    found = dict(iterate_texts(loaded.model, loaded.tokenizer, rows, *more, **options))
    return [found[i] for i in range(len(rows))]


def alone(loaded, row, new_tokens):
    """`model.generate` itself, of one row."""
    ids = torch.tensor([row])
    out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


@pytest.fixture
def clean(loaded, monkeypatch):
    """A model whose generation configuration a test may change."""
    monkeypatch.setattr(loaded.model, "generation_config", copy.deepcopy(loaded.model.generation_config))
    return loaded


@pytest.mark.parametrize("batch_size, chunk_size", [(2, 7), (None, None), (None, 3)])
def test_batched_is_what_each_row_gives_alone(loaded, batch_size, chunk_size):
    found = generate_texts(loaded, ROWS, 12, Batches(batch_size), chunk_size=chunk_size)
    expected = [loaded.tokenizer.decode(alone(loaded, row, 12), skip_special_tokens=True) for row in ROWS]
    assert found == [Generated(text, 12, False) for text in expected]


def test_end_of_text_ends_one_row_only(clean):
    """The token that a row gives third is declared the end of text: 2 tokens of that row are left."""
    expected = [alone(clean, row, 12) for row in ROWS]
    end = expected[1][2]
    assert end not in expected[1][:2]
    clean.model.generation_config.eos_token_id = [end]
    found = generate_texts(clean, ROWS, 12)
    for ids, generated in zip(expected, found, strict=True):
        length = ids.index(end) if end in ids else 12
        text = clean.tokenizer.decode(ids[:length], skip_special_tokens=True)
        assert generated == Generated(text, length, length < 12)
    assert found[1].tokens == 2 and any(not generated.finished for generated in found)


def test_stop_string_is_cut_off(loaded):
    texts = [generated.text for generated in generate_texts(loaded, ROWS, 12)]
    stop = texts[1][3:5]
    found = generate_texts(loaded, ROWS, 12, stop_strings=["never generated", stop])
    for text, generated in zip(texts, found, strict=True):
        assert generated.text == text.split(stop)[0]
        assert generated.finished == (stop in text)
    assert found[1].tokens < 12, "the row went on after its stop string"


@pytest.mark.parametrize(
    ("written", "text", "stop"),
    [
        (" A b.\nC", " A b.", "\n"),
        (" A\nb.\n\nC", " A\nb.", "\n\n"),
        ("\nA b.\nC", "A b.", "\n"),
        ("\n\nA\nb.\n\nC", "A\nb.", "\n\n"),
        (" \r\n\n\n  A b.\n\nC", "  A b.", "\n\n"),
    ],
)
def test_line_breaks_before_the_text_do_not_stop_it(loaded, writing, written, text, stop):
    """Without any, the output is the same with and without `skip_breaks`."""
    found = {}
    for skip_breaks in (True, False):
        with writing(loaded, written):
            found[skip_breaks] = generate_texts(loaded, ROWS, 40, stop_strings=[stop], skip_breaks=skip_breaks)
    end = written.rindex(stop) + len(stop)
    tokens = len(loaded.tokenizer.encode(written[:end], add_special_tokens=False))
    assert found[True] == [Generated(text, tokens, True)] * len(ROWS)
    assert (found[False] == found[True]) == (written == text + stop + "C")


def test_checkpoints_own_generation_settings_are_left_out_and_kept(clean):
    expected = generate_texts(clean, ROWS, 8)
    clean.model.generation_config.update(do_sample=True, temperature=50.0, repetition_penalty=9.0)
    assert generate_texts(clean, ROWS, 8) == expected
    assert clean.model.generation_config.repetition_penalty == 9.0


def test_longest_come_first_and_memory_halves_the_batch(loaded, monkeypatch):
    sizes, generate = [], type(loaded.model).generate

    def limited(model, input_ids, **kwargs):
        sizes.append(tuple(input_ids.shape))
        if len(input_ids) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return generate(model, input_ids=input_ids, **kwargs)

    expected = generate_texts(loaded, ROWS, 4)
    monkeypatch.setattr(type(loaded.model), "generate", limited)
    found = list(iterate_texts(loaded.model, loaded.tokenizer, ROWS, 4))
    assert [len(ROWS[i]) for i, _ in found] == sorted(map(len, ROWS), reverse=True)
    assert [rows for rows, _ in sizes] == [5, 2, 2, 1]
    assert [generated for _, generated in sorted(found)] == expected


def test_iterate_texts_rejects_rows_without_room_and_models_without_an_end(clean):
    with pytest.raises(ValueError, match="2,048"):
        generate_texts(clean, [[65] * 2040], 9)
    assert generate_texts(clean, [], 4) == []
    clean.model.generation_config.eos_token_id = None
    endless = replace(clean, tokenizer=copy.deepcopy(clean.tokenizer))
    endless.tokenizer.eos_token = None
    with pytest.raises(ValueError, match="eos_token_id"):
        generate_texts(endless, ROWS, 4)
