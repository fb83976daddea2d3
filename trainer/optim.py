"""What steps the weights, and the learning rate as a function of the step: no scheduler, whose state could be lost."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ringspan.trainer.config import validate
from ringspan.trainer.config.schema import Config, Optim, Schedule
from ringspan.trainer.monitoring.tracking import rate

MAX_WARMUP = 1000  # a tenth of the steps, and at most so many: AdamW's averages know no more by then


def fraction(schedule: Schedule, step: int, steps: int) -> float:
    """The share of the peak learning rate at a step, counted from 1: straight up, then along the schedule to its floor."""
    warmup = min(MAX_WARMUP, math.ceil(0.1 * steps)) if schedule.warmup < 0 else schedule.warmup
    if step < warmup:
        return step / warmup
    start, shape = warmup, schedule.kind
    if shape == "wsd":
        start = max(warmup, steps - math.ceil(schedule.decay * steps))
    if shape == "constant" or step <= start:
        return 1.0
    done = min(1.0, (step - start) / (steps - start))
    left = (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - done
    return schedule.floor + (1 - schedule.floor) * left


def jump(old: Config, new: Config, step: int) -> str:
    """What to say where other steps or another schedule give a run that goes on after `step` a rate far from the one due."""
    if step >= new.steps or (old.steps, old.schedule) == (new.steps, new.schedule):
        return ""
    due = fraction(old.schedule, min(step + 1, old.steps), old.steps)
    before, after = due * old.optim.lr, fraction(new.schedule, step + 1, new.steps) * new.optim.lr
    if abs(after - before) <= 0.05 * new.optim.lr:  # not worth a line
        return ""
    told = f"lr goes from {rate(before)} to {rate(after)}: it is {new.schedule.kind} over {new.steps} steps"
    if due:  # a rate of 0 cannot be kept
        rates = f"optim.lr={before:.3g}"
        if new.optim.kind == "muon":
            rates += f" optim.muon_lr={due * old.optim.muon_lr:.3g}"
        constant = replace(new, schedule=replace(new.schedule, kind="constant"))
        refused = [name for name, why in validate.unused(constant).items() if why and name.startswith("schedule.")]
        without = f", without {' and '.join(refused)}," * bool(refused)
        told += f". schedule=constant schedule.warmup=0 {rates}{without} keeps it where it was"
    return told + (
        ". To be extended without a jump, a run begins with schedule=constant, "
        "or with schedule=wsd and goes on from a checkpoint before its decay"
    )


def groups(named: Iterable[tuple[str, nn.Parameter]], optim: Optim) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and sinks do not: a scale has no reason to be small. `peak` is what `fraction` scales.

    Muon takes the matrices between the residual stream and itself; embedding and head are tables of tokens, not maps.
    """
    matrices, tables, rest = [], [], []
    for name, weight in named:
        shape = getattr(weight, "ds_shape", weight.shape)  # ZeRO 3 shows a sharded weight as empty
        weight.use_muon = optim.kind == "muon" and len(shape) == 2 and name.split(".")[0] == "layers"  # DeepSpeed asks
        (matrices if weight.use_muon else tables if len(shape) == 2 else rest).append(weight)
    adamw = dict(lr=optim.lr, peak=optim.lr, betas=tuple(optim.betas), eps=optim.eps)
    found: list[dict[str, Any]] = [
        dict(params=tables, weight_decay=optim.weight_decay, **adamw),
        dict(params=rest, weight_decay=0.0, **adamw),
    ]
    if optim.kind == "muon":
        for group in found:
            group["use_muon"] = False
        muon = dict(lr=optim.muon_lr, peak=optim.muon_lr, momentum=optim.muon_momentum, use_muon=True)
        found.append(dict(params=matrices, weight_decay=optim.weight_decay, **muon))
    return [group for group in found if group["params"]]


def build(named: Iterable[tuple[str, nn.Parameter]], config: Config) -> torch.optim.Optimizer:
    """Fused AdamW, DeepSpeed's own for an optimizer that lives on the CPU, or DeepSpeed's Muon."""
    found = groups(named, config.optim)
    if config.optim.kind == "muon":
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        return MuonWithAuxAdam(found, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={})
    if config.engine.offload_optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiled at its first use

        return DeepSpeedCPUAdam(found, adamw_mode=True)
    return torch.optim.AdamW(found, fused=True)
