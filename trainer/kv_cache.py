"""Paged KV cache for generation: texts allocate pages on demand and share the pages of a common beginning.

    cache = Cache(layers, Pages(100))
    text = cache.new_text()
    with cache.extend([text], 7): model.logits(tokens (1, 7), …, attention=cache)         a prompt, or a part of it
    copy = text.fork()                                                                    continues from the same keys
    with cache.extend([text, copy], 1): model.logits(tokens (2, 1), …, attention=cache)   one token of each
    copy.close()                                                                          frees its pages

A Cache is an attention function: the model takes attention as an argument, calls it once per layer, and does not know about
the cache. A text reserves no memory for its maximum length. It allocates a page when the previous page is full, and a page
is free again when no text refers to it. A text that writes into a shared page copies it first (copy on write).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.attention import attention
from ringspan.kernels.mask import Mask
from ringspan.kernels.paged_attention import paged_attention

PAGE = 64  # tokens; on average each text wastes half a page, and one head's keys of a page are a good size for a load


class Pages:
    """Page allocator with reference counts. A layer's memory is allocated at its first keys.

    Args:
        number: pages of the pool.
        size: tokens per page.
    """

    def __init__(self, number: int, size: int = PAGE) -> None:
        self.size = size
        self.free = list(range(number))[::-1]
        self.ref_counts = [0] * number
        self.memory: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer, (number, size, KV heads, D)

    def allocate(self) -> int:
        """Return a free page with one reference.

        Raises:
            ValueError: no page is free.
        """
        if not self.free:
            raise ValueError(
                f"all {len(self.ref_counts)} pages of {self.size} tokens are in use: close a text, or make more pages"
            )
        page = self.free.pop()
        self.ref_counts[page] = 1
        return page

    def release(self, page: int) -> None:
        self.ref_counts[page] -= 1
        if not self.ref_counts[page]:
            self.free.append(page)

    def make_private(self, page: int) -> int:
        """Return the page, or a copy of it if other texts refer to it."""
        if self.ref_counts[page] == 1:
            return page
        copy = self.allocate()
        for x in (x for pair in self.memory for x in pair):
            x[copy] = x[page]
        self.release(page)
        return copy


class Text:
    """The page table of one text and its number of tokens."""

    def __init__(self, pages: Pages, table: Sequence[int] = (), num_tokens: int = 0) -> None:
        self.pages, self.table, self.num_tokens = pages, list(table), num_tokens

    def fork(self) -> "Text":
        """Return a text that shares all pages of this one."""
        for page in self.table:
            self.pages.ref_counts[page] += 1
        return Text(self.pages, self.table, self.num_tokens)

    def reserve(self, tokens: int) -> None:
        """Allocate the pages of the next `tokens` tokens."""
        if self.num_tokens % self.pages.size:
            self.table[-1] = self.pages.make_private(self.table[-1])
        while len(self.table) * self.pages.size < self.num_tokens + tokens:
            self.table.append(self.pages.allocate())

    def slot(self, token: int) -> int:
        """Return the index of a token in the memory of all pages."""
        return self.table[token // self.pages.size] * self.pages.size + token % self.pages.size

    def close(self) -> None:
        """Release all pages."""
        for page in self.table:
            self.pages.release(page)
        self.table, self.num_tokens = [], 0


class Cache:
    """Attention of the texts' next tokens over their cached keys and values.

    Args:
        layers: layers of the model.
        pages: the page pool.
    """

    def __init__(self, layers: int, pages: Pages) -> None:
        self.layers, self.pages, self.layer = layers, pages, 0
        self.texts: Sequence[Text] = ()

    def new_text(self) -> Text:
        return Text(self.pages)

    @contextmanager
    def extend(self, texts: Sequence[Text], tokens: int) -> Iterator[None]:
        """Prepare for one model call with the next `tokens` tokens of each text: one token each, or any number of one text."""
        assert tokens == 1 or len(texts) == 1, "several tokens of several texts would each need a mask of its own"
        for text in texts:
            text.reserve(tokens)
        self.texts, self.layer = texts, 0
        num_pages = max(len(text.table) for text in texts)
        self._table = torch.tensor([text.table + [0] * (num_pages - len(text.table)) for text in texts], dtype=torch.int32)
        self._lengths = torch.tensor([text.num_tokens + tokens for text in texts], dtype=torch.int32)
        self._slots = torch.tensor([text.slot(text.num_tokens + i) for text in texts for i in range(tokens)])
        yield
        assert self.layer == self.layers, f"{self.layer} layers called, not {self.layers}"
        for text in texts:
            text.num_tokens += tokens

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> Tensor:
        """Write k and v (texts, tokens, KV heads, D) to the cache and attend; returns the shape of q."""
        if self.layer == 0:
            self._table, self._lengths, self._slots = (x.to(q.device) for x in (self._table, self._lengths, self._slots))
        if self.layer == len(self.pages.memory):
            sizes = ((len(self.pages.ref_counts), self.pages.size, *x.shape[2:]) for x in (k, v))
            keys, values = (q.new_empty(size) for size in sizes)
            self.pages.memory.append((keys, values))
        keys, values = self.pages.memory[self.layer]
        for memory, x in ((keys, k), (values, v)):
            memory.flatten(0, 1)[self._slots] = x.flatten(0, 1)
        self.layer += 1
        if q.shape[1] == 1:
            table, lengths, window = self._table, self._lengths, mask.window
            assert window is None or isinstance(window, int), "paged attention takes a causal window"
            return paged_attention(q[:, 0], keys, values, table, lengths, window=window, **options)[:, None]
        (text,) = self.texts
        if text.num_tokens:  # gather the cached keys; the last query is aligned with the last key, as without a cache
            k, v = (x[self._table[0]].flatten(0, 1)[None, : text.num_tokens + q.shape[1]] for x in (keys, values))
        out = attention(q, k, v, mask=mask, **options)
        assert isinstance(out, Tensor)
        return out
