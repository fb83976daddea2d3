"""Trains a small GPT on the bytes of text files, then lets it go on with a text it has never seen.

This is the core, in one process on one CPU or GPU; Hydra, DeepSpeed and the ring come round it later.
"""

from . import config, tokenizer
from .arguments import parse
from .data import Dataset
from .generate import generate
from .loop import choose_device, precision, train
from .model import GPT
from .optim import Cosine


def main(argv: list[str] | None = None) -> None:
    given = parse("python -m trainer.train", __doc__, argv)
    try:
        device, schedule = choose_device(given.device), Cosine(given.steps, given.lr)
        letters = tokenizer.load(config.Tokenizer())
        text = config.Source(kind="text", paths=[given.text])
        options = config.Data(length=given.length, batch=given.batch, sources={"text": text})
        data, held_out = (Dataset(options, letters, given.seed, part) for part in ("train", "held_out"))
        shape = config.Model(
            vocabulary=tokenizer.vocabulary(0, letters),
            layers=given.layers,
            dim=given.dim,
            heads=given.heads,
            kv_heads=given.kv_heads,
            head_dim=64,
            mlp_dim=3 * given.dim,
        )
        model = GPT(shape, seed=given.seed).to(device)
    except ValueError as error:
        raise SystemExit(f"python -m trainer.train: {error}") from None
    print(f"{sum(weight.numel() for weight in model.parameters()):,} weights on {device}", flush=True)
    train(model, data, held_out, options, schedule)
    prompt = held_out.windows([(0, 0)]).tokens[0, :64].tolist()
    with precision(device):
        sample = generate(model, prompt, 256)
    print("\nA held-out text, and from the bar on the model:\n")
    print("▌".join(letters.decode(part) for part in (prompt, sample)))


if __name__ == "__main__":
    main()
