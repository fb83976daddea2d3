"""Paged KV cache: allocation on demand, sharing with copy on write, and attention over the cached keys."""

import pytest
import torch

from ringspan import Mask, attention
from ringspan.trainer.kv_cache import Cache, Pages, Text


def append(text: Text, tokens: int) -> None:
    text.reserve(tokens)
    text.num_tokens += tokens


def test_texts_allocate_pages_on_demand_and_reuse_free_ones() -> None:
    """Four texts of 5, 14, 3 and 8 tokens in 20 pages of 4; a fifth text starts after the first one is closed."""
    pages = Pages(20, size=4)
    a, b, c, d = (Text(pages) for _ in range(4))
    for text in (a, b, c, d):
        append(text, 3)
    assert [text.table for text in (a, b, c, d)] == [[0], [1], [2], [3]] and len(pages.free) == 16
    append(a, 2)
    append(b, 2)
    c.close()
    assert [text.table for text in (a, b, c, d)] == [[0, 4], [1, 5], [], [3]] and len(pages.free) == 15
    e = Text(pages)
    append(e, 1)
    append(d, 5)
    assert e.table == [2] and d.table == [3, 6]  # reuses the page of c
    append(b, 9)
    a.close()
    assert b.table == [1, 5, 7, 8] and len(pages.free) == 13
    for text in (b, d, e):
        text.close()
    assert sorted(pages.free) == list(range(20)) and not any(pages.ref_counts)


def test_no_free_page_is_an_error() -> None:
    pages = Pages(2, size=4)
    append(Text(pages), 8)
    with pytest.raises(ValueError, match="all 2 pages of 4 tokens are in use: close a text, or make more"):
        append(Text(pages), 1)


def test_writing_into_a_shared_page_copies_it() -> None:
    pages = Pages(8, size=4)
    pages.memory = [(torch.arange(8.0).expand(4, 8).T.clone(), torch.zeros(8, 4))]
    first = Text(pages)
    append(first, 6)
    second, third = first.fork(), first.fork()
    assert first.table == second.table == third.table == [0, 1] and pages.ref_counts[:2] == [3, 3]
    append(second, 1)
    assert second.table == [0, 2] and first.table == [0, 1] and pages.ref_counts[:3] == [3, 2, 1]
    assert (pages.memory[0][0][2] == 1).all()  # the page is copied with its contents
    append(third, 3)
    assert third.table == [0, 3, 4]
    append(first, 2)
    assert first.table == [0, 1] and pages.ref_counts[1] == 1  # the last reference: no copy
    append(second.fork(), 1)
    first.close()
    assert pages.ref_counts[0] == 3


@pytest.mark.parametrize("window", [None, 3])
def test_cached_attention_equals_attention_over_all_tokens(window: int | None) -> None:
    """In every layer, for texts of different lengths and scattered pages."""
    pages = Pages(30, size=4)
    cache = Cache(2, pages)
    mask = Mask(causal=True, window=window)
    history: dict[Text, list[list[torch.Tensor]]] = {}

    def check(texts: list[Text], tokens: int) -> None:
        with cache.extend(texts, tokens):
            for layer in range(2):
                q, k, v = (torch.randn(len(texts), tokens, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
                out = cache(q, k, v, mask=mask, softcap=5.0)
                for index, text in enumerate(texts):
                    pairs = history.setdefault(text, [[], []])[layer]
                    pairs.append(torch.stack((k[index], v[index])))
                    all_k, all_v = torch.cat(pairs, 1)
                    expected = attention(q[index, None], all_k[None], all_v[None], mask, softcap=5.0)
                    torch.testing.assert_close(out[index, None], expected)

    a, b = cache.new_text(), cache.new_text()
    check([a], 6)
    check([b], 1)
    check([b], 9)
    for _ in range(4):
        check([a, b], 1)
    c = a.fork()
    history[c] = [list(pairs) for pairs in history[a]]
    for _ in range(5):
        check([c, b, a], 1)
    check([a], 3)
    assert a.table[:2] == c.table[:2] and a.table[2] != c.table[2]
