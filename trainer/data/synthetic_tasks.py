"""Synthetic tasks of any length whose answers depend on distant tokens: a correct answer shows use of the whole context.

`recall`: facts (a key with one of `values` values) are scattered in noise in the first quarter. A later question names a key;
its most recent fact is the answer. Values are drawn anew for each sequence, so chance is 1 / `values` without the fact.

`passkey`: a number is stated somewhere in a long filler text and asked for at its end, through the run's own tokenizer. A
sequence is packed from texts of several lengths, and the number is at any depth.

Only answers have labels. `Answers` holds the distance to the fact, for accuracy by distance or by depth and length.
"""

from typing import NamedTuple

import numpy as np

from ringspan.trainer.data.tokenizer import Tokenizer

NO_LABEL = -100


class Packed(NamedTuple):
    """A sequence of S tokens, with the lengths of its documents."""

    tokens: np.ndarray  # int64 (S,)
    labels: np.ndarray  # int64 (S,)
    lengths: np.ndarray  # int64 (documents,)
    answers: "Answers"


class Answers(NamedTuple):
    """The num answers of a sequence. An answer of several tokens is correct if all of them are."""

    positions: np.ndarray  # (num, tokens of an answer): positions of its labels
    fact: np.ndarray  # (num,): position of the last token of the fact
    length: np.ndarray  # (num,): length of the document
    depth: np.ndarray  # (num,): share of the document before the fact
    family: np.ndarray | None = None  # needles, (num,): index of the family
    chance: np.ndarray | None = None  # needles, (num,): probability that a guess among the stated values is right

    @property
    def distance(self) -> np.ndarray:
        """Tokens between the fact and its answer, (num,)."""
        return self.positions[:, 0] - self.fact


