# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Needles in a haystack: sentences that give a city a magic number, somewhere in a long text.

The needles are placed once, in the order of their depths and in tokens of the model: none is cut, none moves another,
and a prompt has exactly the length asked for. Of the same seed it is the same prompt, for every model with that
tokenizer.
"""

import random
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from .documents import DocumentArguments
from .prefill import CHUNK
from .tokens import start_ids, text_ids

HAYSTACK_TOKENS = 2**20  # of the documents, at most: what a prompt's haystack is cut from

# No name is a part of another, so that a name in an answer is one city's
# fmt: off
CITIES = (
    "Abidjan", "Abu Dhabi", "Accra", "Addis Ababa", "Adelaide", "Algiers", "Amsterdam", "Anchorage", "Ankara",
    "Antwerp", "Athens", "Auckland", "Baku", "Bamako", "Bangkok", "Barcelona", "Beirut", "Belgrade", "Belo Horizonte",
    "Bergen", "Bordeaux", "Boston", "Bratislava", "Brisbane", "Brussels", "Bucharest", "Budapest", "Buenos Aires",
    "Cairo", "Calgary", "Cape Town", "Caracas", "Cartagena", "Casablanca", "Chengdu", "Chicago", "Cologne", "Colombo",
    "Copenhagen", "Dakar", "Damascus", "Dar es Salaam", "Denver", "Dhaka", "Doha", "Dublin", "Durban", "Edinburgh",
    "Florence", "Fukuoka", "Gaborone", "Geneva", "Glasgow", "Guadalajara", "Guatemala City", "Hamburg", "Hanoi",
    "Harare", "Havana", "Helsinki", "Ho Chi Minh City", "Hong Kong", "Honolulu", "Houston", "Hyderabad", "Istanbul",
    "Jakarta", "Jerusalem", "Johannesburg", "Kampala", "Karachi", "Kathmandu", "Khartoum", "Kigali", "Kingston",
    "Kinshasa", "Kuala Lumpur", "Kyiv", "Kyoto", "La Paz", "Lagos", "Lahore", "Las Vegas", "Leipzig", "Libreville",
    "Lima", "Lisbon", "Ljubljana", "London", "Los Angeles", "Luanda", "Lusaka", "Lyon", "Madrid", "Managua", "Manila",
    "Maputo", "Marrakesh", "Marseille", "Melbourne", "Mexico City", "Miami", "Milan", "Minneapolis", "Mogadishu",
    "Mombasa", "Montevideo", "Montreal", "Mumbai", "Munich", "Nagoya", "Nairobi", "Naples", "New Delhi", "New Orleans",
    "New York", "Nicosia", "Osaka", "Oslo", "Ottawa", "Panama City", "Paris", "Perth", "Philadelphia", "Phnom Penh",
    "Port Louis", "Port Moresby", "Porto Alegre", "Prague", "Quito", "Rabat", "Riga", "Rio de Janeiro", "Riyadh",
    "Rome", "Rotterdam", "Salt Lake City", "San Diego", "San Francisco", "San Salvador", "Santiago", "Santo Domingo",
    "Sarajevo", "Seattle", "Seoul", "Seville", "Shanghai", "Shenzhen", "Singapore", "Skopje", "Sofia", "Stockholm",
    "Surabaya", "Sydney", "Taipei", "Tallinn", "Tashkent", "Tbilisi", "Tehran", "Thessaloniki", "Tokyo", "Toronto",
    "Toulouse", "Tripoli", "Tunis", "Ulaanbaatar", "Utrecht", "Valencia", "Vancouver", "Vienna", "Vilnius", "Warsaw",
    "Wellington", "Winnipeg", "Yangon", "Yerevan", "Zagreb", "Zanzibar", "Zurich",
)
# fmt: on


@dataclass(frozen=True)
class Wording:
    """What stands around the haystack and in it.

    `ask_one` and `ask_several` follow the context; `{cities}` are names with `conjunction` before the last. With
    `single_tokens` only those numbers are used that are one token of the tokenizer.
    """

    head: str
    ask_one: str
    ask_several: str
    conjunction: str
    numbers: range
    at_sentence_ends: bool
    needle: str = "\nThe special magic {city} number is: {number}\n"
    cities: Sequence[str] = CITIES
    single_tokens: bool = False

    def question(self, cities: Sequence[str]) -> str:
        if len(cities) == 1:
            return self.ask_one.format(cities=cities[0])
        return self.ask_several.format(cities=", ".join(cities[:-1]) + self.conjunction + cities[-1])


WORDINGS = {
    # The authors' in their code of YOCO (arXiv:2405.05254), which asks for one city; for several, its plural
    "yoco": Wording(
        head="There is a special magic number inside a lot of irrelevant text. Find it and memorize them. I will quiz "
        "you about the magic number there. ",
        ask_one="\nWhat is the special magic {cities} number? The special magic {cities} number is ",
        ask_several="\nWhat are the special magic {cities} numbers? The special magic {cities} numbers are ",
        conjunction=" and ",
        numbers=range(1, 50_001),
        at_sentence_ends=False,
    ),
    # That of the Large World Model (arXiv:2402.08268), for chat models
    "lwm": Wording(
        head="You are a helpful assistant. USER: ",
        ask_one=" What is the special magic number for {cities}? Don't give information outside the document. "
        "ASSISTANT: ",
        ask_several=" What are the special magic numbers for {cities}? Don't give information outside the document. "
        "ASSISTANT: ",
        conjunction=", and ",
        numbers=range(1_000_000, 10_000_000),
        at_sentence_ends=True,
    ),
    # Ours, for small models that are trained on it: `A42` on a line of its own, and `A` to be asked. Names and numbers
    # are single tokens of cl100k_base and of its prefixes
    "plain": Wording(
        head="\n",
        ask_one="\n{cities}",
        ask_several="\n{cities}",
        conjunction=" ",
        numbers=range(1000),
        at_sentence_ends=False,
        needle="\n{city}{number}\n",
        cities=string.ascii_uppercase,
        single_tokens=True,
    ),
}


@lru_cache(maxsize=1)  # for all prompts of a run
def numbers_for(wording: Wording, tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """The numbers of a wording, for a tokenizer."""
    if not wording.single_tokens:
        return wording.numbers
    return [number for number in wording.numbers if len(text_ids(tokenizer, str(number))) == 1]


@dataclass
class NeedleArguments(DocumentArguments):
    """What is common to the protocols on such prompts; the dataset is the haystack."""

    depths: list[int] = field(
        default_factory=lambda: [0, 25, 50, 75, 100],
        metadata={"help": "Where the answer is in the haystack, in percent: 0 is its beginning."},
    )
    samples: int = field(default=50, metadata={"help": "Prompts a cell."})
    wording: str = field(
        default="yoco",
        metadata={
            "help": "Of the prompt: `yoco`, of earlier code of the authors, for base models, numbers to 50000; or "
            "`lwm`, of the Large World Model, for chat models, numbers of 7 digits, needles at ends of sentences; or "
            "`plain`, a letter and a number without a word more, for small models trained on such lines.",
            "choices": list(WORDINGS),
        },
    )
    chunk_size: int = field(default=CHUNK, metadata={"help": "Tokens that go through the model at once."})

    def check(self) -> None:
        """Raises ValueError for values that no prompt can have."""
        outside = [depth for depth in self.depths if not 0 <= depth <= 100]
        if outside:
            raise ValueError(f"Got the depths {outside}; they are percent of the haystack, from 0 to 100.")
        if self.wording not in WORDINGS:
            raise ValueError(f"Got the wording {self.wording!r}; there are {', '.join(WORDINGS)}.")
        if self.samples < 1:
            raise ValueError(f"Got {self.samples} samples a cell; at least one is needed.")


@dataclass(frozen=True)
class NeedlePrompt:
    """`spans` are of the needles, by city, in the order of the text, and `context` is that of the haystack with them:
    first token, and the one after the last. `numbers` are those of all needles by city, `wanted` those that are asked
    for, in the order of the question."""

    input_ids: list[int]
    spans: dict[str, tuple[int, int]]
    context: tuple[int, int]
    numbers: dict[str, str]
    wanted: dict[str, str]


def haystack_tokens(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of documents, a new line after each, up to `HAYSTACK_TOKENS`. Special tokens in a text are text.

    Raises ValueError if there are none.
    """
    tokens: list[int] = []
    for text in filter(None, texts):
        tokens += text_ids(tokenizer, f"{text}\n")
        if len(tokens) >= HAYSTACK_TOKENS:
            break
    if not tokens:
        raise ValueError("The documents have no text to hide needles in. Name others: --dataset PATH.")
    return tokens[:HAYSTACK_TOKENS]


