"""Invalid arguments of `attention` and of the block functions raise a ValueError that names the argument."""

import re
from typing import Any

import pytest
import torch

from ringspan import Mask, attention
from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.segments import one_segment
from tests.kernels.helpers.cases import LENGTH, random_inputs

INT64, INT32 = torch.int64, torch.int32
NESTED, JAGGED = (
    torch.nested.nested_tensor([torch.zeros(24, 2, 16), torch.zeros(9, 2, 16)], layout=layout)
    for layout in (torch.strided, torch.jagged)
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.zeros(24, 4, 16)), "q has 3 dimensions"),
        (dict(q=[1.0]), "q must be a tensor, not list"),
        (dict(q=torch.zeros(2, 24, 4, 16, dtype=INT64)), "q is torch.int64; float64, float32, bfloat16 and float16 work"),
        (dict(k=torch.zeros(2, 24, 2, 16, dtype=torch.float16)), "k is torch.float16, but q is torch.float32"),
        (dict(v=torch.zeros(2, 24, 2, 16, device="meta")), "v is on meta, but q is on cpu"),
        (dict(k=torch.zeros(1, 24, 2, 16)), "k has batch size 1, q has 2"),
        (dict(k=torch.zeros(2, 23, 2, 16)), "k (2, 23, 2, 16) and v (2, 24, 2, 16) must have the same length and heads"),
        (dict(k=torch.zeros(2, 24, 2, 24)), "k has head dim 24, q has 16"),
        (dict(q=torch.zeros(2, 24, 3, 16)), "q has 3 heads, k and v have 2"),
        (dict(q=torch.zeros(2, 24, 4, 20), k=torch.zeros(2, 24, 2, 20)), "q and k have head dim 20: 16 to 256 in steps of 8"),
        (dict(q=torch.zeros(2, 24, 4, 0), k=torch.zeros(2, 24, 2, 0)), "q and k have head dim 0: 16 to 256 in steps of 8"),
        (dict(k=torch.zeros(2, 24, 2, 16).to_sparse()), "k has layout torch.sparse_coo: pass a dense tensor, k.to_dense()"),
        (dict(q=NESTED), "q is a nested tensor: pass packed rows, q.values(), to attention_varlen"),
        (dict(v=JAGGED), "v is a nested tensor: pass packed rows, v.values(), to attention_varlen"),
        (dict(v=torch.zeros(2, 24, 2, 264)), "v have head dim 264: 16 to 256 in steps of 8"),
        (dict(mask=torch.ones(24, 24)), "mask must be a ringspan.Mask or None, not Tensor"),
        (dict(mask=Mask(documents=torch.zeros(23, dtype=INT64))), "documents describe 23 positions, q has 24 and k has 24"),
        (dict(mask=Mask(documents=torch.zeros(3, 24, dtype=INT64))), "documents of batch size 3, but q has 2"),
        (
            dict(mask=Mask(documents=[0] * 24, key_documents=[0] * 25)),
            "documents describe 24 queries and key_documents 25 keys, q has 24 and k has 24: pass one id for each",
        ),
        (dict(mask=Mask(documents=torch.zeros(3, 24, dtype=INT64), key_documents=[0] * 24)), "documents of batch size 3"),
        (dict(mask=Mask(causal=True, prefix=torch.tensor([1, 2, 3]))), "prefix of batch size 3, but q has 2"),
        (dict(scale=[1.0]), "scale=[1.0] must be a Python number"),
        (dict(scale=1j), "scale=1j must be a Python number"),
        (dict(softcap=[1.0]), "softcap=[1.0] must be a Python number"),
        (dict(dropout=(0.1,)), "dropout=(0.1,) must be a Python number"),
        (dict(scale=float("nan")), "scale=nan must be a finite number"),
        (dict(scale=float("inf")), "scale=inf must be a finite number"),
        (dict(softcap=-1.0), "softcap=-1.0 must be >= 0"),
        (dict(softcap=float("nan")), "softcap=nan must be >= 0"),
        (dict(dropout=1.0), "dropout=1.0 must be in [0, 1)"),
        (dict(dropout=float("nan")), "dropout=nan must be in [0, 1)"),
        (dict(dropout=torch.tensor([0.1, 0.2])), "dropout=tensor([0.1000, 0.2000]) must be a Python number"),
        (dict(dropout=0.1, seed=1.5), "seed=1.5 must be an int of 64 bits or an int64 tensor"),
        (dict(dropout=0.1, seed=torch.zeros(3, dtype=INT64)), "seed is torch.int64 (3,); an int64 tensor of shape () or (2,)"),
        (dict(dropout=0.1, seed=torch.zeros((), dtype=INT32)), "seed is torch.int32 ()"),
        (dict(seed=2**63), "seed=9223372036854775808 must be an int of 64 bits"),
        (dict(sinks=torch.zeros(2)), "sinks are torch.float32 (2,); they must be floats of shape (4,)"),
        (dict(sinks=torch.zeros(4, dtype=INT64)), "sinks are torch.int64 (4,); they must be floats"),
        (dict(deterministic="no"), "deterministic='no' must be True or False"),
        (dict(backend="flash"), "backend='flash': choose one of ('auto', 'reference', 'chunked', 'triton', 'hopper')"),
        (dict(backend="hopper"), "backend='hopper' needs an sm_90 GPU"),
    ],
)
def test_attention_rejects_invalid_arguments(change: dict[str, Any], message: str) -> None:
    q, k, v = torch.zeros(2, 24, 4, 16), torch.zeros(2, 24, 2, 16), torch.zeros(2, 24, 2, 16)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        attention(**(dict(q=q, k=k, v=v) | change))


