"""Files in, batches out: labels, borders of documents, order and the held-out part."""

from pathlib import Path

import pytest
import torch

from trainer.arguments import Config
from trainer.data import Dataset, pack, read_documents, split

DOCUMENTS = [b"abc", b"d", b"efghij"]
MANY = [bytes([i]) * (i % 7 + 1) for i in range(60)]


def test_labels_are_shifted_before_the_stream_is_cut() -> None:
    tokens, labels, documents = pack(DOCUMENTS, 4)
    a = ord("a")
    assert (tokens - a).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -a, -a]]
    # c, d and j are the last of their documents; h's label stands in the next sequence.
    assert labels.tolist() == [[a + 1, a + 2, -100, -100], [a + 5, a + 6, a + 7, a + 8], [a + 9, -100, -100, -100]]
    assert documents.tolist() == [[0, 0, 0, 1], [2, 2, 2, 2], [2, 2, -1, -1]]


@pytest.mark.parametrize("length", [1, 3, 64, 1000])
def test_every_byte_of_a_document_but_the_first_is_a_label_once(length: int) -> None:
    _, labels, _ = pack(MANY, length)
    assert labels.shape[1] == length
    assert bytes(labels[labels != -100].tolist()) == b"".join(text[1:] for text in MANY)


def test_positions_restart_and_attention_stops_at_a_document() -> None:
    data = Dataset(MANY, 16, 8, seed=0)
    tokens, labels, mask, positions = data.batch(0)
    assert tokens.shape == labels.shape == positions.shape == mask.documents.shape == (8, 16)
    for ids, row in zip(mask.documents.tolist(), positions.tolist(), strict=True):
        expected = [at - ids.index(document) for at, document in enumerate(ids)]
        assert row == expected
    same = mask.documents[:, :, None] == mask.documents[:, None, :]
    seen = mask.visible(torch.arange(16), torch.arange(16))
    not_padding = (mask.documents >= 0)[:, :, None]
    torch.testing.assert_close(seen, same & torch.ones(16, 16, dtype=torch.bool).tril() & not_padding)


def test_the_same_seed_gives_the_same_batches_in_any_order_of_asking() -> None:
    a, b, other = (Dataset(MANY, 8, 4, seed) for seed in (3, 3, 4))
    for step in (0, 11, 2):
        x, y = a.batch(step), b.batch(step)
        assert torch.equal(x.tokens, y.tokens) and torch.equal(x.labels, y.labels)
        assert torch.equal(x.mask.documents, y.mask.documents) and torch.equal(x.positions, y.positions)
    assert any(not torch.equal(a.batch(step).tokens, other.batch(step).tokens) for step in range(4))


def test_an_epoch_has_every_sequence_once_and_the_next_another_order() -> None:
    data = Dataset(MANY, 8, 4, seed=0)
    num = len(data.sequences.tokens)
    assert num % 4 != 0, "the last batch is to reach into the next epoch"
    rows = torch.cat([data.batch(step).tokens for step in range(num)]).split(num)
    assert len(rows) == 4
    everything = sorted(data.sequences.tokens.tolist())
    assert all(sorted(epoch.tolist()) == everything for epoch in rows)
    assert not torch.equal(rows[0], rows[1])


def test_the_split_is_disjoint_complete_and_nobodys_choice() -> None:
    train, held_out = split(MANY)
    assert sorted(train + held_out) == sorted(MANY)
    assert len(held_out) == 3 and not set(train) & set(held_out)
    assert split(MANY[::-1]) == (train, held_out)
    assert len(split([b"a", b"b"])[1]) == 1


def test_the_default_text_is_there_and_its_split_disjoint() -> None:
    train, held_out = split(read_documents(Config().text))
    assert not set(train) & set(held_out)
    assert sum(map(len, train)) > 2_000_000 and sum(map(len, held_out)) > 10_000


def test_files_are_read_in_order_without_copies_and_empty_ones(tmp_path: Path) -> None:
    for name, text in [
        ("b.md", "two"),
        ("a.md", "one"),
        ("sub/c.md", "two"),
        ("d.md", ""),
        ("e.txt", "three"),
        ("f.md/g", ""),
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_documents(f"{tmp_path}/**/*.md") == [b"one", b"two"]
    with pytest.raises(ValueError, match="names 1 different files"):
        read_documents(f"{tmp_path}/*.txt")


@pytest.mark.parametrize("wrong", [dict(length=0), dict(batch_size=0), dict(seed=-1)])
def test_wrong_sizes_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        Dataset(MANY, **(dict(length=8, batch_size=2, seed=0) | wrong))
