"""`register`: adds attn_implementation="ringspan" to transformers, after checking that its interface is the known one."""

from ringspan.hf.attention import layer_attention
from ringspan.hf.masks import check_interface, layer_mask, learn_mask_functions

NAME = "ringspan"
TESTED = "5.24"


def register() -> None:
    """Add attn_implementation="ringspan" to transformers. Calling it again changes nothing.

    Afterwards `from_pretrained(…, attn_implementation="ringspan")`, `from_config` and `model.set_attn_implementation` take the
    name. A saved config does not contain the name, so it loads without Ringspan.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers is older than 5, or its interface for attention, masks or losses is not the known one.

    Example:
        >>> ringspan.hf.register()
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ringspan")
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError('ringspan.hf needs transformers: pip install "transformers>=5"') from error
    version = transformers.__version__
    if int(version.partition(".")[0]) < 5:
        raise ValueError(f"transformers={version} is too old: 5 and newer work, {TESTED} is tested")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
        from transformers.loss.loss_utils import LOSS_MAPPING

        if "ForCausalLM" not in LOSS_MAPPING:
            raise KeyError("loss_utils.LOSS_MAPPING has no 'ForCausalLM'")
        learn_mask_functions(masking_utils)
        AttentionMaskInterface.register(NAME, layer_mask)
        check_interface(masking_utils, NAME)
        AttentionInterface.register(NAME, layer_attention)
        AttentionInterface().get_interface(NAME, layer_attention)
    except (ImportError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"transformers={version} has another interface than ringspan.hf knows ({error}): {TESTED} is tested"
        ) from error
