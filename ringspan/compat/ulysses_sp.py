"""DeepSpeed's UlyssesSPAttentionHF and UlyssesSPDataLoaderAdapter (ALST) on Ringspan's ring, on its Ulysses, or on both.

    ringspan.compat.ulysses_sp.install(ulysses=1)    before accelerate's prepare(): sp_backend="deepspeed" then runs on the ring
    from ringspan.compat.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter      in a script of your own

sp_size ranks share a sequence: sp_size / ulysses of them form the ring. The adapter pads a sequence to a multiple of
2 · sp_size tokens and cuts input_ids, position_ids and shift_labels in one layout. Packed documents are separate where
position_ids restart, and layers keep their windows, softcap and sinks.
"""

import copy
import inspect
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from ringspan.compat.flash_name import accept_flash_attention_2
from ringspan.hf.attention import layer_attention
from ringspan.hf.batch import IGNORE_INDEX, SHARD_KEY, BatchShard
from ringspan.hf.context import RingContext, context_parallel
from ringspan.hf.documents import check_no_holes, documents_from_positions
from ringspan.hf.masks import LayerMask, layer_mask
from ringspan.hf.register import register
from ringspan.parallel.coordination.json_collectives import all_gather_json
from ringspan.parallel.layout import Layout
from ringspan.parallel.mesh import Mesh

TESTED = "0.19.8"
KEPT_SHARDS = 8  # micro-batches whose backward may be pending
TAKE_ADAPTER = "take the batches of ringspan.compat.ulysses_sp.UlyssesSPDataLoaderAdapter"


