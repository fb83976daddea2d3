"""Text generation from a checkpoint, one token at a time, on one rank, with a paged KV cache.

    ringspan generate checkpoint=runs/my-run prompt="def main("
    ringspan generate checkpoint=runs/my-run prompt_file=book.txt tokens=500 samples=4

The prompt is processed once for all samples, in chunks of PROMPT_TOKENS tokens, so that a long prompt needs little memory
beyond its keys and values. Each further model call adds one token to every text that has not ended.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.trainer.checkpoint import load_model
from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import DEFAULT_TOKENS, Config, Generate, Model
from ringspan.trainer.data.dataset import Corpus, Dataset
from ringspan.trainer.data.tokenizer import Tokenizer
from ringspan.trainer.kv_cache import PAGE, Cache, Pages, Text
from ringspan.trainer.model import GPT

PROGRAM = "ringspan generate"
PROMPT_TOKENS = 2**14  # of a prompt per model call


def generate(
    model: GPT, prompt: Sequence[int], num_tokens: int, *, each: Callable[[int], None] = lambda token: None, **options: Any
) -> list[int]:
    """Return one continuation of the prompt; arguments as in `generate_texts`."""
    return generate_texts(model, prompt, num_tokens, each=lambda text, token: each(token), **options)[0]


def continue_held_out(model: GPT, held_out: Dataset, tokenizer: Tokenizer, config: Config) -> str:
    """Return the beginning of a held-out text and the model's continuation, as text.

    Args:
        model: the model, in evaluation mode.
        held_out: the held-out part; its first text is used.
        tokenizer: the run's tokenizer.
        config: `evaluate` and `data.length` are read.
    """
    source = next((i for i, source in enumerate(held_out.sources) if isinstance(source, Corpus)), 0)
    prompt = held_out.windows([(source, 0)]).tokens[0, : max(1, config.data.length // 4)][:64].tolist()
    num_tokens = min(config.evaluate.sample, config.data.length - len(prompt))
    out = generate(model, prompt, num_tokens, temperature=config.evaluate.temperature, size=tokenizer.size)
    return "A held-out text; the model continues after the bar:\n" + "▌".join(map(tokenizer.decode, (prompt, out)))


@torch.inference_mode()
def generate_texts(
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
    """Return `samples` continuations of a prompt, without the prompt.

    Under ZeRO 3 all ranks call this together, because each layer's weights are gathered for all of them.

    Args:
        model: the model.
        prompt: at least one token id.
        num_tokens: tokens to add to each text, at most.
        samples: number of texts. Text i depends on the seed `seed` + i alone.
        temperature: 0 takes the most likely token.
        top_k: draw from the `top_k` most likely tokens; 0 means all.
        top_p: draw from the fewest most likely tokens that reach this probability.
        stop: ids that end a text; they are left out.
        seed: seed of the first text.
        size: draw only ids below it, because the last rows of a rounded-up vocabulary are untrained. None: the vocabulary.
        each: called as each(text, token) for every token.

    Raises:
        ValueError: an argument is out of range, or the model has too few learned positions.
    """
    _validate(model, prompt, num_tokens, temperature, top_k, top_p)
    size = size or model.config.vocabulary
    pages = -(-len(prompt) // PAGE) + samples * (-(-num_tokens // PAGE) + 1)  # upper bound
    cache = Cache(model.config.layers, Pages(pages))

    def run(texts: Sequence[Text], tokens: list[list[int]]) -> Tensor:
        """Return the logits of each text's next token, (texts, size)."""
        first, device = torch.tensor([[text.num_tokens] for text in texts]), model.head.weight.device
        positions = first + torch.arange(len(tokens[0]))
        with cache.extend(texts, len(tokens[0])):
            logits = model.logits(torch.tensor(tokens, device=device), positions.to(device), attention=cache, last=True)
        return logits[:, -1, :size].float().cpu()

    text = cache.new_text()
    for begin in range(0, len(prompt), PROMPT_TOKENS):
        logits = run([text], [list(prompt[begin : begin + PROMPT_TOKENS])])
    texts = [text, *(text.fork() for _ in range(samples - 1))]
    logits = logits.expand(samples, -1)
    generators = [torch.Generator().manual_seed(seed + index) for index in range(samples)]
    outputs: list[list[int]] = [[] for _ in texts]
    active = list(range(samples)) if num_tokens else []
    while active:
        for index, row in zip(tuple(active), logits, strict=True):
            token = draw(row, temperature, top_k, top_p, generators[index])
            if token not in stop:
                outputs[index].append(token)
                each(index, token)
            if token in stop or len(outputs[index]) == num_tokens:
                active.remove(index)
                texts[index].close()
        if active:
            logits = run([texts[index] for index in active], [outputs[index][-1:] for index in active])
    return outputs


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """Draw one token id from logits (vocabulary,): among the `top_k` most likely, the fewest that reach `top_p`."""
    if temperature == 0:
        return int(logits.argmax())
    weights, order = (logits / temperature).softmax(-1).sort(descending=True)
    weights = weights[: top_k or None]
    before = weights.cumsum(0) - weights
    weights = weights.masked_fill(before >= top_p * weights.sum(), 0)  # the most likely token always stays
    return int(order[torch.multinomial(weights, 1, generator=generator)])


