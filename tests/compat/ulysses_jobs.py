"""Bodies of tests of ringspan.compat.ulysses_sp through accelerate's sp_backend="deepspeed"; two ranks run them."""

import os
from typing import Any

import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
import deepspeed.runtime.sequence_parallel.ulysses_sp as deepspeed_classes
import torch
import torch.distributed as dist
import torch.distributed.nn
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ringspan.compat import ulysses_sp
from tests.hf.models import VOCABULARY, make_model

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its kernel for collectives on a CPU is compiled for minutes
THEIRS = deepspeed_classes.UlyssesSPAttentionHF, deepspeed_classes.UlyssesSPDataLoaderAdapter
DOCUMENTS = [1, 20, 3, 8]


def sample(index: int, packed: bool, padded: bool = False, length: int = 32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
    labels = ids.masked_fill(torch.rand(length, generator=generator) < 0.4, -100)
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS]) if packed else torch.arange(length)
    row = dict(input_ids=ids, position_ids=positions, labels=labels.masked_fill(positions == 0, -100))
    if padded:
        row["attention_mask"] = (torch.arange(length) < length - 5).long()
        row["labels"] = row["labels"].masked_fill(row["attention_mask"] == 0, -100)
    return row


def reset() -> None:
    """Forget the last run: accelerate's state, DeepSpeed's groups, transformers' replaced functions."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    mpu._release_sequence_parallel_groups()
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        for name in ("sdpa", "flash_attention_2"):
            table._local_mapping.pop(name, None)
    deepspeed_classes.UlyssesSPAttentionHF, deepspeed_classes.UlyssesSPDataLoaderAdapter = THEIRS


def make_parallelism(sp_size: int, core: str) -> ParallelismConfig:
    """accelerate's config of sequence parallelism, and the environment that its launcher would set."""
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_TORCH_DEVICE="cpu")
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=core)
    return ParallelismConfig(sp_backend="deepspeed", sp_size=sp_size, sp_handler=handler)


def make_accelerator(sp_size: int, core: str) -> Accelerator:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 0.0,
    }
    parallelism = make_parallelism(sp_size, core)
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), parallelism_config=parallelism)


