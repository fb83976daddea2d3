"""Streamed layers on one rank: gradients of the plain step in fp64, rounding in bf16, and peak bytes."""

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from ringspan.kernels import loss
from ringspan.parallel import buffered_attention
from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import Model
from ringspan.trainer.data import tokenizer
from ringspan.trainer.memory import streamed
from ringspan.trainer.memory.plan import parse
from ringspan.trainer.memory.streamed import GradientSums, LayerInputs
from ringspan.trainer.monitoring import layer_boundaries
from ringspan.trainer.monitoring.layer_boundaries import LayerBoundaries
from ringspan.trainer.planning import memory
from ringspan.trainer.planning.memory import BACKWARD_END, BACKWARD_START, FORWARD, LOSS, Footprint, footprint
from tests.trainer.memory.models import OPTIONS, SHAPE, build, difference, gradients

LENGTH = 53
PLANS = [  # A, B, C and D, mixtures of them, rows that divide the length or not, every size of a group, all on the host
    "x/1 outs=5",
    "x/1 outs=5 rows=10 heads=1",
    "x/4 outs=5 rows=16 heads=1",
    "x/1 rows=7",
    "x/4 heads=1 rows=16",
    "x/2@2 outs=3@2 heads=1 rows=16",
    "x/5@1 outs=5@5 heads=1 rows=53",
    "x/2 outs=1 heads=1",
    "x/2@3 outs=5@5 late heads=1 rows=16",
]


