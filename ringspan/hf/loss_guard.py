"""Inside a ring, the losses of transformers refuse labels that they would shift or average wrongly.

A model looks its loss up in LOSS_MAPPING when it is called. The guard replaces the entries only while a ring is entered:
otherwise the Trainer compares them with transformers' own functions.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

Loss = Callable[..., Any]
_originals: dict[str, Loss] = {}


def install_guard() -> None:
    """Replace the losses of transformers, if it is imported."""
    mapping = _mapping()
    _originals.update(mapping)
    mapping.update({name: _guarded(name, loss) for name, loss in mapping.items()})


def remove_guard() -> None:
    """Put the losses back."""
    _mapping().update(_originals)
    _originals.clear()


def _mapping() -> dict[str, Loss]:
    return getattr(sys.modules.get("transformers.loss.loss_utils"), "LOSS_MAPPING", {})


@functools.cache
def _guarded(name: str, loss: Loss) -> Loss:
    @functools.wraps(loss)
    def guarded(*args: Any, **options: Any) -> Any:
        if name != "ForCausalLM":
            raise ValueError(f"loss {name!r} of a model under a ring: its logits are those of a shard; use ring.loss")
        if options.get("shift_labels") is None:
            raise ValueError(
                "labels under a ring: the model would shift a shard's labels again; use ring.loss, or shift_labels"
            )
        if options.get("num_items_in_batch") is None:
            raise ValueError("num_items_in_batch=None under a ring: the model would average over a shard; use ring.loss")
        return loss(*args, **options)

    return guarded
