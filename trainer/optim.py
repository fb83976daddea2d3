"""The optimizer, and the learning rate as a function of the step. No scheduler object: its state could be lost."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ringspan.trainer.config import validate
from ringspan.trainer.config.schema import Config, Optim, Schedule
from ringspan.trainer.monitoring.tracking import rate

MAX_WARMUP = 1000  # of steps; the default is a tenth of the run, but AdamW's averages gain nothing from more than this


def learning_rate_fraction(schedule: Schedule, step: int, steps: int) -> float:
    """Return the share of the peak learning rate at a step, counted from 1.

    The rate rises linearly during the warmup and then follows the schedule to its floor.
    """
    warmup = min(MAX_WARMUP, math.ceil(0.1 * steps)) if schedule.warmup < 0 else schedule.warmup
    if step < warmup:
        return step / warmup
    start, shape = warmup, schedule.kind
    if shape == "wsd":
        start = max(warmup, steps - math.ceil(schedule.decay * steps))
    if shape == "constant" or step <= start:
        return 1.0
    progress = min(1.0, (step - start) / (steps - start))
    left = (1 + math.cos(math.pi * progress)) / 2 if shape == "cosine" else 1 - progress
    return schedule.floor + (1 - schedule.floor) * left


def learning_rate_jump(old: Config, new: Config, step: int) -> str:
    """Return a warning if the learning rate jumps when a run continues after `step` with another schedule, else "".

    Args:
        old: config of the run that wrote the checkpoint.
        new: config of the run that continues.
        step: the checkpoint's step.
    """
    if step >= new.steps or (old.steps, old.schedule) == (new.steps, new.schedule):
        return ""
    old_fraction = learning_rate_fraction(old.schedule, min(step + 1, old.steps), old.steps)
    before = old_fraction * old.optim.lr
    after = learning_rate_fraction(new.schedule, step + 1, new.steps) * new.optim.lr
    if abs(after - before) <= 0.05 * new.optim.lr:
        return ""
    text = f"lr goes from {rate(before)} to {rate(after)}: the schedule is {new.schedule.kind} over {new.steps} steps"
    if old_fraction:  # a rate of 0 cannot be kept
        rates = f"optim.lr={before:.3g}"
        if new.optim.kind == "muon":
            rates += f" optim.muon_lr={old_fraction * old.optim.muon_lr:.3g}"
        constant = replace(new, schedule=replace(new.schedule, kind="constant"))
        rejected = [
            name for name, reason in validate.unused_options(constant).items() if reason and name.startswith("schedule.")
        ]
        without = f", without {' and '.join(rejected)}," * bool(rejected)
        text += f". schedule=constant schedule.warmup=0 {rates}{without} keeps the old rate"
    return text + (
        ". To extend a run without a jump, start it with schedule=constant, "
        "or with schedule=wsd and continue from a checkpoint before its decay"
    )


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], optim: Optim) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups; `peak` is the learning rate that `learning_rate_fraction` scales.

    Weight decay applies to matrices, not to norms, biases and sinks. Muon takes the matrices of the layers; embedding and
    head are tables of tokens, not maps of the residual stream.
    """
    matrices: list[nn.Parameter] = []
    tables: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, weight in named:
        shape = getattr(weight, "ds_shape", weight.shape)  # ZeRO 3 shows a sharded weight as empty
        use_muon = optim.kind == "muon" and len(shape) == 2 and name.split(".")[0] == "layers"
        weight.use_muon = use_muon  # type: ignore[attr-defined]  # DeepSpeed reads this attribute
        (matrices if use_muon else tables if len(shape) == 2 else vectors).append(weight)
    adamw = dict(lr=optim.lr, peak=optim.lr, betas=tuple(optim.betas), eps=optim.eps)
    groups: list[dict[str, Any]] = [
        dict(params=tables, weight_decay=optim.weight_decay, **adamw),
        dict(params=vectors, weight_decay=0.0, **adamw),
    ]
    if optim.kind == "muon":
        for group in groups:
            group["use_muon"] = False
        muon = dict(lr=optim.muon_lr, peak=optim.muon_lr, momentum=optim.muon_momentum, use_muon=True)
        groups.append(dict(params=matrices, weight_decay=optim.weight_decay, **muon))
    return [group for group in groups if group["params"]]


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: Config) -> torch.optim.Optimizer:
    """Build fused AdamW, DeepSpeed's AdamW for an optimizer that is offloaded to the CPU, or DeepSpeed's Muon."""
    groups = parameter_groups(named, config.optim)
    if config.optim.kind == "muon":
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        return MuonWithAuxAdam(groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={})
    if config.engine.offload_optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiled at its first use

        return DeepSpeedCPUAdam(groups, adamw_mode=True)
    return torch.optim.AdamW(groups, fused=True)
