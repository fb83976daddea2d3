"""Linear layer and cross-entropy in one operator, without the logits in memory.

With a vocabulary of 128k, the fp32 logits of 64k tokens are 32 GiB. `linear_cross_entropy` processes chunks of tokens; a
chunk's logits are overwritten in place by its loss and then by its gradient. With z = logit, or softcap · tanh(logit /
softcap), and lse = logsumexp(z), the loss of a valid token is

    lse − (1 − ε) z_label − (ε / V) Σ z + z_loss · lse²            ε: label_smoothing, V: vocabulary

The result is a sum, so the backward only scales: dhidden and dweight are computed in the forward, while a chunk's logits exist.
Nothing is computed twice. Price: both gradients are held from the forward on, and are wasted if no backward follows (outside
`torch.no_grad`). Logits, softmax, loss and dweight's sum are in fp32, or fp64 for fp64 inputs. On CUDA, 16-bit inputs and the
rounded gradients of the logits enter matmuls in 16 bits; elsewhere they are cast to fp32. Memory beyond the results: dweight in
fp32 and a chunk of fp32 logits (two with softcap; on CUDA one in 16 bits too). Deterministic; no host sync.
"""

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.runtime.custom_op import operator
from ringspan.kernels.tensors import accumulation_dtype
from ringspan.kernels.validate import check_number, check_tangents, check_tensor

# Logits per chunk. 2^27 are 512 MiB in fp32, or 1024 tokens at V = 128k: one addition to the fp32 dweight per chunk is then
# cheap compared with the matmuls. CPU caches favour smaller chunks. Matmuls of fewer than 128 tokens are inefficient at any V.
CUDA_CHUNK, CPU_CHUNK, MIN_TOKENS = 2**27, 2**22, 128
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def linear_cross_entropy(
    hidden: Tensor,  # (…, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (…), int64 or int32
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    return_each: bool = False,
) -> tuple[Tensor, ...]:
    """Compute the cross-entropy of logits `hidden @ weight.T` against labels, without storing the logits.

    Autocast applies as it does to F.linear. There is no second derivative and no forward-mode derivative.

    Args:
        hidden: (…, D), in float64, float32, bfloat16 or float16.
        weight: (V, D), in hidden's dtype.
        labels: (…), int64 or int32, each in [0, V) or equal to `ignore_index`. On a GPU a wrong label is a device assert.
        ignore_index: Label of positions without loss and gradient, whatever their hidden holds, NaN included.
        label_smoothing: ε in [0, 1]: the part of the target distribution that is uniform over the vocabulary.
        z_loss: Weight ≥ 0 of the penalty lse² per valid position. 0: off.
        softcap: Bound the logits: z ← softcap · tanh(z / softcap). 0: off.
        return_each: Also return each position's loss and hit.

    Returns:
        loss_sum, a scalar in float32 (float64 for float64 inputs): the sum of losses over valid positions, differentiable
        with respect to hidden and weight. num_valid, a scalar int64: the number of valid positions. With `return_each`
        also losses, (…), and hits, (…) bool: whether the label has the largest logit. Both are without gradients, and 0
        and False at ignored positions.

    Raises:
        ValueError: An argument has a wrong dtype, shape, device or range, or an input has a forward-mode tangent. On the
            CPU also if a label is outside [0, V).

    Example:
        >>> loss_sum, num_valid = linear_cross_entropy(hidden, weight, labels, z_loss=1e-4)
        >>> (loss_sum / num_valid.clamp(min=1)).backward()
    """
    for name, x in (("hidden", hidden), ("weight", weight), ("labels", labels)):
        check_tensor(name, x)
    device = hidden.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # autocast does not know meta and raises
        low = torch.get_autocast_dtype(device)
        hidden, weight = (x.to(low) if x.dtype in DTYPES[1:] else x for x in (hidden, weight))  # autocast keeps fp64
    _check_tensors(hidden, weight, labels)
    _check_options(ignore_index, label_smoothing, dict(z_loss=z_loss, softcap=softcap))
    shape = labels.shape
    hidden, labels = hidden.reshape(labels.numel(), hidden.shape[-1]), labels.reshape(-1).long()
    grad = torch.is_grad_enabled()  # read here, because grad mode is always off inside the op
    needs_grad = grad and hidden.requires_grad, grad and weight.requires_grad
    options = float(label_smoothing), float(z_loss), float(softcap)
    loss_sum, num_valid, losses, hits, *_ = _op(hidden, weight, labels, ignore_index, *options, *needs_grad)
    return (loss_sum, num_valid, losses.view(shape), hits.view(shape)) if return_each else (loss_sum, num_valid)


def _check_tensors(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    if hidden.dtype not in DTYPES or hidden.ndim < 1:
        raise ValueError(f"hidden: {hidden.ndim}-D {hidden.dtype}; it must be (…, D), float64, float32, bfloat16 or float16")
    check_tangents(hidden=hidden, weight=weight)
    if weight.dtype != hidden.dtype:
        raise ValueError(f"weight: dtype {weight.dtype}, but hidden is {hidden.dtype}; cast one, or use torch.autocast")
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels: dtype {labels.dtype}; int64 and int32 work, so cast with labels.long()")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels: shape {tuple(labels.shape)}; for this hidden it must be {tuple(hidden.shape[:-1])}")
    if weight.ndim != 2 or weight.shape[0] < 1 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight: shape {tuple(weight.shape)}; for this hidden it must be (V ≥ 1, {hidden.shape[-1]})")
    for name, x in (("weight", weight), ("labels", labels)):
        if x.device != hidden.device:
            raise ValueError(f"{name}: on {x.device}, but hidden is on {hidden.device}; move one with .to(device)")


