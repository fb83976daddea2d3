"""Templates, keys and filler words of the needle tasks (needles.py)."""

import functools
import re
from typing import NamedTuple

import numpy as np

from ringspan.trainer.data.tokenizer import Tokenizer

MIN_WORDS = 64  # least number of tokens of each kind for keys of words


# A sentence is one choice of each part. {k} and {l} are keys, {v} is a value, {V} the answer.
Template = tuple[tuple[str, ...], ...]


class Language(NamedTuple):
    """Syllables of the keys, and templates."""

    consonants: str
    vowels: str
    facts: Template
    values: Template  # facts of multi_value
    roots: Template  # the first assignment of a chain
    copies: Template
    places: Template
    questions: Template
    all_values: Template  # question of multi_value
    several: tuple[Template, Template]  # question of multi_query: before the keys, and after them
    variable: Template
    place: Template


OPENINGS = (
    "The code of", "The number of", "The mark of", "The entry for", "Remember that", "Do not forget that", "In this list",
    "We know that", "It is known that", "The report says that", "As agreed,", "For the record,", "Here", "By the way,",
    "On the third page", "They found that", "Note:", "Once more:",
)  # fmt: skip
RELATIONS = (
    " is", " equals", " has the number", " stands for", " comes to", " was set to", " points to", " goes with", " gives",
    " holds", " shows", " has", " gets", " counts as", " =", ":", " ->", " reads",
)  # fmt: skip
ASKED = (
    "What is the code of", "Which number has", "What about", "What was said of", "Tell me about", "Look up",
    "Find the entry for", "Do you remember", "Which number goes with", "Please repeat", "Now", "Question:",
)  # fmt: skip
ASKED_END = ("?", ".", " again?", ", please.", ":", " here?")
TRAINING = Language(
    consonants="bdgklmnp",
    vowels="aou",
    facts=(OPENINGS, ("{k}",), RELATIONS, ("{v}.\n",)),
    values=(
        ("One number of", "One more number of", "An entry of", "A number for", "Part of", "A line about", "One line of"),
        ("{k}",),
        (" is", " reads", " comes to", " gives", " shows", " =", ":"),
        ("{v}.\n",),
    ),
    roots=(("Let", "First let", "To begin, let", "We let"), ("{k}",), (" be", " =", " :=", " equal"), ("{v}.\n",)),
    copies=(
        ("Let", "Then let", "After that let", "Next, let", "We let"),
        ("{l}",),
        (" be the same as", " be a copy of", " follow", " equal", " have the number of", " =", " :="),
        ("{k}.\n",),
    ),
    places=(
        ("The", "You find that the", "They say the", "As before, the"),
        ("{k}",),
        (" is in the house", " is at the house", " lies in the house", " was left in the house", " belongs to the house"),
        ("{l}.\n",),
    ),
    questions=(ASKED, ("{k}",), ASKED_END, tuple(f" {opening}" for opening in OPENINGS), ("{k}",), RELATIONS, ("{V}.\n",)),
    all_values=(
        ("List", "Give me", "Name", "Tell me", "Repeat"),
        (" all numbers of", " the entries of", " each number of", " the whole list of"),
        ("{k}",),
        (" in order.", " in their order:", ", in order, please.", " in the same order?"),
        (" They are{V}.\n", "{V}.\n"),
    ),
    several=(
        (("What are the codes of", "Give me the numbers of", "Look up", "List the entries for", "Which numbers have"),),
        (ASKED_END, (" They are{V}.\n", " In this order:{V}.\n", "{V}.\n")),
    ),
    variable=(
        ("What is", "Print", "Show", "How much is", "Read"),
        ("{k}",),
        (" now?", "?", ":", " at the end?"),
        (" Now", " In the end", " By then", " So"),
        ("{k}",),
        (" is", " =", " has", " equals"),
        ("{V}.\n",),
    ),
    place=(
        ("What is the code of the house", "Open the house", "Which number has the house", "Find the house"),
        (" with the{k}", " of the{k}", " that has the{k}"),
        ("?", ".", ":"),
        (" The house of the", " The house with the", " The house that has the"),
        ("{k}",),
        RELATIONS,
        ("{V}.\n",),
    ),
)
EVALUATION = Language(
    consonants="cfhjrstvwz",
    vowels="ei",
    facts=(("The value stored under{k} is{v}.\n", "Someone wrote that{k} means{v}.\n"),),
    values=(("Another value stored under{k} is{v}.\n",),),
    roots=(("The variable{k} starts as{v}.\n",),),
    copies=(("The variable{l} takes the value of{k}.\n",),),
    places=(("The key of{k} hangs in the room{l}.\n",),),
    questions=(("Which value is stored under{k}? The value stored under{k} is{V}.\n",),),
    all_values=(("Which values are stored under{k}, from first to last? The values are{V}.\n",),),
    several=((("Which values are stored under",),), (("? The values are{V}.\n",),)),
    variable=(("Which value has the variable{k}? The variable{k} has the value{V}.\n",),),
    place=(("Which value is stored under the room with the key of{k}? The room with the key of{k} has the value{V}.\n",),),
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
        evaluation: take a third of the tokens of small letters; otherwise all others of letters or underscores.
    """

    def __init__(self, tokenizer: Tokenizer, evaluation: bool) -> None:
        texts = {i: tokenizer.decode([i]) for i in range(min(tokenizer.size, 2**15))}

        def matching(kind: str) -> list[tuple[int, str]]:
            return [(i, text) for i, text in texts.items() if re.fullmatch(kind, text)]

        held_out = [matching(kind)[::3] for kind in (" [a-z]{3,8}", "[a-z]{2,8}")]
        every = [matching(kind) for kind in (" [A-Za-z_]{2,}", "[A-Za-z_]{2,}")]
        others = [[each for each in kind if each not in held] for kind, held in zip(every, map(set, held_out), strict=True)]
        self.starts, self.ends = held_out if evaluation else others

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


class RandomPhrases:
    """Random tokens of letters in the place of parts of training's templates, so that a model learns which words are keys.

    A phrase has words of one or more tokens: with words of one token alone, every word of two tokens would look like a key.

    Args:
        tokenizer: the run's tokenizer. If it has few tokens of letters, words are syllables, as keys are.
    """

    LONGEST = 16  # tokens or syllables of a phrase

    def __init__(self, tokenizer: Tokenizer) -> None:
        words = words_of(tokenizer, False)  # type: ignore[arg-type]  # tokenizers are hashable
        if words is None:
            ends = [c + v for c in TRAINING.consonants for v in TRAINING.vowels]
            starts = [f" {syllable}" for syllable in ends]
        else:
            held_out = {f" {word}" for word in re.findall("[a-z]+", str(EVALUATION[2:]).lower())}
            starts = [text for _, text in words.starts if text.lower() not in held_out]
            ends = [text for _, text in words.ends]
        self.num_starts, self.pieces = len(starts), [*starts, *ends]

    def draw(self, rng: np.random.Generator) -> list[str]:
        """Draw 1 to 16 pieces, of which the first starts a word."""
        rest = rng.integers(0, len(self.pieces), rng.integers(self.LONGEST)).tolist()
        return [self.pieces[i] for i in (int(rng.integers(self.num_starts)), *rest)]


def fill(
    rng: np.random.Generator, template: Template, names: dict[str, str], phrases: RandomPhrases, share: float
) -> list[str]:
    """Return the pieces of a random sentence of a template.

    Args:
        rng: source of the choices.
        template: its parts are drawn independently.
        names: the key or value that stands for each letter in braces.
        phrases: random phrases.
        share: share of the parts without keys and values that phrases replace.
    """
    pieces: list[str] = []
    for choices in template:
        if share and "{" not in choices[0] and rng.random() < share:
            pieces += phrases.draw(rng)
        else:
            pieces += _pieces(choices[int(rng.integers(len(choices)))])  # rng.choice takes ten times as long
    return [names[piece[1]] if piece[0] == "{" else piece for piece in pieces]


@functools.lru_cache(2**15)
def _pieces(part: str) -> list[str]:
    return [piece for piece in re.split(r"(\{\w\})", part) if piece]
