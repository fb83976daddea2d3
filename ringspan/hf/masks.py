"""The mask function that transformers calls for attn_implementation="ringspan": it returns rules, never a matrix.

transformers describes a mask by nested functions, `and_masks(sliding_window_overlay(4096), causal_mask_function)`. `read_rules`
reads them back: it knows each function by its code object and takes the arguments from its closure. A function that it does not
know raises, so no mask is computed without a rule that the model asked for. `check_interface` compares the result with
transformers' own matrix on a few tokens.

    masking_utils.create_…_mask → layer_mask → LayerMask → attention layers, as their `attention_mask`
"""

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspan.hf.context import RingContext, active_context
from ringspan.hf.documents import check_no_holes, documents_from_cu_seqlens, documents_from_positions, join_documents
from ringspan.kernels.mask import Mask
from ringspan.kernels.segments import POSITION_LIMIT

USE_OTHER = "use attn_implementation='eager' or 'sdpa' for this model"


class MaskRules(NamedTuple):
    """The rules of one mask: bounds on the distance from query to key, and document ids of packed sequences."""

    causal: bool = False
    left: int = POSITION_LIMIT
    right: int = POSITION_LIMIT
    documents: Tensor | None = None  # (B, S)

    def joined(self, other: "MaskRules") -> "MaskRules":
        """Return the rules that hold where both hold."""
        documents = join_documents(self.documents, other.documents)
        return MaskRules(self.causal or other.causal, min(self.left, other.left), min(self.right, other.right), documents)

    @property
    def window(self) -> tuple[int, int] | None:
        """(left, right) as `Mask` takes it; None without a window."""
        return None if self.left == self.right == POSITION_LIMIT else (self.left, self.right)


class NotATensor(AttributeError, ValueError):
    """A model computes with its mask as if it were a matrix."""


class LayerMask:
    """The mask of one forward for all layers of one type. Layers receive it as their `attention_mask`.

    Attributes:
        rules: Rules that transformers asked for.
        q_length, kv_length: Numbers of queries and keys.
        padded: Whether the model received an attention_mask.
        context: The ring context in which the model runs; None on one GPU. The mask keeps it, because activation
            checkpointing recomputes layers after the `with` statement has ended.
        mask: The mask of one GPU; None under a ring, where documents come from the sharded batch.
        packed_by: The cu_seqlens that `mask` has; all layers of a forward receive the same ones.
        is_read: Whether `mask` has the documents of packed sequences. The first layer reads them: some models do not pass
            positions to the mask function, and none does with a cache.
    """

    def __init__(
        self, rules: MaskRules, q_length: int, kv_length: int, attention_mask: Tensor | None, context: RingContext | None
    ) -> None:
        self.rules, self.q_length, self.kv_length, self.context = rules, q_length, kv_length, context
        self.padded = attention_mask is not None
        self.is_read = self.padded or not rules.causal or q_length != kv_length
        self.packed_by: Tensor | None = None
        self.mask: Mask | None = None
        if context is None:
            documents, key_documents = _documents(rules, attention_mask, q_length, kv_length)
            self.mask = _make_mask(rules, documents, key_documents)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for optional methods
            raise AttributeError(name)
        raise NotATensor(
            f"attention_mask.{name}: the model computes with its mask as a matrix, which is never made; {USE_OTHER}"
        )

    def __add__(self, other: Any) -> Any:
        return self.__getattr__("add")

    __radd__ = __mul__ = __rmul__ = __getitem__ = __add__

    @torch.compiler.disable
    def read_documents(self, position_ids: Tensor | None, cu_seqlens: Tensor | None) -> None:
        """Add the documents of packed sequences to the mask: position_ids (B, S) restart, or cu_seqlens (N + 1,) end them.

        Raises:
            ValueError: cu_seqlens do not fit the sequence, or positions do not restart with each document.
        """
        documents = self.rules.documents
        if cu_seqlens is not None:
            if self.is_read:
                raise ValueError("cu_seq_lens_q with an attention_mask or a cache: pass one of them")
            documents = join_documents(documents, documents_from_cu_seqlens(cu_seqlens, self.q_length, position_ids))
        elif documents is None and position_ids is not None and position_ids.ndim == 2:
            documents = documents_from_positions(position_ids)
        self.is_read, self.packed_by = True, cu_seqlens
        if documents is not self.rules.documents:
            self.mask = _make_mask(self.rules, documents, None)


