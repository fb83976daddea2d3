"""Masks against the definition of their rules, pair by pair, and the errors of invalid masks."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ringspan import Mask, attention
from ringspan.kernels.segments import positions
from tests.kernels.helpers.cases import CASES, packed
from tests.kernels.helpers.dense import Case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_visible_equals_the_rules_pair_by_pair(case: Case) -> None:
    keys = case.rows if case.keys is None else case.keys
    visible = case.mask().visible(case.q_positions(), torch.arange(keys))
    assert torch.equal(*torch.broadcast_tensors(visible, case.visible("cpu")))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interval_bounds_never_decrease(case: Case) -> None:
    """Therefore the first and last row bound a tile. Positions past the documents, a layout's padding, are included."""
    for positions_ in (torch.arange(case.rows + 9), case.q_positions()):
        lo, hi = case.mask().interval(positions_)
        assert (lo.diff() >= 0).all() and (hi.diff() >= 0).all()


def test_interval_of_small_masks() -> None:
    lo, hi = Mask(causal=True, window=3).interval(torch.arange(5))
    assert lo.tolist() == [0, 0, 0, 1, 2] and hi.tolist() == [0, 1, 2, 3, 4]
    lo, hi = Mask().interval(torch.arange(3), num_keys=7)
    assert lo.tolist() == [0, 0, 0] and hi.tolist() == [6, 6, 6]
    lo, hi = Mask(documents=torch.tensor([3, 3, -1, 0])).interval(torch.arange(4))
    assert lo.tolist() == [0, 0, 2, 3] and hi.tolist() == [1, 1, 1, 3]
    lo, hi = Mask(causal=True, prefix=2).interval(torch.arange(4))
    assert lo.tolist() == [0] * 4 and hi.tolist() == [1, 1, 2, 3]
    lo, hi = Mask(documents=torch.tensor([[0, 0, 1], [0, 1, 1]])).interval(torch.arange(3))
    assert lo.tolist() == [[0, 0, 2], [0, 1, 1]] and hi.tolist() == [[1, 1, 2], [0, 2, 2]]


SEGMENTS = [[(0, 1, 4)], [(4, 1, 4)], [(3, 2, 3)], [(0, 1, 2), (6, 1, 2)], [(5, 1, 1)]]
BEFORE = [(-3, 1, 4)]  # queries may be before the first key


@pytest.mark.parametrize("q_at", [*SEGMENTS, BEFORE], ids=str)
@pytest.mark.parametrize("k_at", SEGMENTS, ids=str)
def test_covers_block_if_all_pairs_are_visible(q_at: list, k_at: list) -> None:
    """Exact for causal masks and windows; documents and prefixes are not evaluated."""
    at = positions(q_at), positions(k_at)
    for options in (dict(), dict(causal=True), dict(window=3), dict(causal=True, window=6), dict(window=(5, 2))):
        mask = Mask(**options)
        assert mask.covers_block(q_at, k_at) == bool(mask.visible(*at).all()), mask
    prefixed = Mask(causal=True, prefix=1)
    assert not prefixed.covers_block(q_at, k_at) or prefixed.visible(*at).all()
    assert not Mask(documents=torch.zeros(8, dtype=torch.int32)).covers_block(q_at, k_at)


def test_from_lengths() -> None:
    mask = Mask.from_lengths([2, 0, 3], causal=True)
    assert mask.documents.tolist() == [0, 0, 2, 2, 2] and mask.causal
    assert Mask.from_lengths([]).length == Mask(documents=[]).length == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integer_dtypes(dtype: torch.dtype) -> None:
    number = torch.tensor([2], dtype=dtype)
    mask = Mask(causal=True, prefix=number, documents=torch.tensor([0, 0, 0, 1, 1], dtype=dtype))
    number.zero_()  # the mask holds a copy
    assert mask.prefix.tolist() == [2] and mask.prefix.dtype == torch.int32
    assert mask.interval(torch.arange(5))[1].tolist() == [1, 1, 2, 3, 4]


def test_fake_tensors() -> None:
    """Contents cannot be read, as on a GPU."""
    with FakeTensorMode():
        ids, q = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, 4, 16)
        prefix = torch.ones(2, dtype=torch.int64)
        for mask in (Mask(True, documents=ids, prefix=prefix), Mask(True, documents=ids, key_documents=ids)):
            assert mask.has_padding and attention(q, q, q, mask).shape == q.shape


