"""`install`: `import ring_flash_attn` of other packages finds Ringspan's functions."""

import importlib
import sys
from importlib.util import find_spec

from ringspan.compat.flash_name import accept_flash_attention_2

PACKAGE = "ringspan.compat.ring_flash_attn"
MODULES = ("", ".adapters", ".adapters.hf_adapter")


def install() -> None:
    """Make `import ring_flash_attn`, in this process, import ringspan.compat.ring_flash_attn. Calling it again changes nothing.

    For packages that import ring_flash_attn themselves. A script of your own changes its import instead. If flash_attn is
    not installed, models of transformers also load with attn_implementation="flash_attention_2" afterwards; they run after
    substitute_hf_flash_attn, which such packages call.

    Raises:
        ValueError: Another ring_flash_attn has been imported already.

    Example:
        >>> ringspan.compat.ring_flash_attn.install()  # before the packages that use it
    """
    found = sys.modules.get("ring_flash_attn")
    if found is not None and found is not sys.modules[PACKAGE]:
        raise ValueError(
            f"ring_flash_attn={getattr(found, '__file__', found)} has been imported already: call install() before the "
            "packages that import it"
        )
    for name in MODULES:
        sys.modules["ring_flash_attn" + name] = importlib.import_module(PACKAGE + name)
    if find_spec("flash_attn") is None and find_spec("transformers") is not None:
        accept_flash_attention_2()