def inputs(shape: Model, seed: int, batch: int = 2, length: int = LENGTH) -> tuple[Any, ...]:
    """tokens, labels, positions, documents and seeds of dropout."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(shape.vocabulary, (batch, length), generator=generator)
    labels = torch.where(torch.rand(batch, length, generator=generator) < 0.1, -100, tokens.roll(-1, 1))
    documents = torch.arange(length).ge(length // 3 + seed).long() if seed % 2 else None
    seeds = torch.arange(batch) + seed if shape.dropout else None
    return tokens, labels, torch.arange(length).expand(batch, -1), documents, seeds


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_gradients_equal_those_of_the_plain_step(options: dict[str, Any]) -> None:
    """Two steps in a row with other inputs, because host memory and kept tensors are reused."""
    shape = Model(**(SHAPE | options))
    plain = build("none", shape, LENGTH, 2)
    batches = [inputs(shape, seed) for seed in (1, 2)]
    expected = [gradients(plain, *batch) for batch in batches]
    for text in PLANS:
        model = build(text, shape, LENGTH, 2)
        for batch, (loss_value, expected_gradients) in zip(batches, expected, strict=True):
            value, found = gradients(model, *batch)
            assert abs(value - loss_value) <= 1e-12 * abs(loss_value), text
            assert difference(found, expected_gradients) <= 1e-12, text


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_every_size_of_a_group(heads: int) -> None:
    shape = Model(**(SHAPE | dict(layers=2, heads=8, kv_heads=8)))
    batch = inputs(shape, 1)
    expected = gradients(build("none", shape, LENGTH, 2), *batch)[1]
    for rows in (0, 9):
        model = build(f"x/1 outs=1 heads={heads}" + f" rows={rows}" * bool(rows), shape, LENGTH, 2)
        assert difference(gradients(model, *batch)[1], expected) <= 1e-12


def test_frozen_weights_get_no_gradient() -> None:
    shape = Model(**SHAPE)
    models = [build(plan, shape, LENGTH, 2) for plan in ("none", "x/2 outs=2 heads=1 rows=16")]
    for model in models:
        for name, weight in model.named_parameters():
            weight.requires_grad_("mlp.up" in name or "attention.k" in name)
    expected, found = (gradients(model, *inputs(shape, 1))[1] for model in models)
    assert len(found) == 10 and difference(found, expected) <= 1e-12


def test_state_dict_does_not_depend_on_the_plan() -> None:
    shape = Model(**(SHAPE | dict(tied=False)))
    plain, model = (build(plan, shape, LENGTH) for plan in ("none", "x/2 outs=2"))
    names = [name for name, _ in plain.named_parameters()]
    assert list(plain.state_dict()) == list(model.state_dict()) == names
    with torch.no_grad():
        for weight in plain.parameters():
            weight.mul_(2)
    model.load_state_dict(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_evaluation_keeps_nothing_and_equals_the_plain_one() -> None:
    shape = Model(**(SHAPE | dict(dropout=0.2)))
    models = [build(plan, shape, LENGTH, 2).eval() for plan in ("none", "x/2@2 outs=5@5 heads=1 rows=16")]
    tokens, labels, positions, documents, _ = inputs(shape, 1)
    with torch.no_grad():
        losses = [model(tokens, labels, positions, documents, each=True)[2] for model in models]
    assert torch.allclose(losses[0], losses[1], rtol=1e-13, atol=0)
    assert not models[1].segments[0].streaming.kept._kept


def test_another_attention_runs_layer_by_layer() -> None:
    shape = Model(**SHAPE)
    plain, model = (build(plan, shape, LENGTH) for plan in ("none", "x/2 outs=2 rows=16"))
    tokens, _, positions, *_ = inputs(shape, 0, batch=1)
    calls = []

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append(q.shape)
        return plain.attention(q, k, v, **options)

    with torch.no_grad():
        logits = model.logits(tokens, positions, attention=attention)
        assert torch.allclose(logits, plain.logits(tokens, positions), rtol=1e-12, atol=1e-12)
    assert calls == [torch.Size((1, LENGTH, 4, 16))] * 5


def test_layers_whose_output_has_two_readers() -> None:
    """The backward writes its incoming gradient in place, which autograd sums from both readers, one of them expanded."""
    shape = Model(**(SHAPE | dict(layers=1)))
    tokens, *_ = inputs(shape, 0, batch=1)
    found = []
    for plan in ("none", "x/1 outs=1 rows=16"):
        model = build(plan, shape, LENGTH)
        rotation, mask = model.rotation(torch.arange(LENGTH)[None]), model.masks(None, tokens.device)[0]
        out = model.segments[0](model.embedding(tokens), [LayerInputs(rotation, mask, None, 0)], model.attention)
        (out.sum() + (out * torch.linspace(0, 1, 32, dtype=torch.float64)).sum()).backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert difference(found[1], found[0]) <= 1e-12


def test_second_backward_is_named() -> None:
    shape = Model(**SHAPE)
    model = build("x/1 outs=1", shape, LENGTH)
    tokens, labels, positions, *_ = inputs(shape, 0, batch=1)
    value = model(tokens, labels, positions)[0]
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"once per forward; engine\.memory=none"):
        value.backward()


@pytest.mark.parametrize("backend", ["eager"])
def test_compiled_row_functions_have_one_graph_per_shape(backend: str) -> None:
    """Two of each function for all layers here: a chunk and the rest of the rows, with and without gradients. Any length."""
    from torch._dynamo.utils import counters

    shape = Model(**SHAPE)
    batch = inputs(shape, 1, batch=1, length=48)
    expected = gradients(build("none", shape, 48), *batch)[1]
    model = build("x/2 outs=2 heads=1 rows=16", shape, 48)
    torch._dynamo.reset()
    model.segments[0].streaming.compile(backend=backend)
    counters.clear()
    assert difference(gradients(model, *batch)[1], expected) <= 1e-12
    first = counters["stats"]["unique_graphs"]
    assert 0 < first <= 6
    assert difference(gradients(model, *batch)[1], expected) <= 1e-12
    gradients(model, *inputs(shape, 1, batch=1, length=80))
    assert counters["stats"]["unique_graphs"] == first


@pytest.mark.parametrize("plan", ["x/2 outs=2 heads=1 rows=16", "x/1 outs=2", "none"])
def test_progress_counts_each_layer_once_per_direction(plan: str) -> None:
    shape = Model(**SHAPE)
    model = build(plan, shape, 48)
    boundaries = LayerBoundaries(0, 1, lambda: False, None, 10.0)
    layer_boundaries.activate(boundaries)
    try:
        loss = model(*inputs(shape, 1, batch=1, length=48)[:3])[0]
        assert boundaries.layers == shape.layers
        loss.backward()
        assert boundaries.layers == 2 * shape.layers
    finally:
        layer_boundaries.activate(None)


def test_evaluation_compiles_nothing() -> None:
    """It runs the graphs of a training step's forward, whose input has a gradient."""
    from torch._dynamo.utils import counters

    shape = Model(**SHAPE)
    batch = inputs(shape, 1, batch=1, length=48)
    model = build("x/2 outs=2", shape, 48)
    torch._dynamo.reset()
    model.segments[0].streaming.compile(backend="eager")
    counters.clear()
    gradients(model, *batch)
    first = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        model(*batch)
    assert counters["stats"]["unique_graphs"] == first == 4  # project with and without gradients, finish, expand


