"""`accept_flash_attention_2`: models of transformers load with that name where flash_attn is not installed."""

from typing import Any

NAME = "flash_attention_2"


def accept_flash_attention_2() -> None:
    """Let models that support flash attention take attn_implementation="flash_attention_2" without the package flash_attn.

    transformers looks for the package when a model is made. Afterwards it calls its entry of that name, which the caller
    replaces. Calling it again changes nothing.

    Raises:
        ValueError: transformers has no such check.
    """
    import transformers
    from transformers import PreTrainedModel

    model_class: Any = PreTrainedModel
    check = getattr(model_class, "_check_and_adjust_attn_implementation", None)
    if check is None:
        raise ValueError(
            f"transformers={transformers.__version__} has no _check_and_adjust_attn_implementation of models: 5.24 is tested"
        )
    if getattr(check, "accepts_flash", False):
        return

    def accept(self: Any, attn_implementation: str | None, *args: Any, **options: Any) -> str:
        if attn_implementation == NAME and self._supports_flash_attn:
            return NAME
        return check(self, attn_implementation, *args, **options)

    accept.accepts_flash = True  # type: ignore[attr-defined]
    model_class._check_and_adjust_attn_implementation = accept
