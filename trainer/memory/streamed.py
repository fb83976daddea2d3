"""Consecutive layers as one autograd function whose memory is a few named tensors.

A layer is two functions of rows around attention (trainer/layer.py):

    q, k, v = project(x)          norm, projections, q/k-norm, rotary; for some KV heads at a time
    y       = finish(x, out)      x + o(out), then + mlp(norm(·))

    forward    for each group of KV heads:  project by rows → attention into out[:, :, group];    then finish by rows
    backward   finish backward by rows:     dy → dh and out → dout, both in place, and delta = rowsum(dout · out)
               for each group:              project by rows again → attention backward: dout → dq in place, dk, dv
               project backward by rows:    dh → dx in place

Rows go through autograd of the two functions, so that every model option needs no formula of its own; the last linear layer of
finish has one, because y is not needed again. Weight gradients of chunks are summed in fp32 and rounded once. The plan
(trainer/memory/plan.py) says what is kept between forward and backward; what is not kept is computed again from the segment's
input.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspan.kernels.attention import sink_gradient
from ringspan.kernels.blocks import output_delta
from ringspan.kernels.mask import Mask
from ringspan.kernels.tensors import accumulation_dtype
from ringspan.trainer.memory.kept import KeptTensors
from ringspan.trainer.memory.plan import MemoryPlan
from ringspan.trainer.monitoring.layer_boundaries import cross_layer_boundary

Weights = tuple[Tensor | None, ...]
SHAPES = 32  # graphs of a row function: chunks and their rest, all or some heads, with and without gradients, evaluation


class RowFunctions(NamedTuple):
    """The functions of rows; compiled or not."""

    project: Callable[..., tuple[Tensor, Tensor, Tensor]]  # (x, cos, sin, *weights) → q, k, v
    finish: Callable[..., Tensor]  # (x, out, *weights) → y
    # finish without its last linear layer, for the backward: (x, out, *weights[:-2]) → hidden, inner
    expand: Callable[..., tuple[Tensor, Tensor]]


class LayerInputs(NamedTuple):
    """What a layer reads besides x and its weights."""

    rotation: tuple[Tensor, Tensor] | None  # cos and sin, (B or 1, n, 1, D / 2)
    mask: Mask
    seeds: Tensor | None  # (B,), of dropout
    number: int  # among all layers


class Streaming:
    """How the layers of a model are streamed.

    Args:
        plan: the plan.
        num_layers: layers of the model.
        attention: with `forward_into` and `backward_into` (parallel/buffered_attention.py).
        functions: the row functions.
        kept: where tensors are kept; on the device by default. May be replaced before the first forward.
    """

    def __init__(
        self, plan: MemoryPlan, num_layers: int, attention: Any, functions: RowFunctions, kept: KeptTensors | None = None
    ) -> None:
        self.plan, self.num_layers, self.attention, self.functions = plan, num_layers, attention, functions
        self.kept = kept or KeptTensors(torch.device("cpu"), {})

    def compile(self, **options: Any) -> None:
        """Compile the row functions with torch.compile: a graph for each shape of a chunk serves all layers."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
        compiled: list[Any] = [torch.compile(function, dynamic=False, **options) for function in self.functions]
        self.functions = RowFunctions(*compiled)

    def run(self, layers: list[Any], inputs: list[LayerInputs], x: Tensor) -> Tensor:
        """Run consecutive layers; with gradients enabled, as one autograd function."""
        weights = [weight for layer in layers for weight in layer.parameters()]
        if not (torch.is_grad_enabled() and (x.requires_grad or any(weight.requires_grad for weight in weights))):
            for layer, each in zip(layers, inputs, strict=True):
                x, _, _ = self._forward(layer, each, x)
            return x
        return StreamedLayers.apply(self, layers, inputs, x, *weights)

    def _rows(self, n: int) -> Iterator[slice]:
        step = self.plan.chunk_rows(n)
        return (slice(begin, min(begin + step, n)) for begin in range(0, n, step))

    def _groups(self, layer: Any) -> Iterator[slice]:
        """KV heads of each group."""
        heads = self.plan.heads or layer.kv_heads
        return (slice(begin, begin + heads) for begin in range(0, layer.kv_heads, heads))

    def _options(self, layer: Any, inputs: LayerInputs, kv: slice) -> dict[str, Any]:
        group = layer.heads // layer.kv_heads
        heads = slice(kv.start * group, kv.stop * group)
        options = layer.attention_options(inputs.seeds)
        if "sinks" in options:
            options["sinks"] = options["sinks"].detach()[heads]
        return options | dict(mask=inputs.mask, head_start=heads.start)

    def _project(self, layer: Any, inputs: LayerInputs, x: Tensor, kv: slice) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of some KV heads, by rows."""
        weights = layer.project_weights(None if kv.stop - kv.start == layer.kv_heads else kv)
        chunks = list(self._rows(x.shape[1]))
        if len(chunks) == 1:
            return self.functions.project(x, *rotation_rows(inputs, chunks[0]), *weights)
        buffers: tuple[Tensor, ...] = ()
        for rows in chunks:
            parts = self.functions.project(rows_of(x, rows), *rotation_rows(inputs, rows), *weights)
            buffers = buffers or tuple(part.new_empty((part.shape[0], x.shape[1], *part.shape[2:])) for part in parts)
            for buffer, part in zip(buffers, parts, strict=True):
                buffer[:, rows] = part
        q, k, v = buffers
        return q, k, v

    @torch.no_grad()
    def _attend(self, layer: Any, inputs: LayerInputs, x: Tensor, again: bool = False) -> tuple[Tensor, Tensor]:
        """out (B, n, H, D) and lse (B, H, n) of a layer; `again` in a backward."""
        out: Tensor | None = None
        group = layer.heads // layer.kv_heads
        for kv in self._groups(layer):
            cross_layer_boundary(x.device, begins_layer=kv.start == 0 and not again)
            q, k, v = self._project(layer, inputs, x, kv)
            if out is None:
                out = q.new_empty((*q.shape[:2], layer.heads, v.shape[3]))
                lse = q.new_empty((q.shape[0], layer.heads, q.shape[1]), dtype=accumulation_dtype(q.dtype))
            heads = slice(kv.start * group, kv.stop * group)
            self.attention.forward_into(q, k, v, out[:, :, heads], lse[:, heads], **self._options(layer, inputs, kv))
            del q, k, v  # before the next group's are made
        assert out is not None
        return out, lse

    @torch.no_grad()
    def _finish(self, layer: Any, x: Tensor, out: Tensor) -> Tensor:
        weights = layer.finish_weights()
        chunks = list(self._rows(x.shape[1]))
        if len(chunks) == 1:
            return self.functions.finish(x, out, *weights)
        y = torch.empty_like(x)
        for rows in chunks:
            y[:, rows] = self.functions.finish(rows_of(x, rows), rows_of(out, rows), *weights)
        return y

    def _forward(self, layer: Any, inputs: LayerInputs, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = self._attend(layer, inputs, x)
        return self._finish(layer, x, out), out, lse

    def _finish_backward(self, x: Tensor, out: Tensor, weights: Weights, dy: Tensor) -> list[Any]:
        """Gradients of x, out and the weights. y, which they do not need, is not computed again."""
        *others, down, bias = weights
        x, out = (t.detach().requires_grad_() for t in (x, out))
        with torch.enable_grad():
            hidden, inner = self.functions.expand(x, out, *others)
        assert down is not None
        by_row = dy.flatten(0, -2)
        d_down = by_row.T @ inner.detach().flatten(0, -2) if down.requires_grad else None
        d_bias = by_row.sum(0) if bias is not None and bias.requires_grad else None
        edges = [torch.autograd.graph.get_gradient_edge(each) for each in (hidden, inner)]
        del hidden, inner  # the graph needs neither
        return [*gradients(edges, [x, out, *others], [dy, dy @ down]), d_down, d_bias]

    def _backward(
        self, layer: Any, inputs: LayerInputs, x: Tensor, out: Tensor, lse: Tensor, dy: Tensor
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """dx, which overwrites dy, and the weights' gradients by id. `out` is overwritten."""
        cross_layer_boundary(x.device)
        sums = GradientSums()
        weights = layer.finish_weights()
        delta = torch.empty_like(lse)
        chunks = list(self._rows(x.shape[1]))
        for rows in chunks:
            dx, dout, *grads = self._finish_backward(rows_of(x, rows), rows_of(out, rows), weights, dy[:, rows])
            dout = dout.contiguous()
            delta[:, :, rows] = output_delta(dout, out[:, rows].contiguous(), backend=self.attention.backend)
            dy[:, rows], out[:, rows] = dx, dout
            sums.add(weights, grads)
            del dx, dout, grads
        options = layer.attention_options(inputs.seeds)
        if "sinks" in options:
            sums.add((options["sinks"],), (sink_gradient(options["sinks"].detach(), lse, delta),))
        weights = layer.project_weights()
        graph: tuple[Tensor, ...] | None = None  # of project, if all rows and heads are one chunk
        if len(chunks) == 1 and self.plan.heads in (0, layer.kv_heads):
            x_rows = x.detach().requires_grad_()
            with torch.enable_grad():
                graph = self.functions.project(x_rows, *rotation_rows(inputs, chunks[0]), *weights)
        dk: Tensor | None = None
        group = layer.heads // layer.kv_heads
        for kv in self._groups(layer):
            cross_layer_boundary(x.device, begins_layer=False)
            heads = slice(kv.start * group, kv.stop * group)
            with torch.no_grad():
                q, k, v = self._project(layer, inputs, x, kv) if graph is None else (t.detach() for t in graph)
            if dk is None:
                dk, dv = (t.new_empty((*t.shape[:2], layer.kv_heads, t.shape[3])) for t in (k, v))
            arguments = out[:, :, heads], q, k, v, lse[:, heads], delta[:, heads], out[:, :, heads], dk[:, :, kv], dv[:, :, kv]
            self.attention.backward_into(*arguments, **self._options(layer, inputs, kv))
            del q, k, v, arguments
        del delta
        assert dk is not None
        for rows in chunks:
            if graph is None:
                x_rows = rows_of(x, rows).detach().requires_grad_()
                with torch.enable_grad():
                    qkv = self.functions.project(x_rows, *rotation_rows(inputs, rows), *weights)
            else:
                qkv, graph = graph, None  # type: ignore[assignment]
            into = [d[:, rows].reshape(each.shape) for d, each in zip((out, dk, dv), qkv, strict=True)]
            dx, *grads = gradients(qkv, [x_rows, *weights], into)
            dy[:, rows] += dx
            sums.add(weights, grads)
            del qkv, dx, grads, x_rows
        return dy, sums.rounded()


