"""Attention as dense matrices with torch's own autograd, the truth for tests, and the error rule.

No line is shared with the kernels. The mask is built pair by pair from the definition of each rule, not from intervals.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ringspan import Mask
from ringspan.kernels.document_tables import query_origin

INF = float("inf")


@dataclass(frozen=True)
class Case:
    """One configuration. Its tensors are new random views into NaN-filled memory."""

    name: str
    rows: int = 70
    keys: int | None = None  # None: as many as rows
    heads: tuple[int, int] = (2, 2)
    width: int = 32
    v_width: int | None = None
    batch: int = 1
    causal: bool = False
    window: int | tuple[int, int] | None = None
    documents: tuple = ()
    key_documents: tuple = ()
    prefix: int | tuple | None = None
    softcap: float = 0.0
    sinks: bool = False
    dropout: float = 0.0
    scale: float | None = None
    layout: str = "bshd"
    seed: int = 2**40 + 12345

    def __str__(self) -> str:
        return self.name

    def grown(self, factor: int) -> "Case":
        """Return the case with all lengths and positions multiplied by `factor`."""

        def grow(x):
            return tuple(grow(y) for y in x) if isinstance(x, tuple) else x if x is None else x * factor

        def repeat(ids):
            if ids and isinstance(ids[0], tuple):
                return tuple(repeat(row) for row in ids)
            return tuple(i for i in ids for _ in range(factor))

        lengths = {name: grow(getattr(self, name)) for name in ("rows", "keys", "window", "prefix")}
        return replace(self, **lengths, documents=repeat(self.documents), key_documents=repeat(self.key_documents))

    def mask(self, device: str = "cpu") -> Mask:
        documents = torch.tensor(self.documents, device=device) if self.documents else None
        prefix = torch.tensor(self.prefix, device=device) if isinstance(self.prefix, tuple) else self.prefix
        key_documents = torch.tensor(self.key_documents, device=device) if self.key_documents else None
        return Mask(self.causal, self.window, documents, prefix, key_documents)

    def q_positions(self, device: str = "cpu") -> Tensor:
        """Return the positions of the queries; those of the keys begin with 0."""
        keys = self.rows if self.keys is None else self.keys
        first = query_origin(keys) if self.key_documents else keys - self.rows
        return torch.arange(self.rows, device=device) + first

    def tensors(self, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        keys = self.rows if self.keys is None else self.keys
        sizes = {
            "q": (self.rows, self.heads[0], self.width),
            "k": (keys, self.heads[1], self.width),
            "v": (keys, self.heads[1], self.v_width or self.width),
            "dout": (self.rows, self.heads[0], self.v_width or self.width),
        }
        tensors = {name: self._inside_nan(*size, dtype, device) for name, size in sizes.items()}
        tensors["dlse"] = torch.randn(self.batch, self.heads[0], self.rows, device=device, dtype=torch.float32)
        if self.sinks:
            tensors["sinks"] = torch.randn(self.heads[0], device=device, dtype=torch.promote_types(dtype, torch.float32))
        return tensors

    def _inside_nan(self, rows: int, heads: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
        if self.layout == "bhsd":
            memory = torch.full((self.batch, heads, rows + 5, width + 8), float("nan"), dtype=dtype, device=device)
            view = memory[:, :, 2 : 2 + rows, :width].transpose(1, 2)
        elif self.layout == "strided":  # the last dimension too
            memory = torch.full((self.batch, rows + 5, heads, 2 * width), float("nan"), dtype=dtype, device=device)
            view = memory[:, 2 : 2 + rows, :, ::2]
        else:
            memory = torch.full((self.batch, rows + 5, heads, width), float("nan"), dtype=dtype, device=device)
            view = memory[:, 2 : 2 + rows]
        view.copy_(torch.randn(view.shape, device=device))
        return view

    def visible(self, device: str) -> Tensor:
        """Return the mask as bool (B or 1, S, Sk), from the definition of each rule."""
        keys = self.rows if self.keys is None else self.keys
        i = torch.arange(self.rows, device=device)
        p = (i + keys - self.rows)[:, None]
        j = torch.arange(keys, device=device)[None, :]
        visible = torch.ones(1, self.rows, keys, dtype=torch.bool, device=device)
        if self.key_documents:
            q_ids, k_ids = (torch.tensor(ids, device=device) for ids in (self.documents, self.key_documents))
            q_ids, k_ids = q_ids.reshape(-1, self.rows, 1), k_ids.reshape(-1, 1, keys)
            visible = (q_ids == k_ids) & (q_ids >= 0)
            last_query = torch.where(q_ids == q_ids.transpose(1, 2), i, -1).amax(-1, keepdim=True)
            p = i[:, None] - last_query + torch.where(visible, j, -1).amax(-1, keepdim=True)
        if self.causal:
            visible = visible & (j <= p)
        if self.window is not None:
            left, right = (self.window - 1, self.window - 1) if isinstance(self.window, int) else self.window
            visible = visible & (j >= p - left) & (j <= p + right)
        if self.prefix is not None:
            visible = visible | (j < torch.as_tensor(self.prefix, device=device).reshape(-1, 1, 1))
        if self.documents and not self.key_documents:
            ids = torch.tensor(self.documents, device=device)
            ids = ids if ids.ndim == 2 else ids[None]
            number = torch.cat([torch.zeros_like(ids[:, :1]), (ids[:, 1:] != ids[:, :-1]).long()], 1).cumsum(1)
            visible = visible & (number[:, :, None] == number[:, None, :]) & (ids >= 0)[:, :, None] & (ids >= 0)[:, None, :]
        return visible


def dense(case: Case, tensors: dict[str, Tensor], dtype: torch.dtype, keep: Tensor | None = None) -> dict[str, Tensor]:
    """Compute out, lse, dq, dk, dv and dsinks in one dtype; keep is the dropout pattern, bool (B, Hq, S, Sk)."""
    leaves = {
        name: tensors[name].detach().to(dtype).clone().requires_grad_() for name in ("q", "k", "v", "sinks") if name in tensors
    }
    q, k, v = (leaves[name].transpose(1, 2) for name in "qkv")
    group = case.heads[0] // case.heads[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) * (case.width**-0.5 if case.scale is None else case.scale)
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    s = s.masked_fill(~case.visible(str(q.device))[:, None], -INF)
    scores = s
    if "sinks" in leaves:
        column = leaves["sinks"].reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)
        scores = torch.cat([column, s], -1)
    top = scores.amax(-1, keepdim=True).detach() if scores.shape[-1] else scores.new_zeros((*scores.shape[:3], 1))
    top = torch.where(top == -INF, 0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    lse = torch.where(empty, -INF, top + torch.log(torch.where(empty, 1, total)))[..., 0]
    weights = weights[..., scores.shape[-1] - s.shape[-1] :] / torch.where(empty, 1, total)
    if keep is not None:
        weights = weights * keep / (1 - case.dropout)
    out = (weights @ v).transpose(1, 2)
    dlse = torch.where(torch.isinf(lse), 0, tensors["dlse"].to(dtype))
    loss = (out * tensors["dout"].to(dtype)).sum() + (torch.where(torch.isinf(lse), 0, lse) * dlse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach()} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def boundaries(lengths: tuple[int, ...]) -> list[int]:
    """Return cu_seqlens of documents with these lengths."""
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def dense_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    keep: Tensor | None,
    sinks: Tensor | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """out (T, Hq, Dv) and lse (Hq, T), document by document, with autograd."""
    outs, stats = [q[:0, :, :1].expand(-1, -1, v.shape[2])], [q[:0, :, 0].T]  # without documents
    starts = boundaries(lengths), boundaries(key_lengths)
    group = q.shape[1] // k.shape[1]
    for document, (n, m) in enumerate(zip(lengths, key_lengths, strict=True)):
        rows, keys = (slice(start[document], start[document + 1]) for start in starts)
        s = torch.einsum("ihd,jhd->hij", q[rows], k[keys].repeat_interleave(group, 1)) * (scale or q.shape[2] ** -0.5)
        s = softcap * torch.tanh(s / softcap) if softcap else s
        ahead = torch.arange(m, device=q.device)[None, :] - torch.arange(n, device=q.device)[:, None] - (m - n)
        left, right = (window - 1, window - 1) if isinstance(window, int) else window or (n + m, n + m)
        visible = (ahead >= -left) & (ahead <= (0 if causal else right))
        column = s.new_full((q.shape[1], n, 1), -torch.inf) if sinks is None else sinks[:, None, None].expand(-1, n, 1)
        scores = torch.cat([column, s.masked_fill(~visible, -torch.inf)], -1)
        empty = torch.isinf(scores).all(-1, keepdim=True)
        weights = torch.where(empty, 0, torch.softmax(torch.where(empty, 0, scores), -1))[..., 1:]
        if keep is not None:
            weights = weights * keep[:, rows, keys] / (1 - dropout)
        outs.append(torch.einsum("hij,jhd->ihd", weights, v[keys].repeat_interleave(group, 1)))
        stats.append(torch.where(empty, -torch.inf, torch.where(empty, 0, scores).logsumexp(-1, keepdim=True))[..., 0])
    return torch.cat(outs), torch.cat(stats, 1)


def assert_close(results: dict[str, Tensor], truth: dict[str, Tensor], low: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Assert max|x − ref| ≤ 2 max|low − ref| + 2 max|ref + 0.3 − 0.3 − ref| for each x; in bf16, RMS error ≤ 0.5 % of RMS."""
    for name, ref in truth.items():
        value = results[name].double()
        assert value.shape == ref.shape, f"{name}: {tuple(value.shape)} instead of {tuple(ref.shape)}"
        assert not value.isnan().any(), f"{name} has NaN"
        finite = torch.isfinite(ref)
        assert torch.equal(torch.isfinite(value), finite), f"{name} is infinite at other places than the truth"
        if not finite.any():
            continue
        error, ref = (value - ref)[finite], ref[finite]
        if dtype == torch.float64:  # the truth has the same precision, so only the last digits may differ
            assert error.abs().max() <= 1e-12 * max(1, float(ref.abs().max())), f"{name}: error {error.abs().max():.2e}"
            continue
        rounded = ref.to(dtype)
        step = ((rounded + 0.3 - 0.3).double() - rounded.double()).abs().max()
        # Weights recomputed from a stored lse differ in a whole row by half a unit in lse's last place; those of a dense
        # softmax do not. This is negligible compared with 16-bit rounding; in fp32 it is the error.
        largest_lse = float(truth["lse"].nan_to_num(0, 0, 0).abs().amax()) if truth["lse"].numel() else 0
        stored = 2**-22 * (1 + largest_lse) * max(1, float(ref.abs().max()))
        allowed = 2 * (low[name].double()[finite] - ref).abs().nan_to_num(INF).max() + 2 * step + stored
        assert error.abs().max() <= allowed, f"{name}: error {error.abs().max():.2e}, allowed {allowed:.2e}"
        if dtype == torch.bfloat16 and ref.numel() >= 64:
            ratio = error.square().mean().sqrt() / ref.square().mean().sqrt().clamp(min=1e-30)
            assert ratio <= 0.005, f"{name}: RMS error is {ratio:.2%} of the RMS"