def train(
    name: str, steps: int, packed: bool = False, padded: bool = False, length: int = 32, **installed: Any
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses and gradients of some steps, as accelerate's guide writes the loop. Without `installed`: DeepSpeed's classes."""
    reset()
    if installed:
        ulysses_sp.install(**installed)
    ranks = dist.get_world_size()
    core = "flash_attention_2" if name in ("gemma2", "gpt-oss") else "sdpa"  # transformers has no sdpa for these
    accelerator = make_accelerator(ranks, core)
    model = make_model(name, core, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows = [sample(i, packed, padded, length) for i in range(steps // ranks)]  # every rank of a sequence yields each row
    loader = DataLoader(rows, batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    group = mpu.get_sequence_parallel_group()
    losses, gradients = [], []
    for batch in loader:
        logits = model(**{key: x for key, x in batch.items() if key not in ("shift_labels", "attention_mask")}).logits
        labels = batch["shift_labels"]
        count = (labels != -100).sum()
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count.clamp(min=1)
        shares = torch.distributed.nn.functional.all_gather(loss, group=group)
        counts = torch.distributed.nn.functional.all_gather(count, group=group)
        total = sum(s * n for s, n in zip(shares, counts, strict=True)) / sum(counts)
        model.backward(total)
        losses.append(float(total.detach()))
        gradients.append({key: p.grad.clone() for key, p in model.module.named_parameters() if p.grad is not None})
        model.step()
    return losses, gradients


def one_rank(
    name: str, steps: int, packed: bool = False, padded: bool = False, length: int = 32
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """The same steps without sequence parallelism, by dense attention of the tests' oracle."""
    model = make_model(name, "oracle", torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, gradients = [], []
    for step in range(steps):
        row = {key: x[None] for key, x in sample(step // dist.get_world_size(), packed, padded, length).items()}
        logits = model(**{key: x for key, x in row.items() if key != "labels"}, use_cache=False).logits
        loss = F.cross_entropy(logits[0, :-1], row["labels"][0, 1:])
        (
            loss * dist.get_world_size()
        ).backward()  # DeepSpeed sums over the ranks of a sequence, and the all-gather's backward too
        losses.append(float(loss))
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def differences(reference: Any, result: Any) -> tuple[float, float]:
    """Largest relative difference of losses, and of gradients to the largest entry of each."""
    losses = [abs(a - b) / abs(a) for a, b in zip(reference[0], result[0], strict=True)]
    worst = 0.0
    for expected, found in zip(reference[1], result[1], strict=True):
        assert expected.keys() == found.keys()
        worst = max([worst, *(float((found[k] - x).abs().max() / x.abs().max()) for k, x in expected.items())])
    return max(losses), worst


def compare_with_deepspeed(steps: int, installs: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Steps of a llama against DeepSpeed's own classes with sdpa."""
    reference = train("llama", steps)
    assert len(reference[0]) == steps
    return [differences(reference, train("llama", steps, **options)) for options in installs]


def trainer_losses(folder: str, **installed: Any) -> list[float]:
    """Losses of six steps of transformers' Trainer. Without `installed`: DeepSpeed's classes."""
    reset()
    if installed:
        ulysses_sp.install(**installed)
    config = dict(zero_optimization=dict(stage=0), gradient_accumulation_steps="auto", train_batch_size="auto")
    config |= dict(train_micro_batch_size_per_gpu="auto")
    arguments = TrainingArguments(
        folder, parallelism_config=make_parallelism(dist.get_world_size(), "sdpa"), deepspeed=config, max_steps=6,
        per_device_train_batch_size=1, learning_rate=1e-2, logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no",
        optim="sgd", lr_scheduler_type="constant", seed=3,
    )  # fmt: skip
    rows = [sample(i, False) for i in range(12)]
    trainer = Trainer(make_model("llama", "sdpa", torch.float32), arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def compare_with_one_rank(cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[tuple[float, float]]:
    """Steps of models that DeepSpeed's classes cannot train, against dense attention on one rank."""
    return [differences(one_rank(name, 4, **data), train(name, 4, **data, **options)) for name, data, options in cases]


def forward_wrong(change: str) -> None:
    """One forward of a llama whose batch does not fit the ring."""
    reset()
    ulysses_sp.install()
    model = make_model("llama", "sdpa", torch.float32).train()
    options = dict(seq_length=40, seq_length_is_variable=False) if change == "length" else {}
    classes = ulysses_sp.UlyssesSPAttentionHF, ulysses_sp.UlyssesSPDataLoaderAdapter
    classes[0].register_with_transformers(model, "sdpa", dist.get_world_size(), 1, **options)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    adapter = classes[1](DataLoader([sample(0, False)]), rank, mpu.get_sequence_parallel_group(), ranks, "cpu")
    batch = next(adapter)
    inputs = dict(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    if change == "layout":
        inputs["position_ids"] = torch.arange(32).chunk(ranks)[rank][None]
    elif change == "mask":
        inputs["attention_mask"] = torch.tensor([[1] * 15 + [0]])
    elif change == "positions":
        inputs["position_ids"] = inputs["position_ids"].expand(3, 1, -1)
    model(**inputs)


def evaluate() -> float:
    """Difference to dense attention of a model in evaluation mode, with whole sequences on each rank."""
    reset()
    ulysses_sp.install()
    model = make_model("mistral", "sdpa", torch.float32).eval()
    register = ulysses_sp.UlyssesSPAttentionHF.register_with_transformers
    register(model, "sdpa", dist.get_world_size(), 1, disable_in_eval=True)
    ids = sample(dist.get_rank(), False)["input_ids"][None]
    expected = make_model("mistral", "oracle", torch.float32)(input_ids=ids, use_cache=False).logits
    return float((model(input_ids=ids, use_cache=False).logits - expected).abs().max())
