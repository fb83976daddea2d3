"""Templates, keys and filler words of the needle tasks (needles.py)."""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ringspan.trainer.data.tokenizer import Tokenizer

MIN_WORDS = 64  # least number of tokens of each kind for keys of words


class Language(NamedTuple):
    """Syllables of the keys, and templates: {k} and {l} are keys, {v} is a value, {V} the answer."""

    consonants: str
    vowels: str
    facts: tuple[str, ...]
    values: tuple[str, ...]  # facts of multi_value
    roots: tuple[str, ...]  # the first assignment of a chain
    copies: tuple[str, ...]
    places: tuple[str, ...]
    questions: tuple[str, ...]
    all_values: tuple[str, ...]  # question of multi_value
    several: tuple[str, ...]  # question of multi_query: beginning, each key, ending with the answer
    variable: tuple[str, ...]
    place: tuple[str, ...]


TRAINING = Language(
    "bdgklmnp",
    "aou",
    ("The code of{k} is{v}.\n", "Remember that{k} has the number{v}.\n", "In this list{k} stands for{v}.\n"),
    ("One number of{k} is{v}.\n", "The list of{k} has the entry{v}.\n"),
    ("Let{k} be{v}.\n", "Set{k} ={v}.\n"),
    ("Let{l} be the same as{k}.\n", "Set{l} ={k}.\n"),
    ("The{k} is in the house{l}.\n", "You find the{k} at the house{l}.\n"),
    (
        "What is the code of{k}? The code of{k} is{V}.\n",
        "Which number does{k} have? Remember that{k} has the number{V}.\n",
        "What does{k} stand for? In this list{k} stands for{V}.\n",
    ),
    ("What are all numbers of{k}, in order? They are{V}.\n", "List the entries of{k}:{V}.\n"),
    ("What are the codes of", "{k}", "? They are{V}.\n"),
    ("What is{k} now? Now{k} is{V}.\n", "Print{k}:{V}.\n"),
    (
        "What is the code of the house with the{k}? The code of the house with the{k} is{V}.\n",
        "Open the house of the{k} with{V}.\n",
    ),
)
EVALUATION = Language(
    "cfhjrstvwz",
    "ei",
    ("The value stored under{k} is{v}.\n", "Someone wrote that{k} means{v}.\n"),
    ("Another value stored under{k} is{v}.\n",),
    ("The variable{k} starts as{v}.\n",),
    ("The variable{l} takes the value of{k}.\n",),
    ("The key of{k} hangs in the room{l}.\n",),
    ("Which value is stored under{k}? The value stored under{k} is{V}.\n",),
    ("Which values are stored under{k}, from first to last? The values are{V}.\n",),
    ("Which values are stored under", "{k}", "? The values are{V}.\n"),
    ("Which value has the variable{k}? The variable{k} has the value{V}.\n",),
    ("Which value is stored under the room with the key of{k}? The room with the key of{k} has the value{V}.\n",),
)
WORDS = (
    "river stone garden window letter morning bridge market teacher winter village forest",
    "crosses follows remembers covers leaves watches carries meets opens describes",
    "quiet green narrow early distant simple bright heavy old small",
)


class Words:
    """Words of two tokens of letters: a token with a space before it and one that continues it.

    Args:
        tokenizer: the run's tokenizer.
        evaluation: take the evaluation's third of both kinds of tokens; otherwise training's two thirds.
    """

    def __init__(self, tokenizer: Tokenizer, evaluation: bool) -> None:
        texts = {i: tokenizer.decode([i]) for i in range(min(tokenizer.size, 2**15))}
        kinds = ([(i, text) for i, text in texts.items() if re.fullmatch(kind, text)] for kind in (" [a-z]{3,8}", "[a-z]{2,8}"))
        self.starts, self.ends = ([each for n, each in enumerate(kind) if (n % 3 == 0) == evaluation] for kind in kinds)

    def text(self, start: int, end: int) -> str:
        """Return the word of a start and an end, by their numbers."""
        return self.starts[start][1] + self.ends[end][1]

    def ids(self, start: int, end: int) -> list[int]:
        """Return its tokens."""
        return [self.starts[start][0], self.ends[end][0]]


@functools.lru_cache(8)
def words_of(tokenizer: Tokenizer, evaluation: bool) -> Words | None:
    """Return the tokenizer's words; None if it has few tokens of letters, or encodes most words in another way."""
    words = Words(tokenizer, evaluation)
    if min(len(words.starts), len(words.ends)) < MIN_WORDS:
        return None
    sample = [(i, i) for i in range(MIN_WORDS)]
    encoded = tokenizer.encode([words.text(*pair).encode() for pair in sample])
    right = sum(ids.tolist() == words.ids(*pair) for ids, pair in zip(encoded, sample, strict=True))
    return words if right > MIN_WORDS // 2 else None


def fill(rng: np.random.Generator, templates: Sequence[str], **names: str) -> list[str]:
    """Return the pieces of a random template with its names filled in."""
    template = templates[int(rng.integers(len(templates)))]  # rng.choice takes ten times as long
    return [names[piece[1]] if piece[0] == "{" else piece for piece in _pieces(template)]


@functools.lru_cache(1024)
def _pieces(template: str) -> list[str]:
    return [piece for piece in re.split(r"(\{\w\})", template) if piece]
