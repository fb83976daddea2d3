"""Operators: a call bypasses the dispatcher only if nothing needs to intercept it, and torch's operator checks pass."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringspan import Mask, attention, attention_varlen, linear_cross_entropy
from ringspan.kernels.runtime.custom_op import may_bypass_dispatcher

OPERATORS = {"ringspan::attention_forward", "ringspan::attention_backward"}


def random_qkv(device: str, rows: int = 24) -> list[Tensor]:
    return [torch.randn(2, rows, heads, 16, device=device, requires_grad=True) for heads in (4, 2, 2)]


class RecordingMode(TorchDispatchMode):
    """A dispatch mode that records the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class RecordingTensor(Tensor):
    """A tensor subclass that records calls by __torch_function__ and has no dispatch key of its own."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(str(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_plain_call_bypasses_the_dispatcher(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random_qkv(device)
    dispatched: list[str] = []  # what the operator enters below autograd
    monkeypatch.setattr(torch._C, "_AutoDispatchBelowAutograd", lambda: dispatched.append("entered") or nullcontext())
    torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    assert not dispatched and may_bypass_dispatcher((q, k, None, "auto"))


def test_a_dispatch_mode_sees_both_operators(device: str) -> None:
    q, k, v = random_qkv(device)
    expected = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    with RecordingMode() as mode:
        torch.testing.assert_close(torch.autograd.grad(attention(q, k, v).sum(), (q, k, v)), expected, rtol=0, atol=0)
    assert set(mode.names) >= OPERATORS


def test_a_profiler_sees_both_operators(device: str) -> None:
    q, k, v = random_qkv(device)
    with torch.profiler.profile() as profile:
        torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    assert {event.key for event in profile.key_averages()} >= OPERATORS


def test_a_tensor_subclass_and_a_tracer_see_the_operator(device: str) -> None:
    q, k, v = random_qkv(device)
    RecordingTensor.calls.clear()
    attention(q.detach().as_subclass(RecordingTensor), k, v)
    assert "ringspan.attention_forward.default" in RecordingTensor.calls
    traced = torch.jit.trace(lambda x: attention(x, x, x), (q.detach(),))
    assert "ringspan::attention_forward" in str(traced.graph)


def test_other_kinds_of_tensors_go_through_the_dispatcher(device: str) -> None:
    q, k, v = random_qkv(device)
    with torch.inference_mode():
        others = [q + 0, q.to("meta"), torch.nn.Buffer(q), TwoTensor(q, q)]
        assert [may_bypass_dispatcher((q, x)) for x in others] == [False, False, True, False]
        torch.testing.assert_close(attention(q + 0, k + 0, v + 0), attention(q, k, v), rtol=0, atol=0)
    decisions: list[bool] = []
    torch.func.vmap(lambda x: decisions.append(may_bypass_dispatcher((x,))) or x)(q)
    assert decisions == [False]
    with FakeTensorMode():
        fake = torch.empty(2, 24, 4, 16, device="cuda")  # needs no GPU
    assert not may_bypass_dispatcher((fake,))
    assert attention(*(x.to("meta") for x in (q, k, v))).is_meta


@pytest.mark.parametrize("backend", ["chunked", "triton"])
@pytest.mark.parametrize("rows", [0, 9])
def test_opcheck(backend: str, rows: int, device: str) -> None:
    q, k, v = random_qkv(device, rows)
    sinks = torch.randn(4, device=device, requires_grad=True)
    ids = torch.zeros(2, rows, dtype=torch.int64)
    ids[:, rows // 2 :] = 1
    left, right, has_padding, *tensors = Mask(causal=True, documents=ids).bounds(device)
    numbers, factors = [left, right, int(has_padding), False], [0.3, 0.0, 0.0]
    args = (q, k, v, *tensors, sinks, None, numbers, factors, backend)
    torch.library.opcheck(torch.ops.ringspan.attention_forward, args)


def test_torch_func_is_rejected(device: str) -> None:
    x = torch.randn(1, 8, 2, 16, device=device)
    with pytest.raises(ValueError, match=r"^attention has no derivative in torch.func .*torch.autograd.grad"):
        torch.func.grad(lambda x: attention(x, x, x).sum())(x)
    per_sequence = torch.func.vmap(lambda x: attention(x, x, x))(x[None])
    torch.testing.assert_close(per_sequence[0], attention(x, x, x))


@pytest.fixture
def fake_mesh() -> Iterator[Any]:
    """A mesh of two ranks in this process, which exchange nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_dtensors_are_rejected(fake_mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # takes a second

    q, k, v = (x.detach() for x in random_qkv("cpu"))
    hidden, weight, labels = torch.randn(5, 16), torch.nn.Parameter(torch.randn(9, 16)), torch.arange(5)

    def check(name: str, function: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=rf"^{name} is a DTensor.*{name}.full_tensor\(\).*{name}.to_local\(\)"):
            function(*args, **options)

    for placement in (Replicate(), Shard(0)):
        *all_three, w = (distribute_tensor(x, fake_mesh, [placement]) for x in (q, k, v, weight))
        check("q", attention, *all_three)
        check("k", attention, q, *all_three[1:])
        check("sinks", attention, q, k, v, sinks=distribute_tensor(torch.zeros(4), fake_mesh, [placement]))
        check("k", attention_varlen, q[0], all_three[1][0], v[0], [0, 24])
        check("weight", linear_cross_entropy, hidden, torch.nn.Parameter(w), labels)
        with torch.inference_mode():
            check("weight", linear_cross_entropy, hidden, w, labels)


def test_an_operator_without_a_derivative_names_itself(device: str) -> None:
    q, k, v = random_qkv(device)
    (dq,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(ValueError, match=r"^attention has no second derivative: leave out create_graph=True"):
        torch.autograd.grad(dq.sum(), q)