class UlyssesSPAttentionHF:
    """Attention of the layers of a transformers model whose sequences several ranks share.

    Attributes:
        ulysses: Ulysses ranks of each sequence; set by `install` or by assignment, before registering.
        layout: Layout of a sequence over its ranks, likewise.
    """

    ulysses, layout = 1, "zigzag"

    def __init__(self, ring: RingContext, seq_length: int | None = None, disable_in_eval: bool = False) -> None:
        self.ring, self.seq_length, self.disable_in_eval = ring, seq_length, disable_in_eval
        self._shards: OrderedDict[Any, tuple[Tensor, BatchShard]] = OrderedDict()

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: LayerMask | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Compute the attention of one layer: q (B, H, n, D) to out (B, n, H, D), and None."""
        if self.disable_in_eval and not module.training:
            return layer_attention(module, query, key, value, attention_mask, **options)
        position_ids = options.get("position_ids")
        if not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
            shape = tuple(position_ids.shape) if isinstance(position_ids, Tensor) else position_ids
            raise ValueError(f"position_ids={shape} of {type(module).__name__}: pass the shard's (B, n); {TAKE_ADAPTER}")
        if isinstance(attention_mask, LayerMask):
            if attention_mask.padded:
                raise ValueError(f"attention_mask of a shard: padding is in position_ids; {TAKE_ADAPTER}")
            attention_mask = copy.copy(attention_mask)
            attention_mask.context = self.ring
        options[SHARD_KEY] = self._shard(position_ids)
        return layer_attention(module, query, key, value, attention_mask, **options)

    def _shard(self, position_ids: Tensor) -> BatchShard:
        """Return the shard that these positions describe. All layers of a forward, and recomputations, have the same ones."""
        key = position_ids.data_ptr(), position_ids._version, position_ids.shape  # a detached tensor has them too
        if key not in self._shards:
            self._shards[key] = position_ids, self._gather(position_ids)
            if len(self._shards) > KEPT_SHARDS:
                self._shards.popitem(last=False)
        return self._shards[key][1]

    def _gather(self, position_ids: Tensor) -> BatchShard:
        mesh = self.ring.mesh
        length = position_ids.shape[1] * mesh.context_size
        if self.seq_length not in (None, length):
            raise ValueError(
                f"seq_length={self.seq_length}, but the ranks have {length} tokens together: pass seq_length_is_variable=True"
            )
        layout = mesh.layout(str(self.ring.layout), length)
        if layout.local_length != position_ids.shape[1]:
            raise ValueError(f"position_ids have {position_ids.shape[1]} tokens, which is no shard of {layout}: {TAKE_ADAPTER}")
        shards = [torch.empty_like(position_ids) for _ in range(mesh.context_size)]
        dist.all_gather(shards, position_ids.contiguous(), group=mesh.context_group)
        whole = layout.unshard(shards, 1).cpu()
        jumps = whole[:, 1:][(whole.diff() != 1) & (whole[:, 1:] != 0)]
        if len(jumps):
            raise ValueError(
                f"position_ids of the whole sequence jump to {int(jumps[0])}, so the shards are not those of "
                f"layout={layout.kind!r}, or a document does not begin with 0: {TAKE_ADAPTER}"
            )
        return BatchShard(layout, mesh, documents_from_positions(whole), position_ids)

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Run `core_attn_implementation` of transformers on the ring, and return DeepSpeed's groups.

        Args:
            model_name_or_path: A model, or its name or path.
            core_attn_implementation: Entry of transformers that is replaced: that of the model, "sdpa" or "flash_attention_2".
                Its own function does not run, so flash_attn need not be installed.
            sequence_parallel_size: Number of ranks that share a sequence; 1 changes nothing.
            micro_batch_size: No effect; batches of any size work.
            seq_length: Length of all sequences, if it is not variable.
            seq_length_is_variable: Allow any length.
            disable_in_eval: Compute attention on one rank in models in evaluation mode.
            max_length: Old name of `seq_length`.

        Returns:
            DeepSpeed's module of process groups, for the argument `mpu` of its engine; None for one rank.

        Raises:
            ValueError: An argument cannot be honoured.
        """
        if sequence_parallel_size == 1:
            return None
        if max_length is not None:
            warnings.warn("max_length is deprecated: use seq_length", DeprecationWarning, stacklevel=2)
            seq_length = max_length if seq_length is None else seq_length
        if not seq_length_is_variable and seq_length is None:
            raise ValueError("seq_length=None with seq_length_is_variable=False: pass the length, or True")
        if sequence_parallel_size % cls.ulysses:
            raise ValueError(f"ulysses={cls.ulysses} does not divide sequence_parallel_size={sequence_parallel_size}")
        register()
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        chosen = getattr(getattr(model_name_or_path, "config", None), "_attn_implementation", None)
        if chosen is not None and chosen != core_attn_implementation:
            raise ValueError(
                f"core_attn_implementation={core_attn_implementation!r}, but the model has attn_implementation={chosen!r}: "
                "pass the same"
            )
        if core_attn_implementation not in ALL_ATTENTION_FUNCTIONS:
            raise ValueError(
                f"core_attn_implementation={core_attn_implementation!r}: its layers call no registered function; 'sdpa' works"
            )
        import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu

        mpu.initialize_sequence_parallel(sequence_parallel_size=sequence_parallel_size)
        size = sequence_parallel_size
        mesh = Mesh(data=dist.get_world_size() // size, ring=size // cls.ulysses, ulysses=cls.ulysses)
        length = None if seq_length_is_variable else seq_length
        ALL_ATTENTION_FUNCTIONS[core_attn_implementation] = cls(context_parallel(mesh, cls.layout), length, disable_in_eval)
        ALL_MASK_ATTENTION_FUNCTIONS[core_attn_implementation] = layer_mask
        return mpu


class UlyssesSPDataLoaderAdapter:
    """Data loader whose batches are this rank's shards: of its own batch, then of those of the other ranks of the sequence.

    A batch needs input_ids (B, S). position_ids (B or 1, S) restart with each packed document; without them a row is one
    document. labels (B, S) become shift_labels. attention_mask (B, S) may have padding at the ends of rows; it becomes a
    document of its own. Other tensors are (B, S, …), and other entries stay.

    Args:
        dl: Data loader of this rank; all ranks have equally many batches.
        sp_rank: Rank in the group.
        sp_group: Process group of the ranks that share a sequence.
        sp_world_size: Number of these ranks.
        device: No effect: batches are on the CPU, as DeepSpeed's are.
    """

    def __init__(self, dl: DataLoader, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size, self.device = dl, sp_rank, sp_group, sp_world_size, device
        self.iter = iter(dl)
        self.micro_batches: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Gather one batch from each rank and keep the shards. At the end of the data the next call begins again."""
        try:
            batch = next(self.iter)
        except StopIteration:
            self.iter = iter(self.dl)
            raise
        self.micro_batches.extend(self._shard(batch) for batch in all_gather_batches(dict(batch), self.sp_group))

    def _shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        ids = batch["input_ids"]
        length = ids.shape[1]
        for name, x in batch.items():
            if isinstance(x, Tensor) and (x.ndim < 2 or x.shape[1] != length):
                raise ValueError(f"{name} has shape {tuple(x.shape)}, input_ids have {tuple(ids.shape)}: pass (B, S, …)")
        positions = batch.get("position_ids")
        positions = torch.arange(length).expand(ids.shape) if positions is None else positions
        batch["position_ids"] = _mark_padding(positions, batch.pop("attention_mask", None))
        if "labels" in batch:
            batch["shift_labels"] = pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORE_INDEX)
        missing = -length % (2 * self.sp_world_size)
        layout = Layout(UlyssesSPAttentionHF.layout, length + missing, self.sp_world_size, UlyssesSPAttentionHF.ulysses)
        for name, x in batch.items():
            if isinstance(x, Tensor):
                fill = x.new_full((x.shape[0], missing, *x.shape[2:]), IGNORE_INDEX if name == "shift_labels" else 0)
                if name == "position_ids":
                    fill = torch.arange(missing, dtype=x.dtype).expand(fill.shape)
                batch[name] = layout.shard(torch.cat([x, fill], 1), 1, self.sp_rank).contiguous()
        return batch


def _mark_padding(positions: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return positions in which padding at the ends of rows counts from 0, so that it is a document of its own."""
    if attention_mask is None or check_no_holes(attention_mask.bool()):
        return positions
    valid = attention_mask.bool()
    positions = positions.expand(valid.shape)
    first = valid.int().argmax(1, keepdim=True)  # of the valid tokens
    if bool((positions.gather(1, first)[first > 0] != 0).any()):
        raise ValueError(
            "attention_mask has padding on the left, and position_ids count it: pad on the right, or begin position_ids with "
            "0 at the first valid token"
        )
    rows = torch.arange(valid.shape[1])
    end = first + valid.sum(1, keepdim=True)
    return torch.where(valid, positions, torch.where(rows < first, rows, rows - end))


def install(ulysses: int = 1, layout: str = "zigzag") -> None:
    """Replace DeepSpeed's classes, so that accelerate's sp_backend="deepspeed" and ALST scripts run on Ringspan.

    Call it before `Accelerator.prepare`, and before modules that import the classes by name.

    Args:
        ulysses: Ulysses ranks of each sequence: 1 is a ring of all its ranks, sp_size is Ulysses alone.
        layout: "zigzag" or "contiguous"; "striped" needs ulysses=1.

    Raises:
        ValueError: An argument is not supported, or DeepSpeed's classes have other parameters than Ringspan knows.

    Example:
        >>> ringspan.compat.ulysses_sp.install(ulysses=2)
    """
    Layout(layout, 0, ulysses, ulysses)  # raises for values that do not work
    import deepspeed
    import deepspeed.runtime.sequence_parallel.ulysses_sp as theirs

    for ours, method in ((UlyssesSPAttentionHF, "register_with_transformers"), (UlyssesSPDataLoaderAdapter, "__init__")):
        name = ours.__name__
        known, found = (_parameters(getattr(place, method, None)) for place in (ours, getattr(theirs, name, None)))
        if known != found:
            raise ValueError(
                f"deepspeed={deepspeed.__version__}: {name}.{method} has the parameters {found}, and Ringspan knows {known} of "
                f"{TESTED}: install deepspeed=={TESTED}"
            )
    accept_flash_attention_2()
    UlyssesSPAttentionHF.ulysses, UlyssesSPAttentionHF.layout = ulysses, layout
    theirs.UlyssesSPAttentionHF, theirs.UlyssesSPDataLoaderAdapter = UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter


def _parameters(function: Any) -> list[str] | None:
    return None if function is None else list(inspect.signature(function).parameters)


def all_gather_batches(batch: dict[str, Any], group: Any) -> list[dict[str, Any]]:
    """Return the batches of all ranks of a group, in rank order, on the CPU. A collective of the group.

    Names, dtypes, shapes and other entries are JSON, tensors are bytes: torch's all_gather_object would unpickle them.
    """
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    tensors = {name: x.detach().cpu().contiguous() for name, x in batch.items() if isinstance(x, Tensor)}
    others = {name: x for name, x in batch.items() if not isinstance(x, Tensor)}
    described = {name: [str(x.dtype).removeprefix("torch."), list(x.shape), x.nbytes] for name, x in tensors.items()}
    try:
        descriptions = all_gather_json([described, others], group, device)
    except TypeError as error:
        raise ValueError(f"the batch has an entry that is no JSON ({error}): pass tensors, numbers, strings or lists") from None
    own = (
        torch.cat([x.reshape(-1).view(torch.uint8) for x in tensors.values()]) if tensors else torch.empty(0, dtype=torch.uint8)
    )
    longest = max(sum(nbytes for _, _, nbytes in each.values()) for each, _ in descriptions)
    gathered = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in descriptions]
    dist.all_gather(gathered, pad(own, (0, longest - len(own))).to(device), group=group)
    batches = []
    for (described, others), data in zip(descriptions, gathered, strict=True):
        parts = data.cpu()[: sum(nbytes for *_, nbytes in described.values())].split([n for *_, n in described.values()])
        values = {
            name: part.clone().view(getattr(torch, dtype)).view(shape)
            for (name, (dtype, shape, _)), part in zip(described.items(), parts, strict=True)
        }
        batches.append(values | others)
    return batches