def needle_prompt(
    tokenizer: PreTrainedTokenizerBase,
    wording: Wording,
    haystack: Sequence[int],
    length: int,
    needles: int,
    queried: int,
    depth: int,
    rng: random.Random,
) -> NeedlePrompt:
    """A prompt of exactly `length` tokens with `needles` needles, `queried` of which are asked for.

    Those are at `depth` percent of the haystack, the others anywhere. The haystack is cut from `haystack` at a random
    place, and begins again where that ends. A tokenizer that begins texts with a token of its own begins the prompt
    with it.

    Raises ValueError if the prompt has no room for a haystack, or the numbers of needles are impossible.
    """
    known_numbers = numbers_for(wording, tokenizer)
    most = min(len(wording.cities), len(known_numbers))
    if not 1 <= queried <= needles <= most:
        raise ValueError(
            f"Got {needles} needles, {queried} of them queried; needed is 1 <= queried <= needles <= {most}, the "
            "names and numbers that this wording has for the tokenizer."
        )
    cities = rng.sample(wording.cities, needles)
    numbers = [str(number) for number in rng.sample(known_numbers, needles)]
    pieces = [
        text_ids(tokenizer, wording.needle.format(city=city, number=number))
        for city, number in zip(cities, numbers, strict=True)
    ]
    asked = cities[:queried]
    head = start_ids(tokenizer) + text_ids(tokenizer, wording.head)
    tail = text_ids(tokenizer, wording.question(asked))
    room = length - len(head) - len(tail) - sum(map(len, pieces))
    if room < 1:
        raise ValueError(
            f"A prompt of {length:,} tokens has no room for a haystack: its words and {needles} needles take "
            f"{length - room:,}. Ask for longer prompts or fewer needles."
        )
    offset = rng.randrange(len(haystack))
    filler = [haystack[i % len(haystack)] for i in range(offset, offset + room)]
    places = [round(room * depth / 100) if i < queried else rng.randint(0, room) for i in range(needles)]
    if wording.at_sentence_ends:
        places = [_sentence_end(tokenizer, filler, place) for place in places]

    input_ids, spans, done = list(head), {}, 0
    # Needles of one place are in random order, lest that of the question be a hint
    for place, _, i in sorted((place, rng.random(), i) for i, place in enumerate(places)):
        input_ids += filler[done:place]
        spans[cities[i]] = (len(input_ids), len(input_ids) + len(pieces[i]))
        input_ids += pieces[i]
        done = place
    input_ids += filler[done:]
    context = (len(head), len(input_ids))
    input_ids += tail

    assert len(input_ids) == length
    assert all(input_ids[slice(*spans[city])] == piece for city, piece in zip(cities, pieces, strict=True))
    number_of = dict(zip(cities, numbers, strict=True))
    return NeedlePrompt(input_ids, spans, context, number_of, {city: number_of[city] for city in asked})


def _sentence_end(tokenizer: PreTrainedTokenizerBase, filler: list[int], place: int) -> int:
    """The last place up to `place` that follows a sentence; the beginning if there is none, the end stays the end."""
    while 0 < place < len(filler) and not str(tokenizer.decode(filler[place - 1])).rstrip().endswith("."):
        place -= 1
    return place


__all__ = ["CITIES", "WORDINGS", "NeedleArguments", "NeedlePrompt", "Wording", "haystack_tokens", "needle_prompt"]
