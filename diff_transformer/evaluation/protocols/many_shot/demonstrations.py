# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A classification task in tokens: which demonstrations are shown in which order, the queries, and the labels.

Everything that is drawn depends on the seed alone, so two models with one tokenizer get the same prompts.
"""

import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest

from transformers import PreTrainedTokenizerBase

from ...text import check_enough, start_ids
from .classification import ClassificationTask, Example
from .labels import continuation_ids, label_ids

SEPARATOR = "\n==\n"  # after each example


def balanced(examples: Sequence[Example], seed: str) -> list[Example]:
    """All examples in rounds, each with one example of every class that has any left, in a random order: for every n,
    the first n examples are balanced by class."""
    rng = random.Random(seed)
    return [example for one in _rounds(examples, rng) for example in rng.sample(one, len(one))]


def randomly(examples: Sequence[Example], seed: str) -> list[Example]:
    """A random permutation (Figures 7a and 11, arXiv:2410.05258)."""
    return random.Random(seed).sample(sorted(examples), len(examples))


def alternating(examples: Sequence[Example], seed: str) -> list[Example]:
    """A permutation in which the classes take turns, always in the same order (Figure 7b, arXiv:2410.05258). The seed
    decides the order of the classes and the order of the examples within each class."""
    return [example for one in _rounds(examples, random.Random(seed)) for example in one]


ORDERS: dict[str, Callable[[Sequence[Example], str], list[Example]]] = {"random": randomly, "alternating": alternating}


def _rounds(examples: Sequence[Example], rng: random.Random) -> list[list[Example]]:
    """Rounds with one example of every class that has any left; the order of the classes is the same in all rounds."""
    by_class: dict[str, list[Example]] = defaultdict(list)
    for example in sorted(examples):
        by_class[example.label].append(example)
    classes = rng.sample(list(by_class.values()), len(by_class))
    shuffled = [rng.sample(members, len(members)) for members in classes]
    return [[example for example in one if example] for one in zip_longest(*shuffled)]


class Prompts:
    """A task in the tokens of one tokenizer. A prompt is `start`, demonstrations (each with SEPARATOR) and a query.

    Text, label with its leading space, and separator are encoded separately, so that a label has the same tokens
    everywhere. `demonstrations` are all that exist; the first n are balanced by class for every n. `queries` are the
    tokens of as many texts of the test split, `answers` the indices of their labels.

    Raises ValueError for labels without tokens, and for a test split that has fewer texts.
    """

    def __init__(self, task: ClassificationTask, tokenizer: PreTrainedTokenizerBase, queries: int, seed: int):
        self.task, self.seed = task, f"{seed}|{task.name}"
        prompt = task.source.prompt.removesuffix("{label}")
        head = prompt.rstrip(" ")
        self.label_ids = label_ids(tokenizer, [prompt[len(head) :] + label for label in task.labels], SEPARATOR)
        self.start = start_ids(tokenizer)

        def query(text: str) -> list[int]:
            return continuation_ids(tokenizer, head.replace("{text}", text))

        rest = continuation_ids(tokenizer, SEPARATOR)[1:]  # a label already has the first token of what follows it
        ending = {label: ids + rest for label, ids in zip(task.labels, self.label_ids, strict=True)}
        self.demonstrations = balanced(task.train, f"{self.seed}|demonstrations")
        self._ids = {example: query(example.text) + ending[example.label] for example in self.demonstrations}
        check_enough(len(task.test), queries, f"texts in the test split of {task.name}", "provide a larger split")
        drawn = random.Random(f"{self.seed}|queries").sample(task.test, len(task.test))[:queries]
        self.queries = [query(example.text) for example in drawn]
        self.answers = [task.labels.index(example.label) for example in drawn]

    def tokens(self, examples: Iterable[Example]) -> list[int]:
        return list(chain.from_iterable(self._ids[example] for example in examples))

    def length(self, count: int) -> int:
        """Tokens of a prompt with the first `count` demonstrations, the longest query and the longest label."""
        longest = max(map(len, self.queries)) + max(map(len, self.label_ids))
        return len(self.start) + len(self.tokens(self.demonstrations[:count])) + longest

    def fitting(self, length: int) -> int:
        """The number of demonstrations that fit into prompts of `length` tokens. Raises ValueError if not even one
        fits, or if all of them fit."""
        most = len(self.demonstrations)
        count = bisect_right(range(most + 1), length, key=self.length) - 1
        if not 0 < count < most:
            raise ValueError(
                f"{self.task.name}: demonstrations cannot fill a prompt of {length:,} tokens. With one it has "
                f"{self.length(1):,}, with all {most:,} it has {self.length(most):,}. Choose other --lengths."
            )
        return count

    def of_each_class(self, shots: int) -> int:
        """The number of demonstrations with `shots` per class. Raises ValueError if a class has fewer examples."""
        label, fewest = Counter(example.label for example in self.demonstrations).most_common()[-1]
        if fewest < shots:
            raise ValueError(
                f"{self.task.name}: the label {label!r} has {fewest} examples, fewer than {shots}. Lower --shots."
            )
        return shots * len(self.label_ids)
