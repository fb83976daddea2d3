"""Text from a model, token by token, on one rank and with a cache of keys and values.

    ringspan generate checkpoint=runs/my-run prompt="def main("
    ringspan generate checkpoint=runs/my-run prompt_file=book.txt tokens=500 samples=4

The prompt runs once, however many texts go on from it, and some thousand tokens at a time, so that a long one needs no more
memory than its keys and values. Every further token is a call for all texts that are not at their end.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.trainer.checkpoint import load_model
from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import USUAL_TOKENS, Generate, Model
from ringspan.trainer.kv_cache import PAGE, Cache, Pages, Text
from ringspan.trainer.model import GPT

PROMPT_TOKENS = 2**14  # that run at a time


def generate(
    model: GPT, prompt: Sequence[int], num_tokens: int, *, each: Callable[[int], None] = lambda token: None, **how: Any
) -> list[int]:
    """How the prompt goes on: one text of `write`."""
    return write(model, prompt, num_tokens, each=lambda text, token: each(token), **how)[0]


@torch.inference_mode()
def write(
    model: GPT,
    prompt: Sequence[int],
    num_tokens: int,
    samples: int = 1,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Collection[int] = (),
    seed: int = 0,
    size: int | None = None,
    each: Callable[[int, int], None] = lambda text, token: None,
) -> list[list[int]]:
    """How the prompt goes on, in so many texts, each up to a token of `stop` (which is left out). A text's tokens follow from
    its seed: the first has `seed`, the next `seed` + 1.

    Only ids below `size` are drawn: a vocabulary is rounded up, and nothing ever trained its last rows. `each` is told of
    every token as it comes. Under ZeRO 3 all ranks call this together: each layer's weights are gathered for all.
    """
    check(model, prompt, num_tokens, temperature, top_k, top_p)
    size = size or model.config.vocabulary
    pages = -(-len(prompt) // PAGE) + samples * (-(-num_tokens // PAGE) + 1)  # at most
    cache = Cache(model.config.layers, Pages(pages))

    def run(texts: Sequence[Text], tokens: list[list[int]]) -> Tensor:
        """What each text's next token may be."""
        first, device = torch.tensor([[text.num_tokens] for text in texts]), model.head.weight.device
        at = first + torch.arange(len(tokens[0]))
        with cache.taking(texts, len(tokens[0])):
            logits = model.logits(torch.tensor(tokens, device=device), at.to(device), attention=cache, last=True)
        return logits[:, -1, :size].float().cpu()

    text = cache.new_text()
    for begin in range(0, len(prompt), PROMPT_TOKENS):
        logits = run([text], [list(prompt[begin : begin + PROMPT_TOKENS])])
    texts = [text, *(text.fork() for _ in range(samples - 1))]
    logits = logits.expand(samples, -1)
    generators = [torch.Generator().manual_seed(seed + index) for index in range(samples)]
    written: list[list[int]] = [[] for _ in texts]
    writing = list(range(samples)) if num_tokens else []
    while writing:
        for index, row in zip(tuple(writing), logits, strict=True):
            token = draw(row, temperature, top_k, top_p, generators[index])
            if token not in stop:
                written[index].append(token)
                each(index, token)
            if token in stop or len(written[index]) == num_tokens:
                writing.remove(index)
                texts[index].close()
        if writing:
            logits = run([texts[index] for index in writing], [written[index][-1:] for index in writing])
    return written


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
    given = compose.parse_flat(Generate, "ringspan generate", __doc__, argv)
    try:
        restored = load_model.Restored(given.checkpoint)
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
        known = letters.decode(prompt) if given.prompt_file else given.prompt
        shown, ids = known, list(prompt)

        def show(_: int, token: int) -> None:
            """Whole text so far, decoded again: a character may be made of several tokens."""
            nonlocal shown
            ids.append(token)
            text = letters.decode(ids)
            if text.startswith(shown) and not text.endswith("\ufffd"):
                print(text[len(shown) :], end="", flush=True)
                shown = text

        how = dict(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p, seed=given.seed, size=letters.size)
        how |= dict(stop=() if given.ignore_end else {letters.end}, samples=given.samples)
        if given.samples == 1:
            print(given.prompt, end="", flush=True)
            write(model, seen, num_tokens, each=show, **how)
            print(letters.decode(ids).removeprefix(shown))
            return
        for index, added in enumerate(write(model, seen, num_tokens, **how)):  # as they are written by turns
            print(f"--- seed={given.seed + index}")
            print(given.prompt + letters.decode([*prompt, *added]).removeprefix(known))
    except ValueError as error:
        compose.fail("ringspan generate", error)


if __name__ == "__main__":
    main()
