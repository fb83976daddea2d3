"""Context attention as two calls that write into the caller's buffers, for a layer that manages its own memory.

    forward_into(q, k, v, out, lse, mask=…)                        out and lse of some heads
    backward_into(dout, q, k, v, lse, delta, dq, dk, dv, mask=…)   gradients; from output_delta(dout, out) instead of out

Neither records anything for autograd. Arguments and communication are those of `context_attention`, which a call of the object
itself is. A layer may call them for a group of KV heads at a time: `head_start` is the group's first query head.
"""

from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.attention import sink_carry
from ringspan.kernels.blocks import block_backward, block_forward
from ringspan.kernels.mask import Mask
from ringspan.kernels.tensors import on_device
from ringspan.kernels.validate import AttentionOptions
from ringspan.parallel.context_attention import context_attention
from ringspan.parallel.coordination.process_groups import check_group_exists
from ringspan.parallel.layout import Layout
from ringspan.parallel.mesh import Mesh
from ringspan.parallel.ring_attention import RingCall, operator_arguments
from ringspan.parallel.ulysses import repeats_of_heads, to_heads, to_tokens


class BufferedAttention:
    """Attention of one layout and mesh.

    Args:
        layout: Layout of the sequence; None on one rank.
        mesh: Mesh of the job; None on one rank.
        backend: As for `context_attention`.
        deterministic: As for `context_attention`.
        transport: As for `context_attention`.
    """

    def __init__(
        self,
        layout: Layout | None = None,
        mesh: Mesh | None = None,
        backend: str = "auto",
        deterministic: bool = False,
        transport: str = "auto",
    ) -> None:
        self.layout, self.mesh, self.transport = layout, mesh, transport
        self.backend, self.deterministic = backend, deterministic
        self.ranks = 1 if mesh is None else mesh.context_size
        self.ulysses = 1 if mesh is None else mesh.ulysses

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, **options: Any) -> Any:
        """Compute `context_attention`, differentiable."""
        where: dict[str, Any] = dict(layout=self.layout, mesh=self.mesh, transport=self.transport)
        return context_attention(q, k, v, mask, **where, backend=self.backend, deterministic=self.deterministic, **options)

    def forward_into(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        mask: Mask,
        head_start: int = 0,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> None:
        """Compute out and lse.

        Args:
            q: (B, n, H, D), this rank's shard of some query heads.
            k: (B, n, Hkv, D), their KV heads.
            v: (B, n, Hkv, Dv).
            out: (B, n, H, Dv), written.
            lse: (B, H, n) in the accumulation dtype, written; sinks included.
            mask: Mask of the whole sequence.
            head_start: Index of q's first head among all heads.
            sinks: (H,), of these heads.
            options: scale, softcap, dropout and seed of `attention`.
        """
        if self.ranks == 1:
            carry = None if sinks is None else sink_carry(sinks, q)
            at: dict[str, Any] = dict(carry=carry, head_start=head_start, into=(out, lse))
            block_forward(q, k, v, mask, **at, backend=self.backend, deterministic=self.deterministic, **options)
            return
        if self.ulysses == 1:
            args = self._operator_arguments(q, k, v, mask, head_start, sinks, options)
            self._ring_forward(args, (out, lse))
            return
        q, k, v, head_start, sinks = self._exchange_inputs(q, k, v, head_start, sinks)
        args = self._operator_arguments(q, k, v, mask, head_start, sinks, options)
        outputs = self._ring_forward(args, None)
        out.copy_(self._to_tokens(outputs[0]))
        lse.copy_(self._to_tokens(outputs[1].transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2))

    def backward_into(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        *,
        mask: Mask,
        head_start: int = 0,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> None:
        """Compute dq, dk and dv. The gradient of sinks is `sink_gradient(sinks, lse, delta)`.

        Args:
            dout: (B, n, H, Dv), gradient of out.
            q, k, v, mask, head_start, sinks, options: As for `forward_into`.
            lse: (B, H, n), from `forward_into`.
            delta: (B, H, n), rowsum(dout · out).
            dq: (B, n, H, D), written; may be the memory of dout.
            dk: (B, n, Hkv, D), written.
            dv: (B, n, Hkv, Dv), written.
        """
        if self.ranks == 1:
            new_dq = torch.empty_like(q, memory_format=torch.contiguous_format)
            own: dict[str, Any] = dict(backend=self.backend, deterministic=self.deterministic, accumulate=False)
            block_backward(dout, q, k, v, lse, delta, mask, None, None, new_dq, dk, dv, head_start, **own, **options)
            dq.copy_(new_dq)
            return
        if self.ulysses == 1:
            args = self._operator_arguments(q, k, v, mask, head_start, sinks, options)
            for target, value in zip((dq, dk, dv), self._ring_backward(args, dout, lse, delta), strict=True):
                target.copy_(value)
            return
        dout = to_heads(dout, *self._exchange)
        by_token = [x.transpose(1, 2).unsqueeze(-1) for x in (lse, delta)]
        lse, delta = (to_heads(x, *self._exchange).squeeze(-1).transpose(1, 2).contiguous() for x in by_token)
        repeats = repeats_of_heads(k.shape[2], self.ulysses)
        q, k, v, head_start, sinks = self._exchange_inputs(q, k, v, head_start, sinks)
        args = self._operator_arguments(q, k, v, mask, head_start, sinks, options)
        new_dq, new_dk, new_dv = self._ring_backward(args, dout, lse, delta)
        dq.copy_(self._to_tokens(new_dq))
        for target, value in ((dk, new_dk), (dv, new_dv)):
            value = self._to_tokens(value)
            target.copy_(value if repeats == 1 else value.unflatten(2, (-1, repeats)).sum(3))

    @property
    def _exchange(self) -> tuple[int, str, str]:
        assert self.mesh is not None and self.mesh.ulysses_group is not None and self.mesh.context_group is not None
        check_group_exists(self.mesh.context_group, "mesh's context group")
        return self.ulysses, self.mesh.ulysses_group.group_name, self.mesh.context_group.group_name

    def _to_tokens(self, x: Tensor) -> Tensor:
        return to_tokens(x.contiguous(), *self._exchange)

    def _exchange_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, head_start: int, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, int, Tensor | None]:
        """q, k, v, head_start and sinks of this Ulysses rank's heads, for all tokens of its group."""
        assert self.mesh is not None
        num_heads = q.shape[2] // self.ulysses
        first = num_heads * self.mesh.ulysses_rank
        sinks = None if sinks is None else sinks[first : first + num_heads]
        q, k, v = (to_heads(x, *self._exchange) for x in (q, k, v))
        return q, k, v, head_start + first, sinks

    def _operator_arguments(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, head_start: int, sinks: Tensor | None, options: dict[str, Any]
    ) -> tuple[Any, ...]:
        assert self.layout is not None and self.mesh is not None
        attention_options = AttentionOptions(sinks=sinks, deterministic=self.deterministic, backend=self.backend, **options)
        groups: dict[str, Any] = dict(group=self.mesh.ring_group, sequence_group=self.mesh.context_group)
        ring: dict[str, Any] = dict(layout=self.layout.ring, transport=self.transport, head_start=head_start)
        return operator_arguments(q, k, v, mask, attention_options, has_backward=True, **ring, **groups)

    @staticmethod
    def _ring_forward(args: tuple[Any, ...], outputs: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        q, k, v, *others = args
        with on_device(q.device), RingCall("ring forward", q, k, v, *others) as call:
            return call.forward(q, k, v, outputs)

    @staticmethod
    def _ring_backward(args: tuple[Any, ...], dout: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *others = args
        with on_device(q.device), RingCall("ring backward", q, k, v, *others) as call:
            return call.backward(dout, delta, q, k, v, lse)