class StreamedLayers(torch.autograd.Function):
    """The layers of one segment."""

    @staticmethod
    def forward(
        ctx: Any, streaming: Streaming, layers: list[Any], inputs: list[LayerInputs], x: Tensor, *weights: Tensor
    ) -> Tensor:
        kept, plan, total = streaming.kept, streaming.plan, streaming.num_layers
        ctx.streaming, ctx.layers, ctx.inputs, ctx.weights = streaming, layers, inputs, weights
        device = x.device.type
        x = x.detach()  # a compiled function of rows is compiled again for an input that requires a gradient
        ctx.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        ctx.ran = False
        kept.keep({("x", inputs[0].number): x})
        for layer, each in zip(layers, inputs, strict=True):
            y, out, lse = streaming._forward(layer, each, x)
            if plan.keeps_out(each.number, total):
                kept.keep({("out", each.number): out, ("lse", each.number): lse})
            x = y
            del y, out, lse
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if ctx.ran:
            raise RuntimeError("streamed layers run backward once per forward; engine.memory=none keeps tensors for more")
        ctx.ran = True
        streaming, kept = ctx.streaming, ctx.streaming.kept
        enabled, dtype = ctx.autocast
        numbers = [each.number for each in ctx.inputs]
        with torch.autocast(dy.device.type, dtype, enabled=enabled):
            prefetch(kept, numbers)
            xs, outs = [kept.take(("x", numbers[0]))], []
            for index, (layer, each) in enumerate(zip(ctx.layers, ctx.inputs, strict=True)):
                if ("out", each.number) in kept:
                    outs.append((kept.take(("out", each.number)), kept.take(("lse", each.number))))
                else:
                    outs.append(streaming._attend(layer, each, xs[-1], again=True))
                if index < len(numbers) - 1:
                    xs.append(streaming._finish(layer, xs[-1], outs[-1][0]))
            # written in place: a gradient that others may read, or that has no memory of its own, is copied
            if not dy.is_contiguous() or 0 in dy.stride():
                dy = dy.clone(memory_format=torch.contiguous_format)
            found: dict[int, Tensor] = {}
            for index in reversed(range(len(numbers))):
                if index == 0 and not streaming.plan.late:
                    prefetch(kept, range(numbers[0] - 1, -1, -1)[: streaming.plan.segment])
                out, lse = outs.pop()
                dy, more = streaming._backward(ctx.layers[index], ctx.inputs[index], xs.pop(), out, lse, dy)
                found |= more
        return None, None, None, dy, *(found.get(id(weight)) for weight in ctx.weights)


