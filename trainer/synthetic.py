"""Tasks whose answers stand far away, of any length: whoever gets them right has used the whole context.

`recall`: pairs (key, value) lie scattered in noise; later a key comes again and asks for its value. Keys, values and noise are
ids of their own, drawn afresh for each sequence, so nothing can be learned by heart. Chance is one in `values`.

`passkey`: a number is told somewhere in a long dull text and asked for at its end, through the run's own tokenizer. A
sequence is packed with texts of several lengths, and the number lies at any depth.

Only answers have labels. An Answer says how far away its fact is, for accuracy by distance, or by depth and length.
"""

from typing import NamedTuple

import numpy as np

from .tokenizer import Tokenizer

NO_LABEL = -100


class Sequence(NamedTuple):
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
    """The ids used are the tokenizer's highest below its end token: half of them (at most 1024 each) keys and noise."""

    def __init__(self, tokenizer: Tokenizer, length: int, pairs: int, queries: int, values: int) -> None:
        room = min(tokenizer.end, tokenizer.size)
        num = min((room - values) // 2, 1024)
        if num < pairs:
            raise ValueError(
                f"pairs={pairs}, values={values}: a tokenizer of {tokenizer.size} tokens has room for {max(num, 0)} keys; "
                "ask for fewer"
            )
        slots = (length - 1) // 2
        if pairs * (1 + queries) > slots:
            raise ValueError(
                f"pairs={pairs}, queries={queries}: they take {2 * pairs * (1 + queries)} tokens of a sequence of {length}; "
                "ask for fewer, or for a larger data.length"
            )
        self.length, self.pairs, self.queries = length, pairs, queries
        self.values = np.arange(room - values, room)
        self.keys = np.arange(room - values - num, room - values)
        self.noise = np.arange(room - values - 2 * num, room - values - num)

    def sequence(self, rng: np.random.Generator) -> Sequence:
        tokens = rng.choice(self.noise, self.length)
        labels = np.full(self.length, NO_LABEL)
        keys, values = rng.choice(self.keys, self.pairs, replace=False), rng.choice(self.values, self.pairs)
        # Slots of two tokens: of those drawn for one pair the first is the fact and the others ask.
        slots = rng.choice((self.length - 1) // 2, self.pairs * (1 + self.queries), replace=False)
        slots = np.sort(slots.reshape(self.pairs, -1), axis=1) * 2
        tokens[slots], tokens[slots + 1] = keys[:, None], values[:, None]
        asked = slots[:, 1:]
        labels[asked] = values[:, None]
        at = asked.reshape(-1, 1)
        fact = np.repeat(slots[:, 0] + 1, self.queries)
        size = np.full(len(at), self.length)
        return Sequence(tokens, labels, np.array([self.length]), Answers(at, fact, size, fact / self.length))


class Passkey:
    """The texts of a sequence are a quarter, a quarter and a half of it long, so that short ones are seen as well."""

    SHARES = (4, 4, 2)

    def __init__(self, tokenizer: Tokenizer, length: int, digits: int) -> None:
        self.tokenizer, self.length, self.digits = tokenizer, length, digits
        self.dull = self._encode("The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ")
        self.question = self._encode("What is the pass key? The pass key is")
        shortest = length // max(self.SHARES)
        needed = len(self._fact("8" * digits)) + len(self.question) + digits + 2
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
        hay = length - len(fact) - len(self.question) - len(answer) - 1
        before = int(hay * depth)
        dull = np.resize(self.dull, hay)
        text = np.concatenate([dull[:before], fact, dull[before:], self.question, answer, [self.tokenizer.end]])
        return text, before + len(fact) - 1, length - 1 - len(answer)

    def sequence(self, rng: np.random.Generator) -> Sequence:
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
        return Sequence(np.concatenate(texts), labels, lengths, answers)
