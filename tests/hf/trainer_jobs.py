"""Bodies of tests of the Trainer: a run on one rank or on a ring, with its logs and final weights."""

import os
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from transformers import Trainer, TrainingArguments

from ringspan.hf import TrainerMixin
from tests.hf import jobs
from tests.hf.models import VOCABULARY, make_model

LENGTH = 29


class RingTrainer(TrainerMixin, Trainer):
    pass


def dataset(samples: int, seed: int) -> list[dict[str, Tensor]]:
    """Sequences of one length, with very different numbers of labels that count."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(samples):
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        rows.append(dict(input_ids=ids, labels=ids.masked_fill(torch.arange(LENGTH) < index % 5 * 6, -100)))
    return rows


def train(
    folder: str,
    attention: str = "ringspan",
    resume: str | None = None,
    ring: Any = None,
    samples: int = 23,
    evaluated: int = 5,
    compute_loss_func: Any = None,
    **options: Any,
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Run a Trainer; return its log and the final weights.

    Adam divides by the root of squared gradients. With its usual epsilon of 1e-8, a gradient that cancels to rounding errors
    moves its weight as far as any other: then transformers' own eager and sdpa differ by 1.6e-4 after these 20 steps.
    """
    arguments: dict[str, Any] = dict(
        max_steps=20, per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=3e-3, weight_decay=0.1, logging_steps=1, eval_strategy="steps", eval_steps=10, save_steps=10,
        use_cpu=True, report_to=[], disable_tqdm=True, seed=3, adam_epsilon=1e-6, lr_scheduler_type="cosine", max_grad_norm=1.0,
        logging_nan_inf_filter=False,
    )  # fmt: skip
    args = TrainingArguments(folder, **arguments | options)
    data: dict[str, Any] = dict(train_dataset=dataset(samples, 0), eval_dataset=dataset(evaluated, 1))
    data |= dict(compute_loss_func=compute_loss_func)
    model = make_model("mistral", attention, torch.float32)
    extra = {} if ring is None else dict(ring=ring)
    trainer = (Trainer if ring is None else RingTrainer)(model, args, **data, **extra)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.log_history, {name: p.detach().clone() for name, p in model.named_parameters()}


def predict(folder: str, samples: int, attention: str = "ringspan", ring: Any = None) -> tuple[Any, Any, float]:
    """Logits and labels of some sequences, and the evaluation's loss."""
    args = TrainingArguments(folder, per_device_eval_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True)
    model, extra = make_model("mistral", attention, torch.float32), {} if ring is None else dict(ring=ring)
    result = (Trainer if ring is None else RingTrainer)(model, args, **extra).predict(dataset(samples, 1))
    return result.predictions, result.label_ids, result.metrics["test_loss"]


def enter_job(ranks: int) -> bool:
    """Form a group and tell accelerate; return whether this rank takes part."""
    if not jobs.form_group(ranks):
        return False
    rank = torch.distributed.get_rank()
    environment = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_ADDR="localhost", MASTER_PORT=1)
    os.environ.update({name: str(value) for name, value in environment.items()})
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return True


def train_on_ring(ranks: int, data: int, folder: str, **options: Any) -> Any:
    """`train` on a ring; None on ranks that take no part."""
    return train(folder, ring=jobs.make_ring(ranks, data=data), **options) if enter_job(ranks) else None


def predict_on_ring(ranks: int, data: int, folder: str, samples: int) -> Any:
    return predict(folder, samples, ring=jobs.make_ring(ranks, data=data)) if enter_job(ranks) else None
