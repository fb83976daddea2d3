"""Text from a model, byte by byte."""

import torch

from kernels import Mask

from .model import GPT


@torch.inference_mode()
def generate(model: GPT, prompt: bytes, num_bytes: int, context: int, temperature: float = 0.8, seed: int = 0) -> bytes:
    """How the prompt goes on. The same seed gives the same text.

    The model sees the last `context` bytes, because positions that it was never trained on would be noise to it. Each
    byte runs all of them again: a sample at the end of a run is too short for a cache of keys to pay.
    """
    if not prompt:
        raise ValueError("prompt is empty: the first byte is predicted from one before it, so give at least one byte")
    if context < 1 or not temperature > 0:
        raise ValueError(f"context={context}, temperature={temperature}: context must be at least 1, temperature above 0")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(num_bytes):
        seen = torch.tensor([text[-context:]], device=device)
        logits = model.logits(seen, Mask(causal=True), torch.arange(seen.shape[1], device=device))[0, -1]
        weights = (logits.float() / temperature).softmax(-1).cpu()
        text.append(int(torch.multinomial(weights, 1, generator=generator)))
    return bytes(text[len(prompt) :])
