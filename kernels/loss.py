"""Linear layer + cross-entropy without the logits.

With a vocabulary of 128k the fp32 logits of 64k tokens are 32 GiB, more than the rest of a step. Here they never exist:
`linear_cross_entropy` walks over chunks of tokens, and a chunk's logits turn, in their own memory, into its loss and then
into its gradient. With z = logit, or softcap · tanh(logit / softcap), and lse = logsumexp(z), a valid token costs

    lse - (1 - ε) z_label - (ε / V) Σ z + z_loss · lse²            ε: label_smoothing, V: vocabulary

The loss is a sum, so all that the backward can add to its gradients is one scale: dhidden and dweight are finished in the
forward, while the logits are there, and the backward multiplies. Nothing is computed twice. The price: both gradients are
held from the forward on, and a forward outside `torch.no_grad` whose backward never runs has worked in vain.

Logits, softmax, loss and the sum of dweight are in fp32, in fp64 for fp64 inputs. On CUDA 16-bit inputs enter the products
as they are, and so do the logits' gradients, rounded; elsewhere everything is cast up. Memory beyond the results: a chunk of
fp32 logits (two with softcap), on CUDA one in 16 bits, and dweight in fp32. Deterministic; never waits for the device.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.runtime.custom_op import operator
from ringspan.kernels.validate import check_tangents

# Logits per chunk. 2^27 are 512 MiB in fp32: 1024 tokens at V = 128k, so that adding to the fp32 dweight once a chunk stays
# cheap beside the products. CPU caches want less. Fewer than 128 tokens would starve the products, whatever V is.
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
    """Cross-entropy of `hidden @ weight.T` against labels: its sum over labels != ignore_index, and their number.

    Ignored positions give no loss and no gradient, whatever hidden holds there. Autocast applies as it does to F.linear.
    `return_each` adds two tensors of labels' shape, without gradients: each position's loss, and whether its label had the
    largest logit (0 and False where ignored).
    """
    device = hidden.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # meta has none, and asking raises
        low = torch.get_autocast_dtype(device)
        hidden, weight = (x.to(low) if x.dtype in DTYPES[1:] else x for x in (hidden, weight))  # it leaves fp64 alone
    _check(hidden, weight, labels, label_smoothing, z_loss, softcap)
    shape = labels.shape
    hidden, labels = hidden.reshape(labels.numel(), hidden.shape[-1]), labels.reshape(-1).long()
    grad = torch.is_grad_enabled()  # asked here, because inside the op it is always off
    needs = grad and hidden.requires_grad, grad and weight.requires_grad
    options = float(label_smoothing), float(z_loss), float(softcap)
    loss_sum, num_valid, losses, hits, *_ = _op(hidden, weight, labels, ignore_index, *options, *needs)
    return (loss_sum, num_valid, losses.view(shape), hits.view(shape)) if return_each else (loss_sum, num_valid)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, label_smoothing: float, z_loss: float, softcap: float) -> None:
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
    if not 0.0 <= label_smoothing <= 1.0:  # NaN fails too, here and below
        raise ValueError(f"label_smoothing: {label_smoothing}; it must be in [0, 1]")
    for name, value in (("z_loss", z_loss), ("softcap", softcap)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name}: {value}; it must be finite and ≥ 0, where 0 turns it off")


def _outputs(hidden: Tensor, weight: Tensor, labels: Tensor, *options: Any) -> tuple[Tensor, ...]:
    needs_dhidden, needs_dweight = options[-2:]
    accum = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    losses = hidden.new_empty(labels.shape, dtype=accum)  # not len(labels), which would fix the length it compiles for
    hits = labels.new_empty(labels.shape, dtype=torch.bool)
    dhidden = hidden.new_empty(hidden.shape if needs_dhidden else 0)
    dweight = weight.new_empty(weight.shape if needs_dweight else 0)
    return losses.new_empty(()), labels.new_empty(()), losses, hits, dhidden, dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[4:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros as large as weight for outputs that nobody differentiates


def _scale(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise ValueError("linear_cross_entropy has no second derivative: leave out create_graph=True")
    # As a (1, 1) tensor dloss stays fp32 in the product; a scalar would first be rounded to the gradient's 16 bits, and
    # 1 / num_valid = 1e-6 is 1.3 % off in fp16. out= rounds the product in that same kernel: no fp32 copy.
    pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
    grads = [torch.mul(x, dloss.reshape(1, 1), out=torch.empty_like(x)) if need else None for x, need in pairs]
    return *grads, *[None] * 7


def _chunks(
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
    if labels.device.type == "cpu":  # on a GPU this would wait for it: there the gather's device assert stops a bad label
        wrong = labels[(labels < 0) | (labels >= V)]
        if len(wrong):
            raise ValueError(f"labels: holds {wrong[0]}; each must be in [0, {V}) or ignore_index = {ignore_index}")
    accum = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    operand = hidden.dtype if hidden.is_cuda else accum  # only CUDA multiplies 16-bit operands into fp32
    mixed: dict[str, Any] = {} if operand == accum else {"out_dtype": accum}
    w = weight.to(operand)
    losses = hidden.new_empty(len(hidden), dtype=accum)  # one sum at the end: its order does not depend on the chunks
    hits = torch.empty_like(valid)
    dhidden = hidden.new_empty(hidden.shape if needs_dhidden else 0)
    dweight = weight.new_zeros(weight.shape if needs_dweight else 0, dtype=accum)

    step = max(MIN_TOKENS, (CUDA_CHUNK if hidden.is_cuda else CPU_CHUNK) // V // MIN_TOKENS * MIN_TOKENS)
    with torch.autocast(hidden.device.type, enabled=False):  # it would cast our fp32 operands down
        for start in range(0, len(hidden), step):
            rows = slice(start, start + step)
            keep, label = valid[rows, None], labels[rows, None]
            # Zeros first: as 0 · NaN, a NaN in an ignored row would reach all of dweight.
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
            # One kernel, half the time of sub, exp, sum, div. In place is safe: it writes an element after its last read.
            torch.softmax(z, 1, out=z)
            rest = -z.amax(1, keepdim=True).log()  # lse - top: the largest weight is exp(0) / Σ exp(z - top), at least 1 / V
            loss += rest + z_loss * (top + rest).square()
            losses[rows] = torch.where(keep, loss, 0)[:, 0]

            if needs_dhidden or needs_dweight:
                # softmax · (1 + 2 z_loss lse) - ε / V - (1 - ε) onehot
                if z_loss:
                    z.mul_(1 + 2 * z_loss * (top + rest))
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
            z = squares = dlogits = None  # else they would live until the next chunk has made its own
    return losses.sum(), valid.sum(), losses, hits, dhidden, dweight.to(weight.dtype)


_op = operator("linear_cross_entropy", fake=_outputs, save=_save, differentiate=_scale)(_chunks)
