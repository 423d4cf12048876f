# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Insertion of needles: whatever the length, the number and the depths, all are there and where they should be."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from diff_transformer import cl100k_tokenizer
from diff_transformer.evaluation.protocols.needle.haystack import (
    CITIES,
    NEEDLE,
    WORDINGS,
    haystack_tokens,
    needle_prompt,
)

TOKENIZER = cl100k_tokenizer(vocab_size=300)
YOCO, LWM = WORDINGS.values()
TEXT = "".join(f"It rained on day {i}. Nobody went out for 3.5 hours or more, until the sun came.\n" for i in range(9))
HAYSTACK = TOKENIZER(TEXT)["input_ids"]

grids = st.tuples(st.integers(1, 12), st.integers(1, 12)).filter(lambda pair: pair[1] <= pair[0])


def build(length=1200, needles=3, queried=1, depth=50, seed=0, wording=YOCO, tokenizer=TOKENIZER, haystack=HAYSTACK):
    return needle_prompt(tokenizer, wording, haystack, length, needles, queried, depth, random.Random(seed))


def without_needles(prompt):
    """The haystack of a prompt, and the place of each needle in it."""
    begin, end = prompt.context
    filler, places, done = [], {}, begin
    for city, (first, stop) in prompt.spans.items():
        filler += prompt.input_ids[done:first]
        places[city] = len(filler)
        done = stop
    return filler + prompt.input_ids[done:end], places