def test_host_mask_hides_no_visible_key() -> None:
    for case in CASES:
        mask = case.mask()
        assert mask.host_mask() is mask  # on the CPU: nothing is left out
    mask = Mask(causal=True, window=4, documents=torch.zeros(6, dtype=torch.int32, device="meta"))
    lo, hi = mask.host_mask().interval(torch.arange(6))
    assert lo.tolist() == [0, 0, 0, 0, 1, 2] and hi.tolist() == list(range(6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(causal=1), "causal=1 must be True or False"),
        (dict(window=0), "window=0: .* must be >= 1"),
        (dict(window=-5), "window=-5: .* must be >= 1"),
        (dict(window=(-1, 0)), r"window=\(-1, 0\): left and right must be >= 0"),
        (dict(window=(1, 2, 3)), r"window=\(1, 2, 3\) must be an int or a pair of ints"),
        (dict(window=2.5), "window=2.5 must be an int or a pair of ints"),
        (dict(window=True), "window=True must be an int or a pair of ints"),
        (dict(prefix=3), "prefix with causal=False, window=None: .* needs causal=True and no window"),
        (dict(prefix=3, causal=True, window=4), "prefix with causal=True, window=4: .* needs causal=True and no window"),
        (dict(prefix=-1, causal=True), "prefix=-1 must be an int >= 0"),
        (dict(prefix=1.5, causal=True), "prefix=1.5 must be an int >= 0"),
        (dict(prefix=torch.tensor([1.0]), causal=True), "prefix must be an int or integers of shape .B,., not torch.float32"),
        (dict(prefix=torch.tensor([-3]), causal=True), r"prefix=\[-3\] must be >= 0"),
        (dict(documents=torch.tensor([0.0, 1.0])), "documents must hold integer ids, not torch.float32"),
        (dict(documents=torch.tensor([True, False])), "documents must hold integer ids, not torch.bool"),
        (
            dict(documents=torch.zeros(1, 2, 3, dtype=torch.int64)),
            r"documents must have shape .*, not \(1, 2, 3\)",
        ),
        (dict(documents=torch.tensor([0, 1], dtype=torch.uint16)), "documents must hold integer ids, .* documents.long"),
        (dict(documents=torch.tensor([0, 1], dtype=torch.uint64)), "documents must hold integer ids, .* documents.long"),
        (dict(prefix=torch.tensor([1], dtype=torch.uint32), causal=True), "prefix must be an int or .*use prefix.long"),
        (dict(documents=["a"]), r"documents must be integer ids of shape \(S,\) or \(B, S\)"),
        (dict(key_documents=[0]), "documents=None with key_documents: pass the ids of the queries"),
        (dict(documents=[0], key_documents=[0], prefix=1, causal=True), "prefix=1 with key_documents: a prefix needs the same"),
        (dict(documents=[0], key_documents=[0.5]), "key_documents must hold integer ids, not torch.float32: pass ints"),
        (dict(documents=[1, 0], key_documents=[0]), "documents decrease, or have padding within .* ids ascend"),
        (dict(documents=[0], key_documents=[0, -1, 0]), "key_documents decrease, or have padding within a document"),
        (
            dict(documents=torch.zeros(2, 3).long(), key_documents=torch.zeros(4, 3).long()),
            r"key_documents of shape \(4, 3\) with documents of shape \(2, 3\): their batch sizes must be equal",
        ),
        (
            dict(documents=torch.zeros(3).long(), key_documents=torch.zeros(3, device="meta").long()),
            "key_documents are on meta, documents on cpu",
        ),
    ],
)
def test_invalid_masks_are_rejected(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Mask(**arguments)


@pytest.mark.parametrize("lengths", [[3, -1], [True], 5, [[1, 2]], torch.ones(2, 2, dtype=torch.int64)])
def test_invalid_lengths_are_rejected(lengths: object) -> None:
    with pytest.raises(ValueError, match=r"(?s)^lengths=.* must be a flat list of integers >= 0"):
        Mask.from_lengths(lengths)


def test_documents_need_no_order() -> None:
    same = Mask(documents=torch.tensor([7, 7, 3, 3, 7])).interval(torch.arange(5))
    expected = Mask(documents=torch.tensor(packed(2, 2, 1))).interval(torch.arange(5))
    assert all(torch.equal(a, b) for a, b in zip(same, expected, strict=True))


def test_bounds_stay_where_they_are() -> None:
    """Reading rules of documents on a GPU must not copy them: that waits for the GPU. A copy from "meta" would raise."""
    mask = Mask.from_bounds(Mask(causal=True, window=3, documents=packed(2, 6)).bounds("meta"))
    assert mask.bounds().starts is mask.bounds("meta").starts
    with pytest.raises(NotImplementedError, match="meta"):
        mask.bounds("cpu")


def test_a_mask_made_in_inference_mode_works_in_training(device: str) -> None:
    """Made or copied to a device in inference mode, its tensors can be saved for a backward."""
    ids = torch.arange(16) // 6
    with torch.inference_mode():
        documents = ids, ids.tolist(), ids.clone()  # the clone is an inference tensor
        masks = [Mask(causal=True, documents=x) for x in documents]
        masks += [Mask.from_lengths([10, 6]), *(Mask(causal=True, prefix=x) for x in (3, torch.tensor([3])))]
    sent = Mask(causal=True, documents=ids)
    with torch.inference_mode():
        assert not any(x.is_inference() for x in sent.bounds("meta").tensors if x is not None)
    for mask in masks:
        q = torch.randn(1, 16, 2, 16, device=device, requires_grad=True)
        attention(q, q, q, mask).sum().backward()
        assert q.grad is not None


def test_key_documents_compile_as_one_graph() -> None:
    """With an assertion on the order of ids, which eager mode reads."""

    def layer(q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor, key_ids: torch.Tensor) -> torch.Tensor:
        return attention(q, k, k, Mask(causal=True, documents=ids, key_documents=key_ids))

    q, k, ids = torch.randn(2, 6, 2, 16), torch.randn(2, 9, 2, 16), torch.tensor([0, 0, 1, 1, 1, -1])
    key_ids = torch.tensor([[-1, 0, 0, 0, 1, 1, 1, 1, 1], [0] * 8 + [1]])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, ids, key_ids), layer(q, k, ids, key_ids))
    with pytest.raises(RuntimeError, match=r"^key_documents decrease"):
        compiled(q, k, ids, key_ids.flip(1))
