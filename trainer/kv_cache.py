"""Keys and values of texts that are being written, in pages that a text takes one at a time and may share with others.

    cache = Cache(layers, Pages(100))
    text = cache.new_text()
    with cache.taking([text], 7): model.logits(tokens (1, 7), …, attention=cache)         a prompt, or a part of it
    other = text.fork()                                                                   goes on with the same keys
    with cache.taking([text, other], 1): model.logits(tokens (2, 1), …, attention=cache)  a token of each
    other.close()                                                                         its pages are free again

The cache is an attention: a model takes attention as an argument, calls it once a layer, and so never learns that this one
remembers the keys of earlier calls. No text has memory set aside for as long as it may become: it takes a page when the one
before is full, and the last that has a page gives it back. Where texts begin alike they have the same pages; who writes into
one that others have takes a copy of it (copy on write).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.attention import attention
from ringspan.kernels.mask import Mask
from ringspan.kernels.paged_attention import paged_attention

PAGE = 64  # tokens: half of one is idle in each text, and a page's keys of a head are a good piece to load


class Pages:
    """Which are free, and how many texts have each. Their memory is there from a layer's first keys on."""

    def __init__(self, number: int, size: int = PAGE) -> None:
        self.size = size
        self.free = list(range(number))[::-1]
        self.users = [0] * number
        self.memory: list[tuple[Tensor, Tensor]] = []  # of each layer (number, size, KV heads, D)

    def take(self) -> int:
        if not self.free:
            raise ValueError(f"all {len(self.users)} pages of {self.size} tokens are taken: close a text, or make more pages")
        page = self.free.pop()
        self.users[page] = 1
        return page

    def give_back(self, page: int) -> None:
        self.users[page] -= 1
        if not self.users[page]:
            self.free.append(page)

    def own(self, page: int) -> int:
        """The page, or a copy if others have it too."""
        if self.users[page] == 1:
            return page
        copy = self.take()
        for x in (x for pair in self.memory for x in pair):
            x[copy] = x[page]
        self.give_back(page)
        return copy


class Text:
    """The pages of one text, in order, and how many tokens are in them."""

    def __init__(self, pages: Pages, table: Sequence[int] = (), num_tokens: int = 0) -> None:
        self.pages, self.table, self.num_tokens = pages, list(table), num_tokens

    def fork(self) -> "Text":
        for page in self.table:
            self.pages.users[page] += 1
        return Text(self.pages, self.table, self.num_tokens)

    def make_room(self, tokens: int) -> None:
        if self.num_tokens % self.pages.size:
            self.table[-1] = self.pages.own(self.table[-1])
        while len(self.table) * self.pages.size < self.num_tokens + tokens:
            self.table.append(self.pages.take())

    def place(self, token: int) -> int:
        """Where it is among the tokens of all pages."""
        return self.table[token // self.pages.size] * self.pages.size + token % self.pages.size

    def close(self) -> None:
        for page in self.table:
            self.pages.give_back(page)
        self.table, self.num_tokens = [], 0


class Cache:
    """Attention of texts' next tokens over all that they have."""

    def __init__(self, layers: int, pages: Pages) -> None:
        self.layers, self.pages, self.layer = layers, pages, 0
        self.texts: Sequence[Text] = ()

    def new_text(self) -> Text:
        return Text(self.pages)

    @contextmanager
    def taking(self, texts: Sequence[Text], tokens: int) -> Iterator[None]:
        """The model's call in here has so many tokens of each of these texts: one each, or of one text any number."""
        assert tokens == 1 or len(texts) == 1, "several tokens of several texts would each need a mask of its own"
        for text in texts:
            text.make_room(tokens)
        self.texts, self.layer = texts, 0
        most = max(len(text.table) for text in texts)
        self._table = torch.tensor([text.table + [0] * (most - len(text.table)) for text in texts], dtype=torch.int32)
        self._lengths = torch.tensor([text.num_tokens + tokens for text in texts], dtype=torch.int32)
        self._places = torch.tensor([text.place(text.num_tokens + i) for text in texts for i in range(tokens)])
        yield
        assert self.layer == self.layers, f"{self.layer} layers called, not {self.layers}"
        for text in texts:
            text.num_tokens += tokens

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> Tensor:
        if self.layer == 0:
            self._table, self._lengths, self._places = (x.to(q.device) for x in (self._table, self._lengths, self._places))
        if self.layer == len(self.pages.memory):
            sizes = ((len(self.pages.users), self.pages.size, *x.shape[2:]) for x in (k, v))
            keys, values = (q.new_empty(size) for size in sizes)
            self.pages.memory.append((keys, values))
        keys, values = self.pages.memory[self.layer]
        for memory, x in ((keys, k), (values, v)):
            memory.flatten(0, 1)[self._places] = x.flatten(0, 1)
        self.layer += 1
        if q.shape[1] == 1:
            table, lengths = self._table, self._lengths
            return paged_attention(q[:, 0], keys, values, table, lengths, window=mask.window, **options)[:, None]
        (text,) = self.texts
        if text.num_tokens:  # what came before is put together; the last query stands at the last key, as without a cache
            k, v = (x[self._table[0]].flatten(0, 1)[None, : text.num_tokens + q.shape[1]] for x in (keys, values))
        return attention(q, k, v, mask=mask, **options)