@settings(max_examples=20, deadline=None)
@given(
    pair=grids,
    length=st.integers(1500, 4000),
    depth=st.integers(0, 100),
    seed=st.integers(0, 2**32),
    wording=st.sampled_from(list(WORDINGS.values())),
)
def test_needle_prompt_has_every_needle_where_it_should_be(pair, length, depth, seed, wording):
    needles, queried = pair
    prompt = build(length, needles, queried, depth, seed, wording)
    text = TOKENIZER.decode(prompt.input_ids)

    assert len(prompt.input_ids) == length
    assert len(prompt.spans) == needles and len(prompt.wanted) == queried
    numbers = {}
    for city, (first, stop) in prompt.spans.items():
        sentence = TOKENIZER.decode(prompt.input_ids[first:stop])
        numbers[city] = sentence.removeprefix(NEEDLE.partition("{number}")[0].format(city=city)).strip()
        assert numbers[city].isdecimal() and int(numbers[city]) in wording.numbers
        assert text.count(sentence) == 1
    assert len(set(numbers.values())) == needles, "two cities have the same number"
    assert prompt.wanted.items() <= numbers.items()

    begin, end = prompt.context
    edges = [begin, *(edge for span in prompt.spans.values() for edge in span), end]
    assert edges == sorted(edges), "needles overlap, or are not in the order of the text"
    assert TOKENIZER.decode(prompt.input_ids[:begin]) == wording.head
    assert TOKENIZER.decode(prompt.input_ids[end:]) == wording.question(list(prompt.wanted))

    filler, places = without_needles(prompt)
    around = HAYSTACK * (2 + len(filler) // len(HAYSTACK))
    assert any(around[i : i + len(filler)] == filler for i in range(len(HAYSTACK))), "not a part of the haystack"
    target = round(len(filler) * depth / 100)
    for city in prompt.wanted:
        # Sentence ends have a test of their own
        assert places[city] <= target if wording.at_sentence_ends else places[city] == target


def test_needle_prompt_puts_needles_that_are_not_queried_anywhere():
    places = []
    for seed in range(200):
        prompt = build(needles=2, depth=0, seed=seed)
        filler, found = without_needles(prompt)
        places += [place / len(filler) for city, place in found.items() if city not in prompt.wanted]
    assert 0.4 < sum(places) / 200 < 0.6 and min(places) < 0.1 and max(places) > 0.9


def test_needle_prompt_puts_cities_queried_at_one_depth_in_either_order():
    prompts = [build(needles=2, queried=2, seed=seed) for seed in range(20)]
    assert {list(prompt.spans) == list(prompt.wanted) for prompt in prompts} == {True, False}


def test_needle_prompt_cuts_other_parts_of_the_haystack_for_other_samples():
    haystack = list(range(100, 300)) * 40
    fillers = [build(length=800, needles=1, depth=100, seed=seed, haystack=haystack) for seed in range(4)]
    assert len({prompt.input_ids[prompt.context[0]] for prompt in fillers}) > 1


def test_wordings_read_as_published():
    assert YOCO.head.startswith(
        "There is a special magic number inside a lot of irrelevant text. Find it and memorize"
    )
    assert NEEDLE == "\nThe special magic {city} number is: {number}\n"
    assert YOCO.question(["Oslo"]) == "\nWhat is the special magic Oslo number? The special magic Oslo number is "
    two = "\nWhat are the special magic A and B numbers? The special magic A and B numbers are "
    assert YOCO.question(["A", "B"]) == two and "A, B and C" in YOCO.question(["A", "B", "C"])
    rest = "? Don't give information outside the document. ASSISTANT: "
    assert LWM.head == "You are a helpful assistant. USER: "
    assert LWM.question(["Oslo"]) == f" What is the special magic number for Oslo{rest}"
    assert LWM.question(["A", "B", "C"]) == f" What are the special magic numbers for A, B, and C{rest}"


def test_needle_prompt_of_lwm_takes_the_sentence_end_before_the_depth():
    sentences = [TOKENIZER(text)["input_ids"] for text in ("One two. ", "Three four five. ")]
    haystack = [*sentences[0], *sentences[1]]
    for depth in range(0, 100, 10):
        for seed in range(2):
            prompt = build(needles=1, depth=depth, seed=seed, wording=LWM, haystack=haystack)
            filler, places = without_needles(prompt)
            (place,) = places.values()
            between = TOKENIZER.decode(filler[place : round(len(filler) * depth / 100)])
            assert place == 0 or TOKENIZER.decode(filler[:place])[-1] == "."
            assert "." not in between, f"a later sentence end was passed over: {between!r}"


def test_cities_are_many_and_no_name_is_in_another():
    assert len(CITIES) == len(set(CITIES)) >= 100
    assert not [(a, b) for a in CITIES for b in CITIES if a != b and a.lower() in b.lower()]


def test_haystack_tokens_are_of_all_documents_up_to_the_limit(monkeypatch):
    tokens = haystack_tokens(["one", "", "<|endoftext|>two"], TOKENIZER)
    assert TOKENIZER.decode(tokens) == "one\n<|endoftext|>two\n"
    assert TOKENIZER.eos_token_id not in tokens, "special tokens of a document are text"
    with pytest.raises(ValueError, match="no text to hide needles in"):
        haystack_tokens(["", ""], TOKENIZER)

    def texts():
        yield "abc" * 10
        raise AssertionError("read on")

    monkeypatch.setattr("diff_transformer.evaluation.protocols.needle.haystack.HAYSTACK_TOKENS", 10)
    assert len(haystack_tokens(texts(), TOKENIZER)) == 10


def test_needle_prompt_begins_once_with_the_token_that_begins_texts():
    tokenizer = cl100k_tokenizer(vocab_size=300, bos_token="<|fim_prefix|>")
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|fim_prefix|> $A", special_tokens=[("<|fim_prefix|>", bos)]
    )
    prompt = build(tokenizer=tokenizer)
    assert prompt.input_ids[0] == bos and prompt.input_ids.count(bos) == 1 and len(prompt.input_ids) == 1200
    assert prompt.input_ids[1:] == build(length=1199).input_ids


@pytest.mark.parametrize("needles, queried", [(0, 0), (2, 0), (2, 3), (len(CITIES) + 1, 1)])
def test_needle_prompt_rejects_impossible_numbers_of_needles(needles, queried):
    with pytest.raises(ValueError, match="1 <= queried <= needles"):
        build(needles=needles, queried=queried)
