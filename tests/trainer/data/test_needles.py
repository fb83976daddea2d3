"""Needle tasks: each answer follows from the facts before it; evaluation and training share neither keys nor templates."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from ringspan import ROOT
from ringspan.trainer.config.schema import Data, Source
from ringspan.trainer.data import train_tokenizer
from ringspan.trainer.data.dataset import Dataset, Synthetic
from ringspan.trainer.data.needle_language import EVALUATION, TRAINING, WORDS, Language, Template, words_of
from ringspan.trainer.data.needles import FAMILIES, Needles
from ringspan.trainer.data.tokenizer import HuggingFace
from tests.trainer.data.helpers import BYTES, BytesWithBegin

LENGTH = 8192
TEXT = r" ([A-Za-z]{6})\b"
PARTS = ("train", "held_out")
SHARED_WORDS = {"The", "the", "that", "are", "Which", "has", "with"}


def source(family: str, part: str = "held_out", length: int = LENGTH, **options) -> Synthetic:
    """A task whose sequences are one document, also in training."""
    sources = {"needles": Source(kind="needles", families=[family], **options)}
    task = Dataset(Data(length=length, sources=sources), BYTES, 0, part).sources[0]
    task.task.parts.clear()
    return task


def lines(language: Language, names: str) -> list[str]:
    """Regular expressions of some templates, with groups k, l and v."""
    key, value = "[A-Za-z]{6}", r"\d{5}"
    groups = {"{k}": f" (?P<k>{key})", "{l}": f" (?P<l>{key})", "{v}": f" (?P<v>{value})"}
    return [
        "".join(groups.get(piece, re.escape(piece)) for piece in re.split(r"(\{\w\})", sentence) if piece)
        for sentence in sentences(getattr(language, names))
    ]


def sentences(template: Template) -> list[str]:
    """All sentences of a template."""
    return ["".join(parts) for parts in itertools.product(*template)]


def found(text: str, patterns: list[str], names: str) -> list[tuple[str, ...]]:
    """The keys and values of all sentences that match, in the order of the text."""
    matches = [match for pattern in patterns for match in re.finditer(pattern, text)]
    return [tuple(match[name] for name in names) for match in sorted(matches, key=lambda match: match.start())]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_follow_from_the_facts_before_them(family: str, part: str) -> None:
    task = source(family, part)
    for number in range(6):
        window, answers = task.window(number, np.arange(LENGTH)), task.answers(number)
        language = task.task.language
        assert len(window.tokens) == LENGTH and window.tokens[-1] == BYTES.end and window.lengths.tolist() == [LENGTH]
        assert (window.labels >= 0).sum() == sum(len(set(row)) for row in answers.positions.tolist())
        assert len(answers.positions) == 16
        for positions, fact, depth in zip(answers.positions, answers.fact, answers.depth, strict=True):
            assert (window.labels[positions] == window.tokens[positions + 1]).all()
            assert fact < positions[0] and depth == fact / LENGTH
            before = BYTES.decode(window.tokens[: positions[0] + 1].tolist())
            question = before.rpartition("\n")[2]
            answer = BYTES.decode(window.labels[np.unique(positions)].tolist()).split()
            asked = re.findall(TEXT, question + " ")
            facts = dict(found(before, lines(language, "facts"), "kv"))
            if family in ("single", "multi_key"):
                assert answer == [facts[next(word for word in asked if word in facts)]]
            elif family == "multi_query":
                assert answer == [facts[word] for word in asked if word in facts] and len(answer) == 4
            elif family == "multi_value":
                entries = found(before, lines(language, "values"), "kv")
                assert answer in [[value for key, value in entries if key == word] for word in asked]
            elif family == "two_facts":
                places = dict(found(before, lines(language, "places"), "kl"))
                assert answer == [facts[next(places[word] for word in asked if word in places)]]
            else:
                origin = {target: source for source, target in found(before, lines(language, "copies"), "kl")}
                roots = dict(found(before, lines(language, "roots"), "kv"))
                name = next(word for word in asked if word in origin)
                while name in origin:
                    name = origin[name]
                assert answer == [roots[name]]


def test_facts_are_at_all_depths_and_evaluation_asks_at_the_end() -> None:
    for part in PARTS:
        task = source("single", part)
        answers = [task.answers(number) for number in range(60)]
        depth = np.concatenate([each.depth for each in answers])
        first = np.concatenate([each.positions[:, 0] for each in answers])
        assert (np.histogram(depth, 8, (0, 0.85))[0] > 60).all()
        distance = np.concatenate([each.distance for each in answers])
        assert distance.max() > 0.85 * LENGTH
        if part == "held_out":
            assert first.min() > 0.8 * LENGTH
        else:
            assert 0.3 < (first < 0.85 * LENGTH).mean() < 0.6


def test_evaluation_and_training_share_no_syllable_and_no_template() -> None:
    assert not set(TRAINING.consonants) & set(EVALUATION.consonants) and not set(TRAINING.vowels) & set(EVALUATION.vowels)
    training, evaluation = (
        {word for name in language._fields[2:] for word in re.findall("[A-Za-z]{3,}", str(getattr(language, name)))}
        for language in (TRAINING, EVALUATION)
    )
    assert training & evaluation <= SHARED_WORDS
    for name in TRAINING._fields[2:]:
        templates = [getattr(language, name) for language in (TRAINING, EVALUATION)]
        for own, other in zip(*templates, strict=True) if name == "several" else (templates,):
            assert not set(sentences(own)) & set(sentences(other))


@pytest.mark.parametrize("seen", [(), ("templates",), ("keys",), ("templates", "keys")])
def test_an_evaluation_takes_templates_or_keys_of_training(seen: tuple[str, ...]) -> None:
    needles = Needles(BYTES, LENGTH, ["single"], 16, 5, evaluation=True, seen=seen)
    document = needles.document(np.random.default_rng(0))
    text = BYTES.decode(document.tokens.tolist())
    facts = [found(text, lines(language, "facts"), "kv") for language in (TRAINING, EVALUATION)]
    assert [len(each) >= 16 for each in facts] == ["templates" in seen, "templates" not in seen]
    alphabet = TRAINING if "keys" in seen else EVALUATION
    assert all(set(key) <= set(alphabet.consonants + alphabet.vowels) for each in facts for key, _ in each)
    assert document.answers.positions.min() > 0.8 * LENGTH  # questions are at the end
    with pytest.raises(ValueError, match=r"seen=\['values'\]: choose some of templates, keys"):
        Needles(BYTES, LENGTH, ["single"], 16, 5, evaluation=True, seen=["values"])


def test_near_misses_differ_in_one_syllable_and_have_values() -> None:
    window = source("multi_key").window(0, np.arange(LENGTH))
    facts = dict(found(BYTES.decode(window.tokens.tolist()), lines(EVALUATION, "facts"), "kv"))
    near = [sum(sum(a != b for a, b in zip(key, other, strict=True)) <= 2 for other in facts if other != key) for key in facts]
    assert 55 <= len(facts) <= 64 and min(near) >= 1 and sum(count >= 3 for count in near) >= 16


def test_sequences_are_drawn_afresh_and_have_the_begin_token() -> None:
    task = source("single")
    keys = [set(re.findall(TEXT, BYTES.decode(task.window(n, np.arange(LENGTH)).tokens.tolist()))) for n in range(2)]
    assert len(keys[0] & keys[1]) < 40  # words of the filler and the templates
    needles = Needles(BytesWithBegin(), LENGTH, ["single"], 16, 5, evaluation=True)
    tokens = needles.sequence(np.random.default_rng(0)).tokens
    assert (np.flatnonzero(tokens == 600).tolist(), np.flatnonzero(tokens == 601).tolist()) == ([0], [LENGTH - 1])


def test_a_task_that_does_not_fit_is_one_message() -> None:
    message = r"data\.sources\.needles: num_questions=16: .*multi_key take \d+ .*data\.length at least"
    with pytest.raises(ValueError, match=message):
        source("multi_key", length=1024)
    assert len(source("multi_key", length=1024, num_questions=3).answers(0).positions) == 3
    with pytest.raises(ValueError, match=r"families=\['multi'\]: choose some of single, multi_key"):
        source("multi")

    class Short(type(BYTES)):
        def encode(self, documents):
            return (np.zeros(1, np.int64) for _ in documents)

    with pytest.raises(ValueError, match="digits=5: the tokenizer makes one token"):
        Needles(Short(), LENGTH, ["single"], 16, 5, evaluation=True)


def test_training_sequences_are_one_document_or_several_with_their_share_of_the_questions() -> None:
    sources = {"needles": Source(kind="needles", families=["single", "multi_query"], num_questions=8)}
    train, held_out = (Dataset(Data(length=LENGTH, sources=sources), BYTES, 0, part).sources[0] for part in PARTS)
    assert {tuple(held_out.window(n, np.arange(8)).lengths) for n in range(8)} == {(LENGTH,)}
    counts = set()
    for number in range(40):
        window, answers = train.window(number, np.arange(LENGTH)), train.answers(number)
        documents = np.repeat(np.arange(len(window.lengths)), window.lengths)
        counts.add(len(window.lengths))
        assert len(documents) == LENGTH and len(answers.fact) == 8
        assert (answers.length == LENGTH // len(window.lengths)).all() and (answers.depth < 1).all()
        assert sorted(np.unique(answers.positions)) == np.flatnonzero(window.labels >= 0).tolist()
        assert (documents[answers.fact] == documents[answers.positions[:, 0]]).all()
        assert (window.tokens[np.cumsum(window.lengths) - 1] == BYTES.end).all()
    assert counts == {1, 2, 4, 8}


def test_keys_are_words_of_two_tokens_where_the_tokenizer_has_them(tmp_path: Path) -> None:
    """Training and evaluation share no token of a key; near misses share one of two."""
    texts = sorted((ROOT / "docs").rglob("*.md"))
    train_tokenizer.train(texts, 3000).save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFace(tmp_path / "tokenizer.json", "", "")
    tokens: list[set[int]] = []
    for evaluation in (False, True):
        task, rng = Needles(tokenizer, 4096, ["multi_key"], 16, 5, evaluation), np.random.default_rng(0)
        keys = task.keys(rng, 200)
        encoded = [ids.tolist() for ids in tokenizer.encode([key.encode() for key in keys])]
        assert len({*keys}) == 200 and {len(ids) for ids in encoded} == {2}
        near = [
            [ids.tolist() for ids in tokenizer.encode([miss.encode() for miss in task.near_misses(rng, key)])] for key in keys
        ]
        assert sum(map(len, near)) > 590
        for (start, end), misses in zip(encoded, near, strict=True):
            assert all(len(miss) == 2 and (miss[0] == start) != (miss[1] == end) for miss in misses)
        tokens.append({id for ids in [*encoded, *itertools.chain(*near)] for id in ids})
    assert not tokens[0] & tokens[1]

    words = task.phrases
    phrases = [words.draw(rng) for _ in range(2000)]
    sizes = [len(phrase) for phrase in phrases]
    assert set(sizes) == set(range(1, words.LONGEST + 1)) and all(phrase[0][0] == " " for phrase in phrases)
    encoded = [ids.tolist() for ids in tokenizer.encode([piece.encode() for piece in words.pieces])]
    held_out = words_of(tokenizer, True)
    assert held_out is not None and all(len(ids) == 1 for ids in encoded)
    assert not {ids[0] for ids in encoded} & {id for id, _ in [*held_out.starts, *held_out.ends]}
    assert not {" value", " stored", " under", " which", " variable"} & {piece.lower() for piece in words.pieces}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_words_replace_parts_of_training_templates_only(family: str) -> None:
    """Facts and questions still have their keys and values, in other sentences; the evaluation does not change."""
    names = dict(multi_value=("values", "all_values"), variables=("roots", "copies", "variable"), two_facts=("places", "place"))
    templates = [getattr(TRAINING, name) for name in names.get(family, ("facts",))]
    parts = {choice for template in templates for choices in template if "{" not in choices[0] for choice in choices}
    words = re.compile("|".join(re.escape(part) for part in parts if len(part) > 4 and part.strip() not in str(WORDS)))
    none, half, train = (source(family, "train", random_words=share) for share in (0.0, 0.5, 1.0))
    texts = [BYTES.decode(each.window(0, np.arange(LENGTH)).tokens.tolist()) for each in (none, half, train)]
    counts, text = [len(words.findall(each)) for each in texts], texts[2]
    assert counts[0] > counts[1] > counts[2] == 0
    task = (
        Dataset(
            Data(length=LENGTH, sources={"n": Source(kind="needles", families=[family], random_words=0.5)}), BYTES, 0, "train"
        )
        .sources[0]
        .task
    )
    assert task.parts and all(part.random_words == 0.5 for part in task.parts)
    answers, lines = train.answers(0), text.split("\n")
    ends = np.cumsum([len(line) + 1 for line in lines])
    window = train.window(0, np.arange(LENGTH))
    for positions, fact in zip(answers.positions, answers.fact, strict=True):
        answer = BYTES.decode(window.labels[np.unique(positions)].tolist())
        question, stated = (lines[int(np.searchsorted(ends, at, "right"))] for at in (positions[0], fact))
        assert f"{answer}." in question
        shared = set(re.findall(TEXT, question)) & set(re.findall(TEXT, stated))
        assert shared or family in ("variables", "two_facts")  # the question's key may be in a later fact
    held_out = [source(family, random_words=share).window(0, np.arange(LENGTH)).tokens for share in (0.0, 1.0)]
    assert (held_out[0] == held_out[1]).all()


def test_a_document_that_is_longer_than_estimated_is_drawn_again() -> None:
    """An estimate from eight documents is no bound: here the length is 0.85 of it."""
    task = Needles(BYTES, LENGTH, ["multi_query"], 2, 5, evaluation=False)
    task.length = int(0.85 * task._num_tokens("multi_query"))
    encode, calls, redrawn = task._encode_items, list[int](), 0
    task._encode_items = lambda items: (calls.append(0), encode(items))[1]  # type: ignore[method-assign, func-returns-value]
    for number in range(50):
        calls.clear()
        assert len(task.document(np.random.default_rng(number)).tokens) == task.length
        redrawn += len(calls) > 1
    assert redrawn
