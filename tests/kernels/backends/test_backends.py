"""Every backend against the dense truth: out, lse and all gradients, under the error rule of assert_close."""

import pytest
import torch

from ringspan import attention
from ringspan.kernels.dropout import keep_mask
from ringspan.kernels.segments import whole
from tests.conftest import HAS_GPU
from tests.kernels.cases import CASES
from tests.kernels.dense import Case, assert_close, dense

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_case(case: Case, backend: str, dtype: torch.dtype, device: str) -> None:
    given = case.tensors(dtype, device)
    mask = case.mask(device)
    leaves = {name: given[name].detach().requires_grad_() for name in ("q", "k", "v", "sinks") if name in given}
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
    dlse = torch.where(torch.isinf(lse), 0, given["dlse"].to(lse.dtype))
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (given["dout"], dlse))
    got = {"out": out, "lse": lse} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    keep = None
    if case.dropout:
        seed, keys = torch.tensor(case.seed, device=device), given["k"].shape[1]
        p = torch.arange(case.rows, device=device) + keys - case.rows
        keep = keep_mask(seed, case.dropout, case.batch, range(case.heads[0]), p, whole(keys))
    truth = dense(case, given, torch.float64, keep)
    low = dense(case, given, dtype, keep)
    assert_close(got, truth, low, dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "backend, dtype", [("reference", "fp64"), ("chunked", "fp64"), ("chunked", "fp32"), ("chunked", "bf16"), ("triton", "fp32")]
)
def test_sweep(case: Case, backend: str, dtype: str, device: str, poisoned_memory: None, monkeypatch) -> None:
    monkeypatch.setattr("ringspan.kernels.backends.chunked.Q_CHUNK", 16)  # several chunks at these lengths
    monkeypatch.setattr("ringspan.kernels.backends.chunked.K_CHUNK", 24)
    check_case(case, backend, DTYPES[dtype], device)


SIXTEEN_BIT = [
    case for case in CASES if case.name in ("gqa", "window-causal", "documents-padded", "softcap-sinks", "dropout", "width-40")
]


@pytest.mark.parametrize("case", CASES if HAS_GPU else SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sweep_in_16_bits(case: Case, dtype: str, device: str, poisoned_memory: None) -> None:
    check_case(case, "triton", DTYPES[dtype], device)


def grow(q: torch.Tensor, k: torch.Tensor, first: float, last: float) -> None:
    k *= torch.linspace(first, last, k.shape[1], device=k.device)[None, :, None, None]


SCORES = {  # what becomes of q and k
    "growing": lambda q, k: grow(q, k, 0.1, 20),
    "falling": lambda q, k: grow(q, k, 20, 0.1),
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
    """A softmax that follows the maximum, or does not follow it till it has to, gives the same."""
    masks = [dict(), dict(causal=True), dict(causal=True, window=90), dict(causal=True, documents=(0,) * 150 + (1,) * 150)]
    for mask in masks if backend == "hopper" else masks[1:2]:
        case = Case(scores, rows=300, width=width, heads=(1, 1), **mask)
        given = case.tensors(DTYPES[dtype], device)
        SCORES[scores](given["q"], given["k"])
        out, lse = attention(given["q"], given["k"], given["v"], case.mask(device), return_lse=True, backend=backend)
        truth, low = (dense(case, given, precision) for precision in (torch.float64, DTYPES[dtype]))
        assert_close(dict(out=out, lse=lse), *({name: x[name] for name in ("out", "lse")} for x in (truth, low)), DTYPES[dtype])
