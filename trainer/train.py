"""Trains a small GPT on the bytes of text files, then lets it go on with a text it has never seen.

This is the core, in one process on one CPU or GPU; Hydra, DeepSpeed and the ring come round it later.
"""

import torch

from .arguments import parse
from .data import VOCABULARY, Dataset, read_documents, split
from .generate import generate
from .loop import choose_device, precision, train
from .model import GPT, GPTConfig
from .optim import Cosine


def main(argv: list[str] | None = None) -> None:
    config = parse("python -m trainer.train", __doc__, argv)
    try:
        device, schedule = choose_device(config.device), Cosine(config.steps, config.lr)
        shape = GPTConfig(VOCABULARY, config.layers, config.dim, config.heads, config.kv_heads, 3 * config.dim)
        texts, unseen = split(read_documents(config.text))
        data = Dataset(texts, config.length, config.batch, config.seed)
        held_out = Dataset(unseen, config.length, config.batch, seed=0)  # the same in every run
    except ValueError as error:
        raise SystemExit(f"python -m trainer.train: {error}") from None
    torch.manual_seed(config.seed)
    model = GPT(shape).to(device)
    num_weights = sum(weight.numel() for weight in model.parameters())
    print(f"{num_weights:,} weights on {device}; {sum(map(len, texts)):,} bytes to learn from", flush=True)
    train(model, data, held_out, schedule)
    prompt = unseen[0][:64]
    with precision(device):
        sample = generate(model, prompt, 256, context=config.length)
    print("\nThe start of a held-out text, and from the bar on the model:\n")
    print("▌".join(part.decode(errors="replace") for part in (prompt, sample)))


if __name__ == "__main__":
    main()
