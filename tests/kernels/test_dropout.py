"""Dropout: the published generator, and the same pattern from every backend, tile size and seed type."""

import pytest
import torch

from ringspan import Mask, attention
from ringspan.kernels.dropout import keep_mask, philox
from ringspan.kernels.segments import Segment, one_segment, positions

WORD = 0xFFFFFFFF


@pytest.mark.parametrize(
    "counter, key, words",
    [  # known answers published with Random123: philox4x32 with 10 rounds
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: list, key: list, words: list) -> None:
    result = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert [int(word) for word in result] == words


@pytest.mark.parametrize(
    "k_at",
    [[(3, 1, 2), (10, 1, 2), (40, 1, 1)], [(6, 1, 7)], [(21, 3, 5), (1, 5, 3), (2, 1, 3)]],
    ids=["three", "one", "strided"],
)
def test_keep_mask_equals_its_definition(k_at: list[Segment]) -> None:
    """keep iff word [j mod 4] of Philox(seed halves; j // 4, p, head, batch) ≥ round(rate · 2³²), for any keys."""
    seed, rate = 2**40 + 77, 0.3
    p, j = torch.tensor([-2, 0, 9]), positions(k_at)
    keep = keep_mask(torch.tensor(seed), rate, 2, range(3, 5), p, k_at)
    for b in range(2):
        for h in range(2):
            for i, position in enumerate(p.tolist()):
                for c, key in enumerate(j.tolist()):
                    counter = tuple(torch.tensor([x]) for x in (key // 4, position, h + 3, b))
                    words = philox(counter, (torch.tensor([seed & WORD]), torch.tensor([seed >> 32])))
                    assert bool(keep[b, h, i, c]) == (int(words[key % 4]) >= round(rate * 2**32))


def test_rate_and_mean_of_kept_weights(device: str) -> None:
    keep = keep_mask(torch.tensor(5), 0.2, 1, range(4), torch.arange(512), one_segment(512))
    assert abs(keep.double().mean() - 0.8) < 4 * (0.2 * 0.8 / keep.numel()) ** 0.5
    # The mean of the weights is preserved: with values of 1 the mean output is 1.
    q, k = torch.randn(1, 48, 4, 16, device=device), torch.randn(1, 48, 4, 16, device=device)
    v = torch.ones(1, 48, 4, 16, device=device)
    outs = torch.stack([attention(q, k, v, dropout=0.2, seed=seed, backend="chunked").mean() for seed in range(40)])
    assert abs(outs.mean() - 1) < 0.01


def kept_weights(seed: torch.Tensor | int, backend: str, rows: slice = slice(None), keys: int = 45, **options) -> torch.Tensor:
    """Return the pattern, bool (B, H, rows, keys), read from the output with one-hot values."""
    q, k = torch.zeros(2, 40, 2, 16), torch.zeros(2, keys, 2, 16)
    v = torch.nn.functional.pad(torch.eye(keys), (0, 64 - keys))[None, :, None].expand(2, -1, 2, -1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seed = seed.to(device) if isinstance(seed, torch.Tensor) else seed
    out = attention(q.to(device), k.to(device), v.to(device), dropout=0.5, seed=seed, backend=backend, **options)
    return (out[..., :keys] > 0).permute(0, 2, 1, 3)[:, :, rows].cpu()


def test_the_pattern_is_independent_of_backend_and_tiles(monkeypatch) -> None:
    expected = keep_mask(torch.tensor(31), 0.5, 2, range(2), torch.arange(40) + 5, one_segment(45))
    assert torch.equal(kept_weights(31, "reference"), expected)
    assert torch.equal(kept_weights(31, "triton"), expected)
    monkeypatch.setattr("ringspan.kernels.backends.chunked.Q_CHUNK", 7)
    monkeypatch.setattr("ringspan.kernels.backends.chunked.K_CHUNK", 13)
    assert torch.equal(kept_weights(31, "chunked"), expected)
    from ringspan.kernels.backends.triton import tile_sizes as tiles

    block = 16 if tiles.chip(torch.device("cpu")) == "interpreter" else 64
    for table in (tiles.INTERPRETED, tiles.FP32):
        monkeypatch.setitem(table, "forward", {256: (block, block, 4, 1)})
    assert torch.equal(kept_weights(31, "triton"), expected)


def test_one_seed_per_sequence() -> None:
    """With (B,) seeds the batch word is 0, so a sequence's pattern does not depend on its index in the batch."""
    for backend in ("reference", "triton"):
        pair = kept_weights(torch.tensor([8, 31]), backend)
        swapped = kept_weights(torch.tensor([31, 8]), backend)
        assert torch.equal(pair, swapped.flip(0))
        assert torch.equal(pair[1:], kept_weights(31, backend)[:1])  # index 0 of a batch has batch word 0


def test_an_int_seed_equals_a_tensor_seed() -> None:
    assert torch.equal(kept_weights(12345678901, "chunked"), kept_weights(torch.tensor(12345678901), "chunked"))
    assert not torch.equal(kept_weights(12345678901, "chunked"), kept_weights(12345678901 & WORD, "chunked"))


def test_a_missing_seed_is_drawn_from_torchs_generator() -> None:
    q = torch.randn(1, 32, 2, 16)
    torch.manual_seed(4)
    first, second = attention(q, q, q, dropout=0.5), attention(q, q, q, dropout=0.5)
    torch.manual_seed(4)
    assert torch.equal(first, attention(q, q, q, dropout=0.5)) and not torch.equal(first, second)


def test_the_backward_uses_the_pattern_of_the_forward(device: str) -> None:
    """dv of a dropped weight is 0. The sweep compares all gradients; this test compares the pattern."""
    q, k = torch.zeros(1, 20, 1, 16, device=device), torch.zeros(1, 20, 1, 16, device=device)
    v = torch.randn(1, 20, 1, 16, device=device, requires_grad=True)
    keep = keep_mask(torch.tensor(3), 0.5, 1, range(1), torch.arange(20), one_segment(20))[0, 0]
    for backend in ("chunked", "triton"):
        out = attention(q, k, v, Mask(), dropout=0.5, seed=3, backend=backend)
        (dv,) = torch.autograd.grad(out[:, 7].sum(), v)
        assert torch.equal((dv[0, :, 0, 0] != 0).cpu(), keep[7])