def prefetch(kept: KeptTensors, layers: Iterable[int]) -> None:
    for layer in layers:
        for kind in ("x", "out", "lse"):
            kept.prefetch((kind, layer))


def rows_of(x: Tensor, rows: slice) -> Tensor:
    """Return x[:, rows]. With a batch of 1 its strides do not depend on n, so that a compiled function serves any n."""
    return x[0, rows].unsqueeze(0) if len(x) == 1 else x[:, rows]


def rotation_rows(inputs: LayerInputs, rows: slice) -> tuple[Tensor | None, Tensor | None]:
    if inputs.rotation is None:
        return None, None
    cos, sin = inputs.rotation
    return rows_of(cos, rows), rows_of(sin, rows)


def gradients(outputs: Any, inputs: list[Tensor | None], grads: list[Tensor]) -> list[Any]:
    """torch.autograd.grad that allows None and frozen tensors among the inputs."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, grads))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


class GradientSums:
    """Weight gradients of chunks, summed in fp32 (fp64 for fp64 weights) and rounded to the weights' dtype once."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, weights: Iterable[Tensor | None], grads: Iterable[Tensor | None]) -> None:
        for weight, grad in zip(weights, grads, strict=True):
            if weight is None or grad is None:
                continue
            known = self._sums.get(id(weight))
            if known is None:
                self._sums[id(weight)] = weight, grad
            elif known[1].dtype == accumulation_dtype(weight.dtype):
                known[1].add_(grad)
            else:
                self._sums[id(weight)] = weight, known[1].to(accumulation_dtype(weight.dtype)).add_(grad)

    def rounded(self) -> dict[int, Tensor]:
        return {key: total.to(weight.dtype) for key, (weight, total) in self._sums.items()}
