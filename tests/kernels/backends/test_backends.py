"""Every backend against the dense truth: out, lse and all gradients, under the error rule of assert_close."""

import pytest
import torch

from ringspan import attention
from ringspan.kernels.dropout import keep_mask
from ringspan.kernels.segments import one_segment
from tests.conftest import HAS_GPU
from tests.kernels.helpers.cases import CASES
from tests.kernels.helpers.dense import Case, assert_close, dense

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_case(case: Case, backend: str, dtype: torch.dtype, device: str) -> None:
    """Run one case forward and backward and compare out, lse and all gradients with the dense truth."""
    tensors = case.tensors(dtype, device)
    mask = case.mask(device)
    leaves = {name: tensors[name].detach().requires_grad_() for name in ("q", "k", "v", "sinks") if name in tensors}
    out, lse = attention(
        **leaves,
        mask=mask,
        scale=case.scale,
        softcap=case.softcap,
        dropout=case.dropout,
        seed=case.seed if case.dropout else None,
        return_lse=True,
        backend=backend,
    )
    dlse = torch.where(torch.isinf(lse), 0, tensors["dlse"].to(lse.dtype))
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (tensors["dout"], dlse))
    results = {"out": out, "lse": lse} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    keep = None
    if case.dropout:
        seed, keys = torch.tensor(case.seed, device=device), tensors["k"].shape[1]
        p = case.q_positions(device)
        keep = keep_mask(seed, case.dropout, case.batch, range(case.heads[0]), p, one_segment(keys))
    truth = dense(case, tensors, torch.float64, keep)
    low = dense(case, tensors, dtype, keep)
    assert_close(results, truth, low, dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "backend, dtype", [("reference", "fp64"), ("chunked", "fp64"), ("chunked", "fp32"), ("chunked", "bf16"), ("triton", "fp32")]
)
def test_every_case_equals_the_dense_truth(
    case: Case, backend: str, dtype: str, device: str, poisoned_memory: None, monkeypatch
) -> None:
    monkeypatch.setattr("ringspan.kernels.backends.chunked.Q_CHUNK", 16)  # several chunks at these lengths
    monkeypatch.setattr("ringspan.kernels.backends.chunked.K_CHUNK", 24)
    check_case(case, backend, DTYPES[dtype], device)


CASES_IN_16_BITS = [
    case for case in CASES if case.name in ("gqa", "window-causal", "documents-padded", "softcap-sinks", "dropout", "width-40")
]


@pytest.mark.parametrize("case", CASES if HAS_GPU else CASES_IN_16_BITS, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sweep_of_cases_in_16_bits(case: Case, dtype: str, device: str, poisoned_memory: None) -> None:
    check_case(case, "triton", DTYPES[dtype], device)


def scale_keys(q: torch.Tensor, k: torch.Tensor, first: float, last: float) -> None:
    k *= torch.linspace(first, last, k.shape[1], device=k.device)[None, :, None, None]


SCORES = {  # name: in-place change of q and k
    "growing": lambda q, k: scale_keys(q, k, 0.1, 20),
    "falling": lambda q, k: scale_keys(q, k, 20, 0.1),
    "one far above": lambda q, k: k[:, k.shape[1] // 2].mul_(60),
    "far below 0": lambda q, k: (q.abs_(), k.abs_().mul_(-5)),
    "huge": lambda q, k: k.mul_(1000),
}


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(
    "backend, width",
    [*(pytest.param("hopper", width, marks=pytest.mark.hopper) for width in (64, 128, 256)), ("triton", 64), ("chunked", 64)],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_scores_of_any_size(scores: str, backend: str, width: int, dtype: str, device: str, poisoned_memory: None) -> None:
    """The result does not depend on how often the online softmax updates its maximum."""
    masks = [dict(), dict(causal=True), dict(causal=True, window=90), dict(causal=True, documents=(0,) * 150 + (1,) * 150)]
    for mask in masks if backend == "hopper" else masks[1:2]:
        case = Case(scores, rows=300, width=width, heads=(1, 1), **mask)
        tensors = case.tensors(DTYPES[dtype], device)
        SCORES[scores](tensors["q"], tensors["k"])
        out, lse = attention(tensors["q"], tensors["k"], tensors["v"], case.mask(device), return_lse=True, backend=backend)
        truth, low = (dense(case, tensors, precision) for precision in (torch.float64, DTYPES[dtype]))
        assert_close(dict(out=out, lse=lse), *({name: x[name] for name in ("out", "lse")} for x in (truth, low)), DTYPES[dtype])