def test_backward_of_finish_computes_no_y() -> None:
    """Three matmuls again (o, gate and up, not down), and two for the gradients of each of the four."""
    model = build("x/1", shape := Model(**SHAPE), LENGTH)
    layer, x = model.layers[0], torch.randn(2, LENGTH, shape.dim, dtype=torch.float64)
    out, weights = torch.randn(2, LENGTH, layer.heads, shape.head_dim, dtype=torch.float64), layer.finish_weights()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, torch.no_grad():
        model.segments[0].streaming._finish_backward(x, out, weights, torch.randn_like(x))
    assert sum(event.count for event in profiler.key_averages() if event.key in ("aten::mm", "aten::addmm")) == 3 + 2 * 4


# ---- bf16


def relative_errors(model_gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((model_gradients[name].double() - x).norm() / x.norm()) for name, x in exact.items()}


def bf16_ratios(plan: str) -> list[float]:
    """Error of each weight's gradient against fp64, over that of the plain step in bf16: root mean square of three batches."""
    shape = Model(**(SHAPE | dict(layers=2, dim=64, mlp_dim=96)))
    squares: dict[str, list[float]] = {}
    for seed in (2, 4, 6):
        batch = inputs(shape, seed, batch=1, length=512)
        models = [build(text, shape, 512, 1, dtype) for text, dtype in (("none", torch.bfloat16), (plan, torch.bfloat16))]
        reference = build("none", shape, 512)
        with torch.no_grad():
            for weight, rounded in zip(reference.parameters(), models[0].parameters(), strict=True):
                weight.copy_(rounded)
        exact = gradients(reference, *batch)[1]
        plain, found = (relative_errors(gradients(model, *batch)[1], exact) for model in models)
        for name in exact:
            total = squares.setdefault(name, [0.0, 0.0])
            total[0] += plain[name] ** 2
            total[1] += found[name] ** 2
    return [(found / plain) ** 0.5 for plain, found in squares.values()]


@pytest.mark.parametrize("plan", ["x/1 outs=2 heads=1 rows=16", "x/2 heads=1 rows=64", "x/1 outs=2"])
def test_rounding_in_bf16_is_that_of_the_plain_step(plan: str) -> None:
    ratios = torch.tensor(bf16_ratios(plan))
    assert ratios.max() <= 1.15 and ratios.log().mean().exp() <= 1.05, ratios


