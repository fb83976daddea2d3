"""Export a checkpoint's weights and its tokenizer.json in Hugging Face format, as a folder that transformers loads.

ringspan export checkpoint=runs/my-run to=my-model
"""

import shutil
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ringspan.trainer.checkpoint import huggingface, load_model
from ringspan.trainer.config import compose
from ringspan.trainer.config.mixture import tokenizer_file
from ringspan.trainer.config.schema import Export

PROGRAM = "ringspan export"


def main(argv: list[str] | None = None) -> None:
    options = compose.parse_flat(Export, PROGRAM, __doc__, argv)
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    try:
        if not options.to:
            raise ValueError("to='': name the folder to write")
        restored = load_model.RestoredModel(options.checkpoint)

        def read(name: str) -> Tensor:
            return restored.weight(name).to(dtype)

        readers = {name: partial(read, name) for name in restored.reader.names}
        end = restored.tokenizer().end if restored.has_tokenizer else None
        shard = options.max_file_mib * 2**20
        to = Path(options.to).expanduser()
        huggingface.export(to, readers, restored.model, restored.rope, restored.length, end, shard)
        if restored.tokenizer_options.kind == "hf":
            shutil.copy(tokenizer_file(restored.tokenizer_options), to / "tokenizer.json")
    except ValueError as error:
        compose.fail(PROGRAM, error)
    except OSError as error:
        problem = ValueError(f"to={options.to!r} cannot be written: {error.strerror or error}; choose another folder")
        compose.fail(PROGRAM, problem)
    print(f"exported {restored.folder} to {to}; load it with AutoModelForCausalLM.from_pretrained({str(to)!r})")


if __name__ == "__main__":
    main()