def _make_mask(rules: MaskRules, documents: Tensor | None, key_documents: Tensor | None) -> Mask:
    # Values that the host knows cost the kernels less than those that they must assume to be padding.
    documents = None if documents is None else documents.cpu()
    if key_documents is None:
        return Mask(rules.causal, rules.window, documents)
    return Mask(rules.causal, rules.window, documents, key_documents=key_documents.cpu())


def _documents(
    rules: MaskRules, attention_mask: Tensor | None, q_length: int, kv_length: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return ids of the queries and, if there are more keys than queries, ids of the keys. Negative ids are padding."""
    if attention_mask is None or check_no_holes(attention_mask):
        return rules.documents, None
    keys = torch.where(attention_mask, 0, -1) if rules.documents is None else rules.documents.where(attention_mask, -1)
    if q_length == kv_length:
        return keys, None
    # Queries of a cached step align with the last keys. Cross-attention has queries without padding.
    return keys[:, -q_length:] if rules.causal else torch.zeros_like(keys[:, :1]).expand(-1, q_length), keys


@torch.compiler.disable
def layer_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **options: Any,
) -> LayerMask:
    """Return the mask that transformers describes: the entry "ringspan" of its AttentionMaskInterface.

    Raises:
        ValueError: The mask has rules that are no interval of keys, or a cache or padding that cannot be honoured. The
            message names the model and the option.
    """
    model = f"model {getattr(config, 'model_type', type(config).__name__)!r}"
    rules = read_rules(mask_function, model)
    if not isinstance(q_offset, int) or (rules.causal and q_offset + q_length != kv_offset + kv_length):
        raise ValueError(f"cache of {model}: a static or unfilled cache is not supported; DynamicCache works, the default")
    context = active_context()
    if context is not None and (q_offset or kv_length != q_length):
        raise ValueError(
            f"cache of {model} under a ring: {kv_length} keys for {q_length} queries; run without a filled cache, or outside "
            "context_parallel"
        )
    if attention_mask is not None:
        if attention_mask.shape[-1] < kv_offset + kv_length:
            raise ValueError(
                f"attention_mask of {model} has {attention_mask.shape[-1]} entries for {kv_offset + kv_length} keys: pass one "
                "for each key"
            )
        attention_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    try:
        return LayerMask(rules, q_length, kv_length, attention_mask, context)
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from None


def read_rules(function: Callable[..., Any] | None, model: str) -> MaskRules:
    """Return the rules of a mask function of transformers.

    Args:
        function: The function that transformers passes to a mask interface.
        model: Name for error messages.

    Raises:
        ValueError: Part of the function is no interval rule, or unknown.
    """
    code = getattr(function, "__code__", None)
    if code not in _READERS:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(f"and_mask_function={name} of {model}: its rule is unknown, so it cannot be honoured; {USE_OTHER}")
    names = getattr(function, "__closure__", None) or ()
    values = dict(zip(getattr(code, "co_freevars", ()), (cell.cell_contents for cell in names), strict=True))
    return _READERS[code](values, model)


def _refuse(option: str) -> Callable[[dict[str, Any], str], MaskRules]:
    def refuse(values: dict[str, Any], model: str) -> MaskRules:
        raise ValueError(f"{option} of {model}: visible keys are no interval; {USE_OTHER}")

    return refuse


def _read_and(values: dict[str, Any], model: str) -> MaskRules:
    rules = MaskRules()
    for function in values["mask_functions"]:
        rules = rules.joined(read_rules(function, model))
    return rules


def _read_or(values: dict[str, Any], model: str) -> MaskRules:
    codes = [getattr(function, "__code__", None) for function in values["mask_functions"]]
    image = any(code in _IMAGE_CODES for code in codes)
    return _refuse("block_sequence_ids (an image-token mask)" if image else "or_mask_function")(values, model)


_READERS: dict[CodeType | None, Callable[[dict[str, Any], str], MaskRules]] = {}
_IMAGE_CODES: set[CodeType] = set()


def learn_mask_functions(masking_utils: Any) -> None:
    """Learn the mask functions of the installed transformers: their code objects and closures.

    Raises:
        ValueError: A function is missing, or its closure has other variables.
    """
    m, none = masking_utils, torch.zeros(1, dtype=torch.int64)
    expected: list[tuple[str, Callable[[], Any], tuple[str, ...], Callable[[dict[str, Any], str], MaskRules]]] = [
        ("causal_mask_function", lambda: m.causal_mask_function, (), lambda v, _: MaskRules(causal=True)),
        ("bidirectional_mask_function", lambda: m.bidirectional_mask_function, (), lambda v, _: MaskRules()),
        (
            "sliding_window_overlay",
            lambda: m.sliding_window_overlay(1),
            ("sliding_window",),
            lambda v, _: MaskRules(left=v["sliding_window"] - 1),
        ),
        (
            "sliding_window_bidirectional_overlay",
            lambda: m.sliding_window_bidirectional_overlay(1),
            ("sliding_window",),
            lambda v, _: MaskRules(left=v["sliding_window"], right=v["sliding_window"]),
        ),
        ("and_masks", lambda: m.and_masks(m.causal_mask_function), ("mask_functions",), _read_and),
        ("or_masks", lambda: m.or_masks(m.causal_mask_function), ("mask_functions",), _read_or),
        (
            "remap_positions_for_packed_sequence",
            lambda: m.remap_positions_for_packed_sequence(m.causal_mask_function, none),
            ("mask_function", "position_ids"),
            lambda v, model: read_rules(v["mask_function"], model),  # positions grow by one within a document, as rows do
        ),
        (
            "packed_sequence_mask_function",
            lambda: m.packed_sequence_mask_function(none),
            ("packed_sequence_mask",),
            lambda v, _: MaskRules(documents=v["packed_sequence_mask"]),
        ),
        (
            "chunked_overlay",
            lambda: m.chunked_overlay(1, none),
            ("chunk_size", "left_padding"),
            _refuse("chunked attention (attention_chunk_size)"),
        ),
        (
            "blockwise_overlay",
            lambda: m.blockwise_overlay(none),
            ("block_sequence_ids",),
            _refuse("block_sequence_ids (an image-token mask)"),
        ),
    ]
    for name, sample, variables, reader in expected:
        try:
            code = sample().__code__
        except (AttributeError, TypeError) as error:
            raise ValueError(f"masking_utils.{name}: {error}") from None
        if set(code.co_freevars) != set(variables):
            raise ValueError(f"masking_utils.{name} has the variables {code.co_freevars}, not {variables}")
        _READERS[code] = reader
        if name == "blockwise_overlay":
            _IMAGE_CODES.add(code)


def check_interface(masking_utils: Any, implementation: str) -> None:
    """Compare our masks with transformers' own matrices: causal, windows, packed, padded, each on a few tokens.

    Args:
        masking_utils: The module of transformers.
        implementation: Name under which `layer_mask` is registered.

    Raises:
        ValueError: A mask differs.
    """
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]])
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    for name, window, packed, padded in _interface_cases():
        config = SimpleNamespace(sliding_window=window, is_causal="bidirectional" not in name, model_type="check")
        known: dict[str, Any] = dict(config=config, inputs_embeds=torch.zeros(2, 7, 1), cache=None, past_key_values=None)
        known |= dict(attention_mask=padding if padded else None, position_ids=positions if packed else None)
        accepted = inspect.signature(getattr(masking_utils, name)).parameters  # they differ between versions
        arguments = {key: value for key, value in known.items() if key in accepted}
        masks = []
        for attention in ("eager", implementation):
            config._attn_implementation = attention
            masks.append(getattr(masking_utils, name)(**arguments))
        expected, actual = masks
        if not isinstance(actual, LayerMask) or actual.mask is None:
            raise ValueError(f"masking_utils.{name} returned {type(actual).__name__} instead of our mask")
        rows = torch.arange(7)
        visible = actual.mask.visible(rows, rows).expand(2, 7, 7)
        same = visible == (torch.ones_like(visible) if expected is None else expected[:, 0] == 0)
        if not bool((same | (padding[:, :, None] == 0) if padded else same).all()):
            raise ValueError(f"masking_utils.{name} with window={window}, packed={packed}, padded={padded} differs from ours")


def _interface_cases() -> Iterator[tuple[str, int | None, bool, bool]]:
    for packed, padded in ((False, False), (True, False), (False, True)):
        yield "create_causal_mask", None, packed, padded
        yield "create_sliding_window_causal_mask", 3, packed, padded
    yield "create_bidirectional_mask", None, False, False
    yield "create_bidirectional_mask", None, False, True
    yield "create_bidirectional_sliding_window_mask", 2, False, False