def _validate(model: GPT, prompt: Sequence[int], num_tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    if not prompt:
        raise ValueError("prompt is empty: each token is predicted from earlier ones; provide at least one token")
    if num_tokens < 0 or not temperature >= 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"tokens={num_tokens}, temperature={temperature}, top_k={top_k}, top_p={top_p}: top_p must be in (0, 1], "
            "the others at least 0"
        )
    if (largest := max(prompt)) >= model.config.vocabulary:
        raise ValueError(
            f"prompt: the tokenizer produces the id {largest}, and model.vocabulary={model.config.vocabulary} is too small "
            "for it; use another prompt, or train with a larger vocabulary"
        )
    available = model.config.max_positions
    if model.config.positions == "learned" and len(prompt) + num_tokens > available:
        raise ValueError(
            f"tokens={num_tokens} after a prompt of {len(prompt)}: this model has learned {available} positions; "
            "ask for fewer tokens, or use a shorter prompt"
        )


def default_num_tokens(model: Model, num_prompt: int) -> int:
    """Return how many tokens to add if `tokens` is not set.

    At least 1: where no position is left, `generate_texts` then reports the limit.
    """
    available = model.max_positions - num_prompt if model.positions == "learned" else DEFAULT_TOKENS
    return max(1, min(DEFAULT_TOKENS, available))


def read_prompt(options: Generate) -> bytes:
    """Return the prompt, from the option, a file or stdin."""
    if not options.prompt_file:
        return options.prompt.encode()
    if options.prompt:
        raise ValueError(f"prompt_file={options.prompt_file!r}, prompt={options.prompt!r}: set one of them")
    try:
        return sys.stdin.buffer.read() if options.prompt_file == "-" else Path(options.prompt_file).expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"prompt_file={options.prompt_file!r} cannot be read: {error.strerror}") from None


def main(argv: list[str] | None = None) -> None:
    options = compose.parse_flat(Generate, PROGRAM, __doc__, argv)
    try:
        restored = load_model.RestoredModel(options.checkpoint)
        if not restored.has_tokenizer:
            raise ValueError(
                f"checkpoint={options.checkpoint!r} was trained on token shards of an unknown tokenizer, so it cannot read a "
                "prompt; train with the tokenizer that made the shards: tokenizer.kind=hf tokenizer.path=…"
            )
        tokenizer = restored.tokenizer()
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda: torch finds no GPU; take auto or cpu")
        device = torch.device(
            "cuda" if options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available()) else "cpu"
        )
        model = restored.build(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        prompt = next(iter(tokenizer.encode([read_prompt(options)]))).tolist()
        inputs = [*tokenizer.begin, *prompt] or [tokenizer.end]
        num_tokens = options.tokens or default_num_tokens(restored.model, len(inputs))
        if len(inputs) + num_tokens > restored.length:
            print(
                f"(the model was trained on {restored.length} tokens per sequence; later positions are new to it)",
                file=sys.stderr,
            )
        prompt_text = tokenizer.decode(prompt) if options.prompt_file else options.prompt
        printed, ids = prompt_text, list(prompt)

        def print_token(_: int, token: int) -> None:
            """Decode the full text again, because a character may consist of several tokens."""
            nonlocal printed
            ids.append(token)
            text = tokenizer.decode(ids)
            if text.startswith(printed) and not text.endswith("\ufffd"):
                print(text[len(printed) :], end="", flush=True)
                printed = text

        sampling: dict[str, Any] = dict(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
        sampling |= dict(seed=options.seed, size=tokenizer.size, samples=options.samples)
        sampling |= dict(stop=() if options.ignore_end else {tokenizer.end})
        if options.samples == 1:
            print(options.prompt, end="", flush=True)
            generate_texts(model, inputs, num_tokens, each=print_token, **sampling)
            print(tokenizer.decode(ids).removeprefix(printed))
            return
        for index, output in enumerate(generate_texts(model, inputs, num_tokens, **sampling)):
            print(f"--- seed={options.seed + index}")
            print(options.prompt + tokenizer.decode([*prompt, *output]).removeprefix(prompt_text))
    except ValueError as error:
        compose.fail(PROGRAM, error)


if __name__ == "__main__":
    main()
