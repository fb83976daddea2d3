"""`WholeBatch`: a batch of transformers, its documents, and one rank's shard of it.

attention_mask 0 0 1 1 1        documents −1 −1 0 0 0        padding at the ends of a row
position_ids   0 1 2 0 1        documents  0  0 0 1 1        packing, without attention_mask
labels         a b c d e        shift_labels b c d e −100    shifted while the sequence is whole
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.hf.documents import check_no_holes, documents_from_cu_seqlens, documents_from_positions, join_documents
from ringspan.kernels.mask import Mask
from ringspan.parallel.layout import Layout
from ringspan.parallel.mesh import Mesh

SHARD_KEY = "ringspan_shard"  # the keyword argument that carries the BatchShard to attention
DOCUMENT_KEYS = ("document_ids", "seq_idx")
CONSUMED = (
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k", *DOCUMENT_KEYS,
)  # fmt: skip
PASSED_TENSORS = ("num_items_in_batch",)
IGNORE_INDEX = -100


class BatchShard:
    """What attention needs to know of a sharded batch: layout, documents of the whole sequence, positions of the shard."""

    def __init__(self, layout: Layout, mesh: Mesh, documents: Tensor | None, position_ids: Tensor) -> None:
        self.layout, self.mesh = layout, mesh
        self.documents = None if documents is None else documents.cpu()  # the ring then skips blocks without visible keys
        self.entered: Any = None  # the RingContext of the last forward, for recomputations after its `with`
        self._positions, self._checked = position_ids, position_ids
        self._masks: dict[Any, Mask] = {}
        self._seed: Tensor | None = None

    def mask(self, causal: bool, window: tuple[int, int] | None) -> Mask:
        """Return the mask of the whole sequence. Layers with equal rules share one."""
        key = causal, window
        if key not in self._masks:
            self._masks[key] = Mask(causal, window, self.documents)
        return self._masks[key]

    def seed(self, device: torch.device, layer: int) -> Tensor:
        """Return the dropout seed of a layer, () int64: the same on every rank of the ring, and in a recomputation."""
        if self._seed is None:
            self._seed = torch.randint(2**62, (), device=device)
            if self.mesh.context_size > 1:
                dist.broadcast(self._seed, group=self.mesh.context_group, group_src=0)
        return self._seed + layer * 0x9E3779B97F4A7C1

    def is_checked(self, position_ids: Tensor) -> bool:
        """Whether this tensor has been compared: all layers of a forward receive the same one."""
        return position_ids is self._checked

    def has_positions(self, position_ids: Tensor) -> bool:
        """Whether position_ids (B or 1, n) are those of the shard. Synchronises with a GPU."""
        self._checked = position_ids
        expected = self._positions.to(position_ids.device)
        same_length = position_ids.shape[-1] == expected.shape[-1]
        return same_length and bool((position_ids == expected).all())


class WholeBatch:
    """A batch of whole sequences, validated."""

    def __init__(self, batch: Any) -> None:
        if not isinstance(batch, Mapping):
            raise ValueError(f"batch must be a mapping with input_ids, not {type(batch).__name__}")
        entries = {name: value for name, value in batch.items() if value is not None}
        for name, value in entries.items():
            if name in CONSUMED and not name.startswith("max_length") and not isinstance(value, Tensor):
                raise ValueError(f"{name} must be a tensor, not {type(value).__name__}: a collator of tensors makes it")
        if SHARD_KEY in entries:
            raise ValueError("batch is sharded already: call ring.shard once, with the whole batch")
        tokens = [name for name in ("input_ids", "inputs_embeds") if name in entries]
        if len(tokens) != 1:
            raise ValueError(f"batch has {sorted(entries)}: it needs one of input_ids (B, S) and inputs_embeds (B, S, D)")
        self.name, self.tokens = tokens[0], entries[tokens[0]]
        if self.tokens.ndim != (2 if self.name == "input_ids" else 3):
            raise ValueError(f"{self.name} has shape {tuple(self.tokens.shape)}: (B, S) ids or (B, S, D) embeddings work")
        self.size, self.length = self.tokens.shape[:2]
        self.rest = {name: value for name, value in entries.items() if name not in CONSUMED}
        self._check_rest()
        self._check_shapes(entries)
        self.documents = self._find_documents(entries)
        positions = entries.get("position_ids")
        self.positions = torch.arange(self.length, device=self.tokens.device)[None] if positions is None else positions
        self.shift_labels = self._find_labels(entries)

    def describe(self) -> dict[str, Any]:
        """Return digests of the tensors, for the comparison across ranks."""
        tensors = {self.name: self.tokens, "labels": self.shift_labels, "documents": self.documents}
        return {name: None if x is None else _digest(x) for name, x in (tensors | {"position_ids": self.positions}).items()}

    def shard(self, layout: Layout, mesh: Mesh) -> dict[str, Any]:
        """Return the shard of `mesh.context_rank` as keyword arguments of a model."""

        def cut(x: Tensor, fill: int = 0) -> Tensor:
            return layout.shard(x, 1, mesh.context_rank, fill).contiguous()

        positions = cut(self.positions)
        result = {"use_cache": False, **self.rest, self.name: cut(self.tokens), "position_ids": positions}
        if self.shift_labels is not None:
            result["shift_labels"] = cut(self.shift_labels, IGNORE_INDEX)
        result[SHARD_KEY] = BatchShard(layout, mesh, self.documents, positions)
        return result

    def _check_rest(self) -> None:
        for name, value in self.rest.items():
            if name == "token_type_ids" and isinstance(value, Tensor) and bool(value.any()):
                raise ValueError(
                    "token_type_ids mark image tokens, which need an image-token mask: only text works under a ring"
                )
            if isinstance(value, Tensor) and name not in (*PASSED_TENSORS, "token_type_ids"):
                raise ValueError(
                    f"{name} {tuple(value.shape)} is a tensor that ring.shard does not know: take it out of the batch, and "
                    f"pass it to the model sharded (layout.shard) if it has a sequence dimension; known: {', '.join(CONSUMED)}"
                )
        if self.rest.get("logits_to_keep"):
            raise ValueError(f"logits_to_keep={self.rest['logits_to_keep']}: it counts from a shard's end; leave it out")
        self.rest.pop("token_type_ids", None)

    def _check_shapes(self, entries: dict[str, Any]) -> None:
        whole, row = (self.size, self.length), (1, self.length)
        for name in ("attention_mask", "labels", "shift_labels", "position_ids", *DOCUMENT_KEYS):
            shape = None if name not in entries else tuple(entries[name].shape)
            if shape not in (None, whole) and not (shape == row and name == "position_ids"):
                hint = "; a 4-D mask is a matrix, which is not supported" if name == "attention_mask" else ""
                raise ValueError(f"{name} has shape {shape}, {self.name} has {whole}: pass (B, S){hint}")

    def _find_documents(self, entries: dict[str, Any]) -> Tensor | None:
        """Return document ids (B, S), or None if every row is one document without padding."""
        positions, documents = entries.get("position_ids"), None
        explicit = [entries[name] for name in DOCUMENT_KEYS if name in entries]
        offsets = entries.get("cu_seq_lens_q")
        if offsets is not None:
            other = entries.get("cu_seq_lens_k", offsets)
            if self.size != 1 or not torch.equal(other, offsets):
                raise ValueError(
                    f"cu_seq_lens_q={offsets.tolist()}, cu_seq_lens_k={other.tolist()} with {self.size} rows: packing with "
                    "offsets needs one row, and the same offsets for queries and keys"
                )
            explicit.append(documents_from_cu_seqlens(offsets, self.length, positions))
        for ids in explicit:
            documents = join_documents(documents, ids)
        if explicit and positions is None:
            raise ValueError("position_ids are missing with packing: pass positions that restart with each document")
        restarts = None if positions is None else documents_from_positions(positions)
        padding = entries.get("attention_mask")
        if padding is None:
            return join_documents(documents, None if restarts is None else restarts.expand(self.size, -1))
        if bool(((padding != 0) & (padding != 1)).any()):
            raise ValueError("attention_mask has other values than 0 and 1: pass ids of packed documents as document_ids")
        valid = padding.bool()
        full = check_no_holes(valid)
        if (
            restarts is not None
            and not explicit
            and bool(((restarts[:, 1:] != restarts[:, :-1]) & valid[:, 1:] & valid[:, :-1]).any())
        ):
            raise ValueError(
                "attention_mask together with position_ids that restart: transformers separates documents only without an "
                "attention_mask; leave it out, or pass document_ids"
            )
        if full:
            return documents
        return torch.where(valid, 0 if documents is None else documents, -1)

    def _find_labels(self, entries: dict[str, Any]) -> Tensor | None:
        labels, shifted = entries.get("labels"), entries.get("shift_labels")
        if shifted is not None:
            if labels is not None and not torch.equal(_shift(labels), shifted):
                raise ValueError(
                    "labels and shift_labels disagree: shift_labels must be labels shifted by one; pass one of them"
                )
            return shifted
        if labels is None:
            return None
        if self.name == "input_ids" and self._is_shifted(labels):
            raise ValueError(
                "labels are shifted already, and would be shifted twice: pass them as shift_labels, or pass labels that equal "
                "input_ids"
            )
        return _shift(labels)

    def _is_shifted(self, labels: Tensor) -> bool:
        """Whether each label is the next token, and not each one is the token itself."""
        ids, counts = self.tokens, labels != IGNORE_INDEX
        is_next = (labels[:, :-1] == ids[:, 1:]) | ~counts[:, :-1]
        is_own = (labels == ids) | ~counts
        return bool(is_next.all()) and not bool(is_own.all())


def _shift(labels: Tensor) -> Tensor:
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def _digest(x: Tensor) -> str:
    data = x.detach().to("cpu").contiguous().view(torch.uint8).numpy().tobytes()
    return f"{tuple(x.shape)} {hashlib.sha256(data).hexdigest()[:12]}"