def test_block_forward_rejects_invalid_arguments(device: str) -> None:
    q, k, v, _ = random_inputs(torch.float32, device)
    out, lse = block_forward(q, k, v, None)
    for change, message in (
        (dict(carry=(out, lse[:, :, 1:])), "carry's lse is "),
        (dict(into=(out[:, 1:], lse)), "into's out is "),
        (dict(q_at=one_segment(LENGTH)), "q_at and k_at must be passed together"),
        (dict(q_at=one_segment(LENGTH), k_at=one_segment(LENGTH, start=-5)), r"k_at=.*: key positions must be >= 0"),
        (dict(dropout=0.5), "dropout in a block needs a seed"),
        (dict(head_start=-1), "head_start=-1 must be an int >= 0"),
        (dict(head_start=1.0), "head_start=1.0 must be an int >= 0"),
        (dict(head_start=True), "head_start=True must be an int >= 0"),
        (dict(mask=torch.ones(LENGTH, LENGTH)), "mask must be a ringspan.Mask or None"),
        (dict(mask=Mask(documents=[0] * LENGTH, key_documents=[0] * LENGTH)), "mask with key_documents needs q_at and k_at"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            block_forward(**(dict(q=q, k=k, v=v, mask=None) | change))


def test_output_delta_rejects_other_shapes(device: str) -> None:
    q, k, v, dout = random_inputs(torch.float32, device)
    out, _ = block_forward(q, k, v, None)
    with pytest.raises(ValueError, match=r"^dout has shape"):
        output_delta(dout[:, 1:], out)
    with pytest.raises(ValueError, match=r"^dlse is "):
        output_delta(dout, out, torch.zeros(LENGTH, device=device))


def test_block_backward_rejects_other_shapes_and_strides(device: str) -> None:
    q, k, v, dout = random_inputs(torch.float32, device)
    out, lse = block_forward(q, k, v, None)
    delta, gradients = output_delta(dout, out), [torch.zeros_like(x) for x in (q, k, v)]
    for position, name in ((0, "dout"), (4, "lse"), (5, "delta")):
        inputs = [dout, q, k, v, lse, delta]
        inputs[position] = inputs[position][:1]
        with pytest.raises(ValueError, match=f"^{name} is "):
            block_backward(*inputs, None, None, None, *gradients)
    with pytest.raises(ValueError, match=r"^dq has strides"):
        uneven = torch.zeros(2, LENGTH, 4, 20, device=device)[..., :16]
        block_backward(dout, q, k, v, lse, delta, None, None, None, uneven, *gradients[1:])


def test_block_backward_accumulates_in_the_accumulation_dtype_only(device: str) -> None:
    q, k, v, dout = random_inputs(torch.float32, device)
    _, lse = block_forward(q, k, v, None)
    low = [x.bfloat16() for x in (q, k, v)]
    for gradients, options, name in (
        (low, {}, "dq"),
        (low, dict(accumulate="dq"), "dq"),
        ((q.clone(), *low[1:]), {}, "dk"),
    ):
        with pytest.raises(ValueError, match=f"^{name} is torch.bfloat16: blocks accumulate in torch.float32"):
            block_backward(dout.bfloat16(), *low, lse, lse, None, None, None, *gradients, **options)
