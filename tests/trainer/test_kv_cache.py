"""Pages are taken when they are needed, shared where texts begin alike, and free again when nobody has them."""

import pytest
import torch

from ringspan import Mask, attention
from ringspan.trainer.kv_cache import Cache, Pages, Text


def write(text: Text, tokens: int) -> None:
    text.make_room(tokens)
    text.num_tokens += tokens


def test_texts_take_a_page_at_a_time_and_leave_theirs_to_others() -> None:
    """Four texts of 5, 14, 3 and 8 tokens in 20 pages of 4; one more comes when the first has left."""
    pages = Pages(20, size=4)
    a, b, c, d = (Text(pages) for _ in range(4))
    for text in (a, b, c, d):
        write(text, 3)
    assert [text.table for text in (a, b, c, d)] == [[0], [1], [2], [3]] and len(pages.free) == 16
    write(a, 2)
    write(b, 2)
    c.close()
    assert [text.table for text in (a, b, c, d)] == [[0, 4], [1, 5], [], [3]] and len(pages.free) == 15
    e = Text(pages)
    write(e, 1)
    write(d, 5)
    assert e.table == [2] and d.table == [3, 6]  # the page that was c's
    write(b, 9)
    a.close()
    assert b.table == [1, 5, 7, 8] and len(pages.free) == 13
    for text in (b, d, e):
        text.close()
    assert sorted(pages.free) == list(range(20)) and not any(pages.users)


def test_when_all_pages_are_taken_it_says_so() -> None:
    pages = Pages(2, size=4)
    write(Text(pages), 8)
    with pytest.raises(ValueError, match="all 2 pages of 4 tokens are taken: close a text, or make more"):
        write(Text(pages), 1)


def test_who_writes_into_a_shared_page_takes_a_copy() -> None:
    pages = Pages(8, size=4)
    pages.memory = [(torch.arange(8.0).expand(4, 8).T.clone(), torch.zeros(8, 4))]
    first = Text(pages)
    write(first, 6)
    second, third = first.fork(), first.fork()
    assert first.table == second.table == third.table == [0, 1] and pages.users[:2] == [3, 3]
    write(second, 1)
    assert second.table == [0, 2] and first.table == [0, 1] and pages.users[:3] == [3, 2, 1]
    assert (pages.memory[0][0][2] == 1).all()  # what was in the page came along
    write(third, 3)
    assert third.table == [0, 3, 4]
    write(first, 2)
    assert first.table == [0, 1] and pages.users[1] == 1  # nobody else has it any more
    write(second.fork(), 1)
    first.close()
    assert pages.users[0] == 3


@pytest.mark.parametrize("window", [None, 3])
def test_it_is_attention_over_all_that_a_text_has(window: int | None) -> None:
    """In every layer, of texts of different lengths, whose pages lie anywhere."""
    pages = Pages(30, size=4)
    cache = Cache(2, pages)
    mask = Mask(causal=True, window=window)
    known: dict[Text, list[list[torch.Tensor]]] = {}

    def check(texts: list[Text], tokens: int) -> None:
        with cache.taking(texts, tokens):
            for layer in range(2):
                q, k, v = (torch.randn(len(texts), tokens, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
                out = cache(q, k, v, mask=mask, softcap=5.0)
                for index, text in enumerate(texts):
                    its = known.setdefault(text, [[], []])[layer]
                    its.append(torch.stack((k[index], v[index])))
                    all_k, all_v = torch.cat(its, 1)
                    right = attention(q[index, None], all_k[None], all_v[None], mask, softcap=5.0)
                    torch.testing.assert_close(out[index, None], right)

    a, b = cache.new_text(), cache.new_text()
    check([a], 6)
    check([b], 1)
    check([b], 9)
    for _ in range(4):
        check([a, b], 1)
    c = a.fork()
    known[c] = [list(its) for its in known[a]]
    for _ in range(5):
        check([c, b, a], 1)
    check([a], 3)
    assert a.table[:2] == c.table[:2] and a.table[2] != c.table[2]
