"""Text from a model, token by token, on one rank and with a cache of keys and values.

    python -m trainer.generate checkpoint=runs/my-run prompt="def main("
    python -m trainer.generate checkpoint=runs/my-run prompt_file=book.txt tokens=500

The cache is an attention: the model takes attention as an argument, calls it once a layer, and so never learns that this one
remembers the keys of earlier calls. The prompt runs in one call, every further token in one of its own.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernels
from kernels import Mask

from . import compose, restore
from .config import USUAL_TOKENS, Generate, Model
from .model import GPT


class Cache:
    """Attention that puts the keys and values of each call behind those of the calls before, layer by layer."""

    def __init__(self, layers: int, length: int, attention: Callable[..., Any] = kernels.attention) -> None:
        self.layers, self.length, self.attention = layers, length, attention
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.num_tokens, self.layer = 0, 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> Tensor:
        if len(self.kept) < self.layers:
            new = (x.new_empty((x.shape[0], self.length, *x.shape[2:])) for x in (k, v))
            self.kept.append(tuple(new))  # type: ignore[arg-type]
        end = self.num_tokens + k.shape[1]
        keys, values = self.kept[self.layer]
        keys[:, self.num_tokens : end], values[:, self.num_tokens : end] = k, v
        self.layer += 1
        if self.layer == self.layers:
            self.layer, self.num_tokens = 0, end
        # The last query stands at the last key, so a window or causality means what it meant without a cache.
        return self.attention(q, keys[:, :end], values[:, :end], mask=mask, **options)


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: Sequence[int],
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Collection[int] = (),
    seed: int = 0,
    size: int | None = None,
    each: Callable[[int], None] = lambda token: None,
) -> list[int]:
    """How the prompt goes on, up to a token of `stop` (which is left out). The same seed gives the same tokens.

    Only ids below `size` are drawn: a vocabulary is rounded up, and nothing ever trained its last rows. `each` is told of
    every token as it comes. Under ZeRO 3 all ranks call this together: each layer's weights are gathered for all.
    """
    check(model, prompt, num_tokens, temperature, top_k, top_p)
    device = model.head.weight.device
    size = size or model.config.vocabulary
    generator = torch.Generator().manual_seed(seed)
    cache = Cache(model.config.layers, len(prompt) + num_tokens)
    seen, out = list(prompt), list[int]()
    while len(out) < num_tokens:
        at = torch.arange(cache.num_tokens, cache.num_tokens + len(seen), device=device)
        tokens = torch.tensor([seen], device=device)
        logits = model.logits(tokens, at[None], attention=cache, last=True)[0, -1, :size].float().cpu()
        token = draw(logits, temperature, top_k, top_p, generator)
        if token in stop:
            break
        out.append(token)
        each(token)
        seen = [token]
    return out


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """One token: from the likeliest `top_k`, and of these from the fewest that together reach `top_p`."""
    if temperature == 0:
        return int(logits.argmax())
    weights, order = (logits / temperature).softmax(-1).sort(descending=True)
    weights = weights[: top_k or None]
    before = weights.cumsum(0) - weights
    weights = weights.masked_fill(before >= top_p * weights.sum(), 0)  # the likeliest always stays
    return int(order[torch.multinomial(weights, 1, generator=generator)])


def check(model: GPT, prompt: Sequence[int], num_tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    if not prompt:
        raise ValueError("prompt is empty: a token is predicted from those before it, so give at least one")
    if num_tokens < 0 or not temperature >= 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"tokens={num_tokens}, temperature={temperature}, top_k={top_k}, top_p={top_p}: top_p must be in (0, 1], "
            "the others at least 0"
        )
    if (most := max(prompt)) >= model.config.vocabulary:
        raise ValueError(
            f"prompt: its tokenizer gives the id {most}, and model.vocabulary={model.config.vocabulary} has none such; "
            "give another prompt, or train with a larger vocabulary"
        )
    room = model.config.max_positions
    if model.config.positions == "learned" and len(prompt) + num_tokens > room:
        raise ValueError(
            f"tokens={num_tokens} behind a prompt of {len(prompt)}: this model has learned {room} positions; "
            "ask for fewer, or give a shorter prompt"
        )


def fitting(model: Model, num_prompt: int) -> int:
    """How many tokens to add if nobody said. At least one is tried, and refused by name where there is no room."""
    room = model.max_positions - num_prompt if model.positions == "learned" else USUAL_TOKENS
    return max(1, min(USUAL_TOKENS, room))


def read(given: Generate) -> bytes:
    """The prompt."""
    if not given.prompt_file:
        return given.prompt.encode()
    if given.prompt:
        raise ValueError(f"prompt_file={given.prompt_file!r} beside prompt={given.prompt!r}: give one of them")
    try:
        return sys.stdin.buffer.read() if given.prompt_file == "-" else Path(given.prompt_file).expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"prompt_file={given.prompt_file!r} cannot be read: {error.strerror}") from None


def main(argv: list[str] | None = None) -> None:
    given = compose.parse_flat(Generate, "python -m trainer.generate", __doc__, argv)
    try:
        restored = restore.Restored(given.checkpoint)
        if not restored.has_tokenizer:
            raise ValueError(
                f"checkpoint={given.checkpoint!r} was trained on tokens that tokenizer=bytes did not make, so it cannot read a "
                "prompt; train with the tokenizer that made the shards: tokenizer.kind=hf tokenizer.path=…"
            )
        letters = restored.tokenizer()
        if given.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda: torch finds no GPU; take auto or cpu")
        device = torch.device(
            "cuda" if given.device == "cuda" or (given.device == "auto" and torch.cuda.is_available()) else "cpu"
        )
        model = restored.build(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        prompt = next(iter(letters.encode([read(given)]))).tolist()
        seen = [*letters.begin, *prompt] or [letters.end]
        num_tokens = given.tokens or fitting(restored.model, len(seen))
        if len(seen) + num_tokens > restored.length:
            print(f"(trained on sequences of {restored.length} tokens; behind that positions are new to it)", file=sys.stderr)
        shown, ids = letters.decode(prompt) if given.prompt_file else given.prompt, list(prompt)
        print(given.prompt, end="", flush=True)

        def show(token: int) -> None:
            """Whole text so far, decoded again: a character may be made of several tokens."""
            nonlocal shown
            ids.append(token)
            text = letters.decode(ids)
            if text.startswith(shown) and not text.endswith("\ufffd"):
                print(text[len(shown) :], end="", flush=True)
                shown = text

        generate(
            model,
            seen,
            num_tokens,
            given.temperature,
            given.top_k,
            given.top_p,
            stop=() if given.ignore_end else {letters.end},
            seed=given.seed,
            size=letters.size,
            each=show,
        )
        rest = letters.decode(ids)
        print(rest[len(shown) :] if rest.startswith(shown) else "")
    except ValueError as error:
        compose.fail("python -m trainer.generate", error)


if __name__ == "__main__":
    main()
