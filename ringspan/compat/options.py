"""Options of flash_attn's functions in Ringspan's terms."""

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from ringspan.kernels.segments import POSITION_LIMIT

MIN_HEAD_DIM = 16


def as_window(window_size: Any) -> tuple[int, int] | None:
    """Return the window of `Mask` for flash_attn's (left, right), in which a negative number is no bound.

    Raises:
        ValueError: `window_size` is no pair of ints.
    """
    if not isinstance(window_size, tuple | list) or len(window_size) != 2 or not all(type(n) is int for n in window_size):
        raise ValueError(f"window_size={window_size!r}: it must be a pair of ints (left, right); -1 is no bound")
    left, right = (POSITION_LIMIT if n < 0 else n for n in window_size)
    return None if left == right == POSITION_LIMIT else (left, right)


def score_options(
    dropout_p: float,
    softmax_scale: float | None,
    softcap: float,
    alibi_slopes: Any,
    deterministic: Any,
    return_attn_probs: bool,
) -> dict[str, Any]:
    """Return the options of Ringspan's functions.

    Raises:
        ValueError: An option is not supported.
    """
    if alibi_slopes is not None:
        raise ValueError("alibi_slopes: not supported, Ringspan has no bias by distance; alibi_slopes=None works")
    if return_attn_probs and dropout_p:
        raise ValueError(
            f"return_attn_probs=True with dropout_p={dropout_p}: the mask of dropout is never stored; dropout_p=0 works"
        )
    options: dict[str, Any] = dict(dropout=dropout_p, scale=softmax_scale, softcap=softcap)
    return options | dict(deterministic=bool(deterministic), return_lse=bool(return_attn_probs))


def pad_width(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with zeros up to the smallest head dim that Ringspan has; flash_attn takes 8 too. Sets the scale.

    What no head dim makes valid is returned as it is, for an error that names it.
    """
    widths = [x.shape[-1] if isinstance(x, Tensor) and x.ndim else 0 for x in (q, k, v)]
    missing = MIN_HEAD_DIM - widths[0]
    if missing <= 0 or widths[0] != widths[1] or 0 in widths:
        return q, k, v
    options["scale"] = q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    return pad(q, (0, missing)), pad(k, (0, missing)), pad(v, (0, missing))


def as_flash_result(result: Any, width: int) -> Tensor | tuple[Tensor, Tensor, None]:
    """Return out, or (out, lse, None): the third entry is flash_attn's S_dmask, which Ringspan does not compute.

    Args:
        result: out, or (out, lse), perhaps with a padded head dim.
        width: Head dim of out.
    """
    return (result[0][..., :width], result[1], None) if isinstance(result, tuple) else result[..., :width]


def split_packed(name: str, x: Tensor, dim: int, count: int) -> Any:
    """Return the tensors that are stacked in dimension `dim` of qkv or kv.

    Raises:
        ValueError: The size of the dimension is not `count`.
    """
    if not isinstance(x, Tensor) or x.ndim <= dim or x.shape[dim] != count:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"{name}={shape}: dimension {dim} must have size {count}, the stacked {'q, k, v' if count == 3 else 'k, v'}"
        )
    return x.unbind(dim)
