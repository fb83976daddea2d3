"""Needle tasks: facts at all depths of a text of random sentences, and questions about them whose answers alone have labels.

    single       a key with a value, asked for by the key
    multi_key    the same among three near misses per key: keys that differ from it in one token or syllable, with other values
    multi_value  four values of one key, asked for in the order in which they are stated
    multi_query  one question about four keys
    variables    chains of assignments of 1 to 4 hops; the last variable is asked for
    two_facts    a key is in a place, the place has a value; the two facts are in any order

A document is of one family. Keys and values are drawn afresh for each document. The evaluation ("held_out") has other templates
and other tokens in keys than training, and all its questions are at the end; in training half of them follow their facts at any
distance. No fact is asked for twice, because the first answer would be a nearer fact.

A key is a word of two tokens, drawn from the tokenizer's tokens of letters: then its first token alone finds it in most texts,
which a model learns long before it learns to compare several tokens. With a tokenizer that has few of them, such as bytes, a
key is three syllables. A value is a number: a model that copies digits need not learn to copy each token of a vocabulary.

Training's sequences are one document or 2, 4, … equal ones with their share of the questions: few facts are learned first.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ringspan.trainer.data.needle_language import EVALUATION, TRAINING, WORDS, RandomPhrases, Template, Words, fill, words_of
from ringspan.trainer.data.synthetic_tasks import NO_LABEL, Answers, Packed
from ringspan.trainer.data.tokenizer import Tokenizer

NEAR_MISSES, PARTS, HOPS = 3, 4, 4  # distractors per key; values of multi_value and keys of multi_query; longest chain
SEEN = ("templates", "keys")  # what an evaluation can take from training
BANK = 512  # filler sentences of a tokenizer
REDRAWS = 16  # of a document whose facts and questions are longer than estimated
CANDIDATES = 4  # draws of a near miss


class Item(NamedTuple):
    """A sentence and its place: items are sorted by `slot`, 0 to 1 for the text and from 1 for the questions at its end."""

    slot: float
    pieces: Sequence[str]
    question: int  # the question that needs this fact, or that this item asks; -1: none
    asks: bool = False


class Needles:
    """Texts with facts and questions of some families.

    Args:
        tokenizer: the run's tokenizer.
        length: tokens per sequence.
        families: families to draw from, with equal shares.
        num_questions: questions per sequence.
        digits: digits of a value.
        evaluation: use the templates and keys of the evaluation, and ask at the end.
        max_documents: largest number of documents of a sequence.
        seen: what an evaluation takes from training, of SEEN: shows whether templates or keys do not transfer.
        random_words: share of the templates' parts that random phrases replace.
    Raises:
        ValueError: an unknown family or name in `seen`, a value of one token, or facts and questions that do not fit.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        length: int,
        families: Sequence[str],
        num_questions: int,
        digits: int,
        evaluation: bool,
        max_documents: int = 1,
        seen: Sequence[str] = (),
        random_words: float = 0.0,
    ) -> None:
        unknown = [name for name in families if name not in FAMILIES]
        if unknown or not families:
            raise ValueError(f"families={list(families)}: choose some of {', '.join(FAMILIES)}")
        if set(seen) - set(SEEN):
            raise ValueError(f"seen={list(seen)}: choose some of {', '.join(SEEN)}")
        self.tokenizer, self.length, self.families = tokenizer, length, list(families)
        self.num_questions, self.digits, self.evaluation = num_questions, digits, evaluation
        self.language = EVALUATION if evaluation and "templates" not in seen else TRAINING
        unseen_keys = evaluation and "keys" not in seen
        self.alphabet = EVALUATION if unseen_keys else TRAINING
        self.words = words_of(tokenizer, unseen_keys)  # type: ignore[arg-type]  # tokenizers are hashable
        self.phrases, self.random_words = RandomPhrases(tokenizer), random_words
        self._pairs: dict[str, tuple[int, int]] = {}  # by key: its start and its end
        self._encoded: dict[str, np.ndarray] = {}
        self.begin, self.end = np.array(tokenizer.begin, np.int64), np.array([tokenizer.end])
        rng = np.random.default_rng(0)
        subjects, verbs, adjectives = (words.split() for words in WORDS)
        noun = lambda: f"the {rng.choice(adjectives)} {rng.choice(subjects)}"  # noqa: E731
        self._bank = self._encode([f"Today {noun()} {rng.choice(verbs)} {noun()}.\n" for _ in range(BANK)])
        self._bank_sizes = np.array([len(sentence) for sentence in self._bank])
        value, key = self._encode([" " + "7" * digits, " gabuga"])  # words have two tokens
        if len(value) < 2 or (self.words is None and len(key) < 2):
            raise ValueError(
                f"digits={digits}: the tokenizer makes one token of a value or a key, and a needle needs two; ask "
                "for more digits, or use tokenizer=bytes"
            )
        for family in self.families:
            self._require_length(family, self._num_tokens(family))
        self.parts: list[Needles] = []  # tasks of shorter documents
        count = 2
        while count <= max_documents and length % count == num_questions % count == 0:
            try:
                shape = length // count, families, num_questions // count, digits
                self.parts.append(Needles(tokenizer, *shape, evaluation, seen=seen, random_words=random_words))
            except ValueError:  # facts and questions do not fit
                break
            count *= 2

    def sequence(self, rng: np.random.Generator) -> Packed:
        """Draw one sequence."""
        task = [self, *self.parts][int(rng.integers(1 + len(self.parts)))] if self.parts else self
        return join([task.document(rng) for _ in range(self.length // task.length)])

    def document(self, rng: np.random.Generator) -> Packed:
        """Draw one document of one family."""
        family = int(rng.integers(len(self.families)))
        for _ in range(REDRAWS):
            items, values, guesses = FAMILIES[self.families[family]](self, rng)
            encoded = self._encode_items(items)
            num_filler = self.length - len(self.begin) - 1 - sum(map(len, encoded))
            if num_filler >= 0:
                break
        self._require_length(self.families[family], self.length - num_filler)
        sentences = self._filler(rng, num_filler)
        slots = np.array([item.slot for item in items] + [(i + 0.5) / len(sentences) for i in range(len(sentences))])
        parts = [*encoded, *sentences]
        order = np.argsort(slots, kind="stable")
        sizes = np.array([len(parts[index]) for index in order])
        ends = np.empty(len(parts), np.int64)
        ends[order] = len(self.begin) + np.cumsum(sizes)
        tokens = np.concatenate([self.begin, *(parts[index] for index in order), self.end])
        return self._label(tokens, items, ends, values, family, guesses)

    def _label(
        self, tokens: np.ndarray, items: list[Item], ends: np.ndarray, values: list[str], family: int, guesses: int
    ) -> Packed:
        """Set the labels of the answers; `ends` are the positions after each item."""
        labels = np.full(self.length, NO_LABEL)
        facts = np.full(self.num_questions, self.length)
        positions: list[np.ndarray] = [np.zeros(0, np.int64)] * self.num_questions
        for item, end in zip(items, ends, strict=False):
            if item.asks:
                answer, rest = self._encode_pieces(item.pieces[-2:])
                begin = end - len(rest) - len(answer)
                positions[item.question] = np.arange(begin - 1, begin - 1 + len(answer))  # a token's label is the next token
                labels[positions[item.question]] = answer
            elif item.question >= 0:
                facts[item.question] = min(facts[item.question], end - 1)
        width = max(map(len, positions))
        table = np.stack([each[np.minimum(np.arange(width), len(each) - 1)] for each in positions])
        lengths = np.full(self.num_questions, self.length)
        chance = np.array([guesses ** -float(value.count(" ")) for value in values])
        answers = Answers(table, facts, lengths, facts / self.length, np.full(self.num_questions, family), chance)
        return Packed(tokens, labels, np.array([self.length]), answers)

    def _filler(self, rng: np.random.Generator, num: int) -> list[np.ndarray]:
        """Return sentences of `num` tokens in all; the beginning of the last one is cut off to fit."""
        chosen = rng.integers(0, BANK, num // self._bank_sizes.min() + 1)
        sizes = np.cumsum(self._bank_sizes[chosen])
        last = int(np.searchsorted(sizes, num))
        return [*(self._bank[index] for index in chosen[:last]), self._bank[chosen[last]][sizes[last] - num :]]

    def _require_length(self, family: str, needed: int) -> None:
        if needed > self.length:
            raise ValueError(
                f"num_questions={self.num_questions}: with their facts, questions of {family} take {needed} tokens, and a "
                f"sequence has {self.length}: make data.length at least {needed}, or ask for fewer num_questions"
            )

    def _num_tokens(self, family: str) -> int:
        """Return an estimate of the tokens of facts and questions, a tenth above the longest of eight."""
        sizes = []
        for seed in range(8):
            rng = np.random.default_rng(seed)
            items, _, _ = FAMILIES[family](self, rng)
            sizes.append(sum(map(len, self._encode_items(items))) + len(self.begin) + 1)
        return max(sizes) + max(sizes) // 10

    def _encode_items(self, items: Sequence[Item]) -> list[np.ndarray]:
        flat = self._encode_pieces([piece for item in items for piece in item.pieces])
        bounds = np.cumsum([0, *(len(item.pieces) for item in items)])
        return [np.concatenate(flat[a:b]) for a, b in itertools.pairwise(bounds)]

    def _encode_pieces(self, pieces: Sequence[str]) -> list[np.ndarray]:
        """Encode each piece alone, so that a key has the same tokens wherever it occurs."""
        if not (new := [text for text in dict.fromkeys(pieces) if text not in self._encoded]):
            return [self._encoded[text] for text in pieces]
        if len(self._encoded) + len(new) > 2**16:
            self._encoded.clear()
            new = list(dict.fromkeys(pieces))
        self._encoded.update(zip(new, self._encode(new), strict=True))
        return [self._encoded[text] for text in pieces]

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(ids, np.int64) for ids in self.tokenizer.encode([text.encode() for text in texts])]

    def keys(self, rng: np.random.Generator, num: int) -> list[str]:
        """Draw distinct keys, each after a space."""
        if self.words is not None:
            self._pairs = self._draw_words(self.words, rng, num)
            return list(self._pairs)
        syllables = [c + v for c in self.alphabet.consonants for v in self.alphabet.vowels]
        numbers = rng.choice(len(syllables) ** 3, num, replace=False)
        split = [(n % len(syllables), n // len(syllables) % len(syllables), n // len(syllables) ** 2) for n in numbers]
        return [" " + "".join(syllables[i] for i in parts) for parts in split]

    def near_misses(self, rng: np.random.Generator, key: str) -> list[str]:
        """Return keys that differ from `key` in one token or in one syllable each."""
        if self.words is not None:
            return self._near_words(self.words, rng, *self._pairs[key])
        syllables = [c + v for c in self.alphabet.consonants for v in self.alphabet.vowels]
        result = []
        for place in rng.permutation(3)[:NEAR_MISSES]:
            begin = 1 + 2 * place
            others = [syllable for syllable in syllables if syllable != key[begin : begin + 2]]
            other = others[int(rng.integers(len(others)))]
            result.append(key[:begin] + other + key[begin + 2 :])
        return result

    def _near_words(self, words: Words, rng: np.random.Generator, start: int, end: int) -> list[str]:
        """Draw words that have the same start, end and start; of some candidates those that are encoded as two such tokens."""
        drawn = [rng.integers(0, len(kind), NEAR_MISSES * CANDIDATES).tolist() for kind in (words.starts, words.ends)]
        pairs = [
            (new, end) if n % NEAR_MISSES == 1 else (start, other) for n, (new, other) in enumerate(zip(*drawn, strict=True))
        ]
        texts, found = [words.text(*pair) for pair in pairs], dict[int, str]()
        for n, (pair, text, ids) in enumerate(zip(pairs, texts, self._encode(texts), strict=True)):
            if pair != (start, end) and text not in found.values() and ids.tolist() == words.ids(*pair):
                found.setdefault(n % NEAR_MISSES, text)
        return list(found.values())

    def values(self, rng: np.random.Generator, num: int) -> list[str]:
        """Draw numbers, each after a space."""
        return [f" {number:0{self.digits}d}" for number in rng.integers(0, 10**self.digits, num)]

    def _draw_words(self, words: Words, rng: np.random.Generator, num: int) -> dict[str, tuple[int, int]]:
        """Draw distinct words that the tokenizer encodes as these two tokens; return their starts and ends by their texts."""
        drawn = dict[str, tuple[int, int]]()
        while len(drawn) < num:
            starts, ends = (rng.integers(0, len(kind), num).tolist() for kind in (words.starts, words.ends))
            texts = [words.text(start, end) for start, end in zip(starts, ends, strict=True)]
            for start, end, text, ids in zip(starts, ends, texts, self._encode_pieces(texts), strict=True):
                if len(drawn) < num and ids.tolist() == words.ids(start, end):
                    drawn[text] = start, end
        return drawn

    def fill(self, rng: np.random.Generator, template: Template, **names: str) -> list[str]:
        """Return the pieces of a sentence of a template with its names filled in."""
        return fill(rng, template, names, self.phrases, self.random_words)

    def slots(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """Draw one place in each of `num` equal parts of the text, in random order."""
        return rng.permutation((np.arange(num) + rng.random(num)) / num)

    def question_slot(self, rng: np.random.Generator, last_fact: float, question: int) -> float:
        """Draw where a question is asked: at the end, in training also anywhere after its facts."""
        if self.evaluation or rng.random() < 0.5:
            return 1.0 + question
        return last_fact + (1 - last_fact) * rng.random()


def join(documents: Sequence[Packed]) -> Packed:
    """Return the sequence of these documents; answers of fewer tokens repeat their last position."""
    width = max(document.answers.positions.shape[1] for document in documents)
    begins = np.cumsum([0, *(len(document.tokens) for document in documents[:-1])])
    tables, facts = [], []
    for document, begin in zip(documents, begins, strict=True):
        table = document.answers.positions
        tables.append(np.pad(table, ((0, 0), (0, width - table.shape[1])), mode="edge") + begin)
        facts.append(document.answers.fact + begin)
    rest = [np.concatenate(column) for column in zip(*(document.answers[2:] for document in documents), strict=True)]
    answers = Answers(np.concatenate(tables), np.concatenate(facts), *rest)
    tokens, labels, lengths = (np.concatenate(column) for column in zip(*(each[:3] for each in documents), strict=True))
    return Packed(tokens, labels, lengths, answers)


Drawn = tuple[list[Item], list[str], int]  # items, the answer of each question, and values that a guess chooses from


def single(task: Needles, rng: np.random.Generator, has_near_misses: bool = False) -> Drawn:
    num, language = task.num_questions, task.language
    keys, values, items = task.keys(rng, num), task.values(rng, num), []
    used = set(keys)
    for question, (key, value, slot) in enumerate(zip(keys, values, task.slots(rng, num), strict=True)):
        items.append(Item(slot, task.fill(rng, language.facts, k=key, v=value), question))
        pieces = task.fill(rng, language.questions, k=key, V=value)
        items.append(Item(task.question_slot(rng, slot, question), pieces, question, asks=True))
        others = [other for other in task.near_misses(rng, key) if other not in used] if has_near_misses else []
        used.update(others)
        for other, text in zip(others, task.values(rng, len(others)), strict=True):
            items.append(Item(rng.random(), task.fill(rng, language.facts, k=other, v=text), -1))
    return items, values, num * (1 + NEAR_MISSES * has_near_misses)


def multi_key(task: Needles, rng: np.random.Generator) -> Drawn:
    return single(task, rng, has_near_misses=True)


def multi_value(task: Needles, rng: np.random.Generator) -> Drawn:
    answers, items = [], []
    for question, (key, first) in enumerate(
        zip(task.keys(rng, task.num_questions), task.slots(rng, task.num_questions), strict=True)
    ):
        slots = np.sort([first, *rng.uniform(first, 1, PARTS - 1)])
        values = task.values(rng, PARTS)
        items += [
            Item(slot, task.fill(rng, task.language.values, k=key, v=value), question)
            for slot, value in zip(slots, values, strict=True)
        ]
        answers.append("".join(values))
        pieces = task.fill(rng, task.language.all_values, k=key, V=answers[-1])
        items.append(Item(task.question_slot(rng, slots[-1], question), pieces, question, asks=True))
    return items, answers, PARTS * task.num_questions


def multi_query(task: Needles, rng: np.random.Generator) -> Drawn:
    keys, values = task.keys(rng, PARTS * task.num_questions), task.values(rng, PARTS * task.num_questions)
    begin, end = task.language.several
    answers, items = [], []
    for question, first in enumerate(task.slots(rng, task.num_questions)):
        own = slice(PARTS * question, PARTS * (question + 1))
        slots = [first, *rng.uniform(first, 1, PARTS - 1)]
        items += [
            Item(slot, task.fill(rng, task.language.facts, k=key, v=value), question)
            for slot, key, value in zip(slots, keys[own], values[own], strict=True)
        ]
        answers.append("".join(values[own]))
        pieces = [*task.fill(rng, begin), *keys[own], *task.fill(rng, end, V=answers[-1])]
        items.append(Item(task.question_slot(rng, max(slots), question), pieces, question, asks=True))
    return items, answers, PARTS * task.num_questions


def variables(task: Needles, rng: np.random.Generator) -> Drawn:
    keys, values, items = task.keys(rng, (HOPS + 1) * task.num_questions), task.values(rng, task.num_questions), []
    for question, (value, first) in enumerate(zip(values, task.slots(rng, task.num_questions), strict=True)):
        hops = 1 + question % HOPS
        chain = keys[(HOPS + 1) * question :][: hops + 1]
        slots = np.sort([first, *rng.uniform(first, 1, hops)])
        items.append(Item(slots[0], task.fill(rng, task.language.roots, k=chain[0], v=value), question))
        for slot, source, target in zip(slots[1:], chain[:-1], chain[1:], strict=True):
            items.append(Item(slot, task.fill(rng, task.language.copies, k=source, l=target), question))
        pieces = task.fill(rng, task.language.variable, k=chain[-1], V=value)
        items.append(Item(task.question_slot(rng, slots[-1], question), pieces, question, asks=True))
    return items, values, task.num_questions


def two_facts(task: Needles, rng: np.random.Generator) -> Drawn:
    keys, values, items = task.keys(rng, 2 * task.num_questions), task.values(rng, task.num_questions), []
    for question, (value, first) in enumerate(zip(values, task.slots(rng, task.num_questions), strict=True)):
        thing, place = keys[2 * question : 2 * question + 2]
        slots = rng.permutation([first, rng.uniform(first, 1)])
        items.append(Item(slots[0], task.fill(rng, task.language.places, k=thing, l=place), question))
        items.append(Item(slots[1], task.fill(rng, task.language.facts, k=place, v=value), question))
        pieces = task.fill(rng, task.language.place, k=thing, V=value)
        items.append(Item(task.question_slot(rng, max(slots), question), pieces, question, asks=True))
    return items, values, task.num_questions


FAMILIES: dict[str, Callable[[Needles, np.random.Generator], Drawn]] = dict(
    single=single, multi_key=multi_key, multi_value=multi_value, multi_query=multi_query, variables=variables,
    two_facts=two_facts,
)  # fmt: skip
