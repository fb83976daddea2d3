"""Writes a checkpoint's weights, and its tokenizer.json, as Hugging Face has them, in a folder that transformers loads.

ringspan export checkpoint=runs/my-run to=my-model
"""

import shutil
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ringspan.trainer.checkpoint import huggingface, load_model
from ringspan.trainer.config import compose
from ringspan.trainer.config.mixture import file_of
from ringspan.trainer.config.schema import Export


def main(argv: list[str] | None = None) -> None:
    given = compose.parse_flat(Export, "ringspan export", __doc__, argv)
    dtype = torch.bfloat16 if given.dtype == "bf16" else torch.float32
    try:
        if not given.to:
            raise ValueError("to='': give the folder to write")
        restored = load_model.Restored(given.checkpoint)

        def read(name: str) -> Tensor:
            return restored.weight(name).to(dtype)

        readers = {name: partial(read, name) for name in restored.reader.names}
        end = restored.tokenizer().end if restored.has_tokenizer else None
        huggingface.export(Path(given.to), readers, restored.model, restored.rope, restored.length, end)
        if restored.tokenizer_options.kind == "hf":
            shutil.copy(file_of(restored.tokenizer_options), Path(given.to) / "tokenizer.json")
    except ValueError as error:
        compose.fail("ringspan export", error)
    except OSError as error:
        problem = ValueError(f"to={given.to!r} cannot be written: {error.strerror or error}; give another folder")
        compose.fail("ringspan export", problem)
    print(f"{restored.folder} is now in {given.to}: AutoModelForCausalLM.from_pretrained({given.to!r}) loads it")


if __name__ == "__main__":
    main()
