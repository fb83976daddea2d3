"""The training loop: a batch, its loss, its gradient, a step of the optimizer, and now and then a line about it."""

import math
import os
import time

import torch

from .config import Data
from .cost import training_flops
from .data import Dataset, samples_of
from .model import GPT
from .optim import Cosine, adamw

CLIP = 1.0  # largest norm of the gradient that a step follows as it is
EVAL_BATCHES = 8


def train(
    model: GPT,
    data: Dataset,
    held_out: Dataset,
    options: Data,
    schedule: Cosine,
    log_every: int = 20,
    eval_every: int = 100,
) -> list[float]:
    """Trains the model where it lies and returns the loss of every step."""
    device, steps = next(model.parameters()).device, schedule.steps
    optimizer = adamw(model)
    losses: list[torch.Tensor] = []  # left on the device: reading one waits for it
    num_tokens, flops, clock = 0, 0.0, time.perf_counter()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate = schedule(step)
        batch = data.batch([i for row in range(options.batch) for i in samples_of(step - 1, row, options, 0, 1)])
        with precision(device):
            loss_sum, num_valid = model(*batch.to(device).inputs)
        loss = loss_sum / num_valid.clamp(min=1)
        loss.backward()
        grad = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

        name = f"step {step:{len(str(steps))}}/{steps}"
        losses.append(loss.detach())
        num_tokens += batch.tokens.numel()
        flops += training_flops(model.config, batch.lengths)
        evaluates = step % eval_every == 0 or step == steps
        if evaluates or step % log_every == 0 or step == 1:
            value, norm = loss.item(), grad.item()  # waits for the device, so the clock is read after it
            speed, flops = flops / (time.perf_counter() - clock) / 1e12, 0.0
            line = f"{name}  loss {value:.3f}  grad {norm:.2f}  lr {rate:.1e}"
            print(f"{line}  {num_tokens / 1000:.0f}k tok  {speed:.3g} TFLOP/s", flush=True)
            clock = time.perf_counter()
        if evaluates:
            value = evaluate(model, held_out)
            print(f"{name}  held-out loss {value:.3f}  {value / math.log(2):.2f} bits per byte", flush=True)
            clock = time.perf_counter()  # a step's speed is without it
    return torch.stack(losses).tolist()


@torch.no_grad()
def evaluate(model: GPT, data: Dataset) -> float:
    """The mean loss per label over the same few batches every time: over tokens, not a mean of the batches' means."""
    device = next(model.parameters()).device
    total, count = torch.zeros(2, dtype=torch.float64, device=device)
    for number in range(EVAL_BATCHES):
        with precision(device):
            loss_sum, num_valid = model(*data.windows([(0, number)]).to(device).inputs)
        total, count = total + loss_sum, count + num_valid
    return (total / count.clamp(min=1)).item()


def precision(device: torch.device) -> torch.autocast:
    """bf16 products on a GPU, over fp32 weights. CPUs without bf16 units would only lose time by it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def choose_device(name: str) -> torch.device:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("this trainer is one process, and each rank would train alone: start it without torchrun")
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={name!r}: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch finds no GPU: use cpu, or a torch that is built for this GPU")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
