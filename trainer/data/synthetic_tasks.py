"""Tasks whose answers stand far away, of any length: whoever gets them right has used the whole context.

`recall`: facts, each a key with one of `values` values, lie scattered in noise; later a question names a key, and its fact is
the answer. Which value a key has is drawn afresh for each sequence, so nothing can be learned by heart: chance is one in
`values` for whoever cannot see the fact.

`passkey`: a number is told somewhere in a long dull text and asked for at its end, through the run's own tokenizer. A
sequence is packed with texts of several lengths, and the number lies at any depth.

Only answers have labels. An Answer says how far away its fact is, for accuracy by distance, or by depth and length.
"""

from typing import NamedTuple

import numpy as np

from ringspan.trainer.data.tokenizer import Tokenizer

NO_LABEL = -100


class Packed(NamedTuple):
    """A whole sequence, with the lengths of its documents."""

    tokens: np.ndarray  # int64 (S,), as labels
    labels: np.ndarray
    lengths: np.ndarray
    answers: "Answers"


class Answers(NamedTuple):
    """One entry an answer. An answer of several tokens is right if all of them are."""

    at: np.ndarray  # (num, tokens of an answer): where its labels stand
    fact: np.ndarray  # where the fact's last token stands
    length: np.ndarray  # of the document
    depth: np.ndarray  # share of the document before the fact

    @property
    def distance(self) -> np.ndarray:
        return self.at[:, 0] - self.fact


class Recall:
    """A fact and a question are one token each, so that one layer of attention can learn to look back within a minute on a CPU.

    Facts stand in the first quarter, questions anywhere behind them. The ids are the tokenizer's highest below the tokens
    that begin and end documents: `values` facts for each key, a question for each key, and noise.
    """

    NOISE = 32

    def __init__(self, tokenizer: Tokenizer, length: int, keys: int, values: int, facts: float, questions: float) -> None:
        used = keys * values + keys + self.NOISE
        room = next((i for i in sorted((*tokenizer.begin, tokenizer.end)) if i >= used), tokenizer.size)
        if used > room:
            raise ValueError(f"keys={keys}, values={values}: they need {used} ids, and the tokenizer has {room}; ask for fewer")
        self.num_facts, self.num_asked = max(keys, int(facts * length)), int(questions * length)
        if self.num_facts > length // 4 or self.num_facts + self.num_asked > length:
            raise ValueError(
                f"keys={keys}, facts={facts}, questions={questions}: {self.num_facts} facts have to fit into a quarter of a "
                f"sequence of {length} tokens, and {self.num_asked} questions beside them; ask for fewer"
            )
        self.length, self.num_keys, self.num_values = length, keys, values
        self.first_question = room - keys * values - keys
        self.first_fact = room - keys * values

    def sequence(self, rng: np.random.Generator) -> Packed:
        tokens = self.first_question - 1 - rng.integers(0, self.NOISE, self.length)
        labels = np.full(self.length, NO_LABEL)
        facts = self.first_fact + np.arange(self.num_keys) * self.num_values + rng.integers(0, self.num_values, self.num_keys)
        told = rng.choice(self.length // 4, self.num_facts, replace=False)
        about = rng.permutation(np.arange(self.num_facts) % self.num_keys)  # a key may be told of more than once
        tokens[told] = facts[about]
        places = [np.sort(told[about == key]) for key in range(self.num_keys)]
        first = np.array([place[0] for place in places])
        asked = np.setdiff1d(rng.choice(self.length, self.num_asked, replace=False), told)
        asked = asked[asked > first.min()]
        key = np.argsort(first)[rng.integers(0, np.searchsorted(np.sort(first), asked))]  # one of those told of before
        tokens[asked], labels[asked] = self.first_question + key, facts[key]
        last = np.empty_like(asked)  # where it was told of last
        for index, place in enumerate(places):
            here = asked[key == index]
            last[key == index] = place[np.searchsorted(place, here) - 1]
        answers = Answers(asked[:, None], last, np.full(len(asked), self.length), last / self.length)
        return Packed(tokens, labels, np.array([self.length]), answers)


class Passkey:
    """The texts of a sequence are a quarter, a quarter and a half of it long, so that short ones are seen as well."""

    SHARES = (4, 4, 2)

    def __init__(self, tokenizer: Tokenizer, length: int, digits: int) -> None:
        self.tokenizer, self.length, self.digits = tokenizer, length, digits
        self.dull = self._encode("The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ")
        self.question = self._encode("What is the pass key? The pass key is")
        shortest = length // max(self.SHARES)
        self.begin = np.array(tokenizer.begin, np.int64)
        needed = len(self.begin) + len(self._fact("8" * digits)) + len(self.question) + digits + 2
        if shortest < needed:
            raise ValueError(
                f"passkey: a text of {shortest} tokens has no room for the key and the question, which take {needed}: "
                f"make data.length at least {needed * max(self.SHARES)}"
            )

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(next(iter(self.tokenizer.encode([text.encode()]))), np.int64)

    def _fact(self, key: str) -> np.ndarray:
        return self._encode(f"The pass key is {key}. Remember it. {key} is the pass key. ")

    def text(self, rng: np.random.Generator, length: int, depth: float) -> tuple[np.ndarray, int, int]:
        """The tokens of one text, where its fact ends, and where its answer begins."""
        key = "".join(map(str, rng.integers(0, 10, self.digits)))
        fact, answer = self._fact(key), self._encode(" " + key)
        hay = length - len(self.begin) - len(fact) - len(self.question) - len(answer) - 1
        before = int(hay * depth)
        dull = np.resize(self.dull, hay)
        parts = [self.begin, dull[:before], fact, dull[before:], self.question, answer, [self.tokenizer.end]]
        return np.concatenate(parts), len(self.begin) + before + len(fact) - 1, length - 1 - len(answer)

    def sequence(self, rng: np.random.Generator) -> Packed:
        sizes = [self.length // share for share in self.SHARES]
        sizes[-1] = self.length - sum(sizes[:-1])
        texts, labels, at, facts, depths, begin = [], np.full(self.length, NO_LABEL), [], [], [], 0
        for size in (sizes[i] for i in rng.permutation(len(sizes))):
            depth = rng.random()
            text, fact, answer = self.text(rng, size, depth)
            where = np.arange(begin + answer - 1, begin + size - 2)  # each token's label is the next token
            labels[where] = text[answer : size - 1]
            at.append(where)
            facts.append(begin + fact)
            depths.append(depth)
            texts.append(text)
            begin += size
        # Answers of one token count differ from tokenizer to tokenizer, hardly from key to key: shorter ones repeat a token.
        width = max(map(len, at))
        table = np.stack([np.pad(where, (0, width - len(where)), mode="edge") for where in at])
        lengths = np.array([len(text) for text in texts])
        answers = Answers(table, np.array(facts), lengths, np.array(depths))
        return Packed(np.concatenate(texts), labels, lengths, answers)