def _check_options(ignore_index: int, label_smoothing: float, factors: dict[str, float]) -> None:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (Integral, torch.SymInt)):
        raise ValueError(f"ignore_index: {ignore_index!r}; it must be an int, for instance -100")
    check_number("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:  # NaN fails too, here and below
        raise ValueError(f"label_smoothing: {label_smoothing}; it must be in [0, 1]")
    for name, value in factors.items():
        check_number(name, value)
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name}: {value}; it must be finite and ≥ 0, where 0 turns it off")


def _empty_outputs(hidden: Tensor, weight: Tensor, labels: Tensor, *options: Any) -> tuple[Tensor, ...]:
    needs_dhidden, needs_dweight = options[-2:]
    accum = accumulation_dtype(hidden.dtype)
    losses = hidden.new_empty(labels.shape, dtype=accum)  # not len(labels), which would specialise on the length
    hits = labels.new_empty(labels.shape, dtype=torch.bool)
    dhidden = hidden.new_empty(hidden.shape if needs_dhidden else 0)
    dweight = weight.new_empty(weight.shape if needs_dweight else 0)
    return losses.new_empty(()), labels.new_empty(()), losses, hits, dhidden, dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[4:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros of weight's size for outputs without a gradient


def _scaled_gradients(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise ValueError("linear_cross_entropy has no second derivative: leave out create_graph=True")
    if dloss is None:  # undefined, as gradcheck passes it
        return (None,) * 9
    # A (1, 1) dloss stays fp32 in the multiplication. A scalar would first be rounded to the gradient's 16 bits, and
    # 1 / num_valid = 1e-6 is 1.3 % off in fp16. out= rounds the result in the same kernel, without an fp32 copy.
    pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
    grads = [torch.mul(x, dloss.reshape(1, 1), out=torch.empty_like(x)) if need else None for x, need in pairs]
    return *grads, *[None] * 7


def _over_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    needs_dhidden: bool,
    needs_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    V = weight.shape[0]
    valid = labels != ignore_index
    labels = torch.where(valid, labels, 0)
    if labels.device.type == "cpu":  # on a GPU this needs a host sync; there, gather's device assert catches a bad label
        bad_labels = labels[(labels < 0) | (labels >= V)]
        if len(bad_labels):
            raise ValueError(f"labels: holds {bad_labels[0]}; each must be in [0, {V}) or ignore_index = {ignore_index}")
    accum = accumulation_dtype(hidden.dtype)
    operand = hidden.dtype if hidden.is_cuda else accum  # only CUDA has matmuls of 16-bit operands with fp32 results
    mixed: dict[str, Any] = {} if operand == accum else {"out_dtype": accum}
    w = weight.to(operand)
    losses = hidden.new_empty(len(hidden), dtype=accum)  # summed at the end, in an order independent of chunks
    hits = torch.empty_like(valid)
    dhidden = hidden.new_empty(hidden.shape if needs_dhidden else 0)
    dweight = weight.new_zeros(weight.shape if needs_dweight else 0, dtype=accum)

    step = max(MIN_TOKENS, (CUDA_CHUNK if hidden.is_cuda else CPU_CHUNK) // V // MIN_TOKENS * MIN_TOKENS)
    with torch.autocast(hidden.device.type, enabled=False):  # it would lower the fp32 operands
        for start in range(0, len(hidden), step):
            rows = slice(start, start + step)
            keep, label = valid[rows, None], labels[rows, None]
            # Zero ignored rows first: as 0 · NaN, a NaN there would spread to all of dweight.
            h = hidden[rows].to(operand).masked_fill(~keep, 0)

            z: Any = torch.mm(h, w.T, **mixed)  # (tokens, V); from here on overwritten in place
            if softcap:
                z.div_(softcap).tanh_()
                squares: Any = z.square() if needs_dhidden or needs_dweight else None  # dz / dlogit = 1 - tanh²
                z.mul_(softcap)
            top = z.amax(1, keepdim=True)
            gap = top - z.gather(1, label)
            hits[rows] = (keep & (gap == 0))[:, 0]
            loss = (1 - label_smoothing) * gap
            if label_smoothing:
                loss += label_smoothing * (top - z.mean(1, keepdim=True))
            # One kernel takes half the time of sub, exp, sum, div. In place is safe: it writes an element after its last read.
            torch.softmax(z, 1, out=z)
            # lse - top, because the largest weight is exp(0) / Σ exp(z - top), at least 1 / V
            lse_above_top = -z.amax(1, keepdim=True).log()
            loss += lse_above_top + z_loss * (top + lse_above_top).square()
            losses[rows] = torch.where(keep, loss, 0)[:, 0]

            if needs_dhidden or needs_dweight:
                # softmax · (1 + 2 z_loss lse) - ε / V - (1 - ε) onehot
                if z_loss:
                    z.mul_(1 + 2 * z_loss * (top + lse_above_top))
                if label_smoothing:
                    z.sub_(label_smoothing / V)
                z.scatter_add_(1, label, torch.full_like(top, label_smoothing - 1))
                if softcap:
                    z.addcmul_(z, squares, value=-1)
                dlogits = z.to(operand)
                if needs_dhidden:
                    dhidden[rows] = torch.mm(dlogits, w, **mixed).masked_fill_(~keep, 0)
                if needs_dweight:
                    torch.addmm(dweight, dlogits.T, h, **mixed, out=dweight)  # ignored rows of h are zeros
            z = squares = dlogits = None  # otherwise they stay allocated until the next chunk replaces them
    return losses.sum(), valid.sum(), losses, hits, dhidden, dweight.to(weight.dtype)


_op = operator("linear_cross_entropy", fake=_empty_outputs, save=_save, differentiate=_scaled_gradients)(_over_chunks)