class Recall:
    """Facts and questions of one token each, so that one layer of attention learns recall within a minute on a CPU.

    Facts are in the first quarter, questions anywhere after the first fact. The ids are the highest of the tokenizer below its
    begin and end tokens:  noise | a question per key | `values` facts per key

    Args:
        tokenizer: the run's tokenizer; only its ids are used.
        length: tokens per sequence.
        keys, values: keys per sequence, and values that a key can have.
        facts, questions: shares of the tokens.
    Raises:
        ValueError: the tokenizer has too few ids, or the sequence is too short.
    """

    NOISE = 32  # ids

    def __init__(self, tokenizer: Tokenizer, length: int, keys: int, values: int, facts: float, questions: float) -> None:
        needed = keys * values + keys + self.NOISE
        available = next((i for i in sorted((*tokenizer.begin, tokenizer.end)) if i >= needed), tokenizer.size)
        if needed > available:
            raise ValueError(
                f"keys={keys}, values={values}: they need {needed} ids, and the tokenizer has {available}; ask for fewer"
            )
        self.num_facts, self.num_asked = max(keys, int(facts * length)), int(questions * length)
        if self.num_facts > length // 4 or self.num_facts + self.num_asked > length:
            raise ValueError(
                f"keys={keys}, facts={facts}, questions={questions}: {self.num_facts} facts must fit into a quarter of a "
                f"sequence of {length} tokens, with {self.num_asked} questions in the rest; ask for fewer"
            )
        self.length, self.num_keys, self.num_values = length, keys, values
        self.first_question = available - keys * values - keys
        self.first_fact = available - keys * values

    def sequence(self, rng: np.random.Generator) -> Packed:
        """Draw one sequence."""
        tokens = self.first_question - 1 - rng.integers(0, self.NOISE, self.length)
        labels = np.full(self.length, NO_LABEL)
        facts = self.first_fact + np.arange(self.num_keys) * self.num_values + rng.integers(0, self.num_values, self.num_keys)
        fact_positions = rng.choice(self.length // 4, self.num_facts, replace=False)
        fact_keys = rng.permutation(np.arange(self.num_facts) % self.num_keys)  # a key may have several facts, all equal
        tokens[fact_positions] = facts[fact_keys]
        by_key = [np.sort(fact_positions[fact_keys == key]) for key in range(self.num_keys)]
        first = np.array([positions[0] for positions in by_key])
        asked = np.setdiff1d(rng.choice(self.length, self.num_asked, replace=False), fact_positions)
        asked = asked[asked > first.min()]
        key = np.argsort(first)[rng.integers(0, np.searchsorted(np.sort(first), asked))]  # a key with an earlier fact
        tokens[asked], labels[asked] = self.first_question + key, facts[key]
        last = np.empty_like(asked)  # position of the key's most recent fact
        for index, positions in enumerate(by_key):
            last[key == index] = positions[np.searchsorted(positions, asked[key == index]) - 1]
        answers = Answers(asked[:, None], last, np.full(len(asked), self.length), last / self.length)
        return Packed(tokens, labels, np.array([self.length]), answers)


class Passkey:
    """Texts of a quarter, a quarter and a half of the sequence, so that short texts occur too.

    Args:
        tokenizer: the run's tokenizer.
        length: tokens per sequence.
        digits: digits of the hidden number.
    Raises:
        ValueError: the shortest text has no space for the number and the question.
    """

    SHARES = (4, 4, 2)

    def __init__(self, tokenizer: Tokenizer, length: int, digits: int) -> None:
        self.tokenizer, self.length, self.digits = tokenizer, length, digits
        self.filler = self._encode("The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ")
        self.question = self._encode("What is the pass key? The pass key is")
        shortest = length // max(self.SHARES)
        self.begin = np.array(tokenizer.begin, np.int64)
        needed = len(self.begin) + len(self._fact("8" * digits)) + len(self.question) + digits + 2
        if shortest < needed:
            raise ValueError(
                f"passkey: a text of {shortest} tokens is too short for the key and the question, which take {needed}: "
                f"make data.length at least {needed * max(self.SHARES)}"
            )

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(next(iter(self.tokenizer.encode([text.encode()]))), np.int64)

    def _fact(self, key: str) -> np.ndarray:
        return self._encode(f"The pass key is {key}. Remember it. {key} is the pass key. ")

    def text(self, rng: np.random.Generator, length: int, depth: float) -> tuple[np.ndarray, int, int]:
        """Return the tokens of one text, the position of its fact's last token, and that of its answer's first."""
        key = "".join(map(str, rng.integers(0, 10, self.digits)))
        fact, answer = self._fact(key), self._encode(" " + key)
        num_filler = length - len(self.begin) - len(fact) - len(self.question) - len(answer) - 1
        before = int(num_filler * depth)
        filler, end = np.resize(self.filler, num_filler), np.array([self.tokenizer.end])
        tokens = np.concatenate([self.begin, filler[:before], fact, filler[before:], self.question, answer, end])
        return tokens, len(self.begin) + before + len(fact) - 1, length - 1 - len(answer)

    def sequence(self, rng: np.random.Generator) -> Packed:
        """Draw one sequence."""
        sizes = [self.length // share for share in self.SHARES]
        sizes[-1] = self.length - sum(sizes[:-1])
        texts, labels, answer_positions, facts, depths, begin = [], np.full(self.length, NO_LABEL), [], [], [], 0
        for size in (sizes[i] for i in rng.permutation(len(sizes))):
            depth = rng.random()
            text, fact, answer = self.text(rng, size, depth)
            positions = np.arange(begin + answer - 1, begin + size - 2)  # the label of a token is the next token
            labels[positions] = text[answer : size - 1]
            answer_positions.append(positions)
            facts.append(begin + fact)
            depths.append(depth)
            texts.append(text)
            begin += size
        # Keys of one sequence can differ in their number of tokens, which is rare: shorter answers repeat their last position.
        width = max(map(len, answer_positions))
        table = np.stack([np.pad(positions, (0, width - len(positions)), mode="edge") for positions in answer_positions])
        lengths = np.array([len(text) for text in texts])
        answers = Answers(table, np.array(facts), lengths, np.array(depths))
        return Packed(np.concatenate(texts), labels, lengths, answers)