def test_sums_in_bf16_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight gradients of 32 chunks, summed in bf16."""

    class SumsOfTiles(GradientSums):
        def add(self, weights: Any, grads: Any) -> None:
            for weight, grad in zip(weights, grads, strict=True):
                if weight is not None:
                    _, total = self._sums.get(id(weight), (weight, torch.zeros_like(weight)))
                    self._sums[id(weight)] = weight, total + grad

    monkeypatch.setattr(streamed, "GradientSums", SumsOfTiles)
    ratios = torch.tensor(bf16_ratios("x/1 outs=2 heads=1 rows=16"))
    assert ratios.max() > 1.15 and ratios.log().mean().exp() > 1.05


def test_sum_of_256_chunks_is_as_exact_as_one_matmul() -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(256 * 16, 32, generator=generator).bfloat16() for _ in range(2))
    exact = dy.double().T @ x.double()
    weight, sums = torch.zeros(32, 32, dtype=torch.bfloat16), GradientSums()
    in_bf16 = torch.zeros_like(weight)
    for a, b in zip(x.split(16), dy.split(16), strict=True):
        sums.add((weight,), (b.T @ a,))
        in_bf16 += b.T @ a
    one, chunks, rounded = ((y.double() - exact).norm() for y in (dy.T @ x, sums.rounded()[id(weight)], in_bf16))
    assert chunks <= 1.5 * one and rounded > 4 * one  # 1.4: chunks are rounded before they are added


# ---- peak bytes


def peak_bytes(function: Any) -> int:
    """Return the peak of the bytes that torch allocates during a call."""
    gc.collect()  # else older tensors may be freed during the call
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=False) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))


def measured_and_planned(plan: str, length: int) -> tuple[int, int, Footprint]:
    """Peak bytes of a forward and of a step, without attention's own memory, and the plan."""
    size = ["model=tiny", "model.dim=64", "model.heads=4", "model.kv_heads=2", "model.head_dim=32", "model.mlp_dim=96"]
    overrides = [*size, "model.layers=2", f"data.length={length}", "data.batch=1", "data.micro_batch=1", "engine.zero=0"]
    config = tokenizer.resolve_config(compose.load([*overrides, "parallel.device=cpu"], world_size=1).config)
    model = build(plan, config.model, length, 1, torch.float32)
    values: list[Tensor] = []
    batches: list[Any] = []

    def forward() -> None:
        tokens, positions = torch.zeros(1, length, dtype=torch.int64), torch.arange(length)[None]
        batches[:] = [tokens, tokens.clone(), positions, torch.empty(length, dtype=torch.int64)]  # four are planned
        values.append(model(*batches[:3])[0])

    forward_bytes = peak_bytes(forward)
    values.pop().backward()
    model.zero_grad(set_to_none=True)
    batches.clear()
    step_bytes = peak_bytes(lambda: (forward(), values.pop().backward()))
    return forward_bytes, step_bytes, footprint(config, 1, False, parse(plan, config.model))


@pytest.mark.parametrize(
    "plan",
    [
        "x/1 outs=2 heads=1 rows=64",
        "x/2 outs=2 heads=1 rows=64",
        "x/1 heads=1 rows=64",
        "x/2 heads=1 rows=64",
        "x/1@2 outs=2@2 heads=1 rows=64",
        "x/1@2 outs=2@2 late heads=1 rows=64",
        "x/2 outs=1 heads=1 rows=64",
    ],
    ids=["A", "B", "C", "D", "all on the host", "fetched late", "a mixture"],
)
def test_peak_grows_with_length_as_planned(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1 %, in the forward and over the whole step."""

    def block_forward(*args: Any, into: tuple[Tensor, Tensor], **options: Any) -> None:
        for x in into:
            x.zero_()

    monkeypatch.setattr(buffered_attention, "block_forward", block_forward)
    monkeypatch.setattr(buffered_attention, "block_backward", lambda *args, **options: None)
    for module in (loss, memory):
        monkeypatch.setattr(module, "CPU_CHUNK", 2**15)  # else the logits grow with the length as well
    short, long = (measured_and_planned(plan, length) for length in (1024, 2048))
    for index, moments in enumerate([(FORWARD, LOSS), (FORWARD, LOSS, BACKWARD_START, BACKWARD_END)]):
        moment = max(moments, key=long[2].at)
        assert long[2].at(moment) - short[2].at(moment) == pytest.approx(long[index] - short[index], rel=0.01), moment
