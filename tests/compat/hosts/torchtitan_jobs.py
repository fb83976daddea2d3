"""Steps of torchtitan's smallest llama on every rank of a pool, through its own functions of parallelism."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torchtitan.trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention

from ringspan.integrations.torchtitan import RingspanAttention, use_ringspan
from tests.compat.hosts.jobs import DOCUMENTS, LENGTH, largest_difference, set_weights, step_results, tokens

LEGACY = "partial_dtensor"


def make_model(ours: bool, window: int | None = None) -> nn.Module:
    set_spmd_backend(LEGACY)
    config = llama3._debugmodel("flex")
    config.layers = config.layers[:2]
    if ours:
        use_ringspan(config, window)
    else:
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    set_weights(model)
    return model


def positions_of(packed: bool, rows: int) -> Tensor:
    lengths = DOCUMENTS if packed else [LENGTH]
    return torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def by_documents(model: nn.Module, packed: bool, rows: int) -> dict[str, Tensor]:
    """A step of torchtitan's own attention, for each document alone."""
    ids, labels = tokens(rows)
    lengths = DOCUMENTS if packed else [LENGTH]
    pieces = zip(ids.split(lengths, 1), labels.split(lengths, 1), strict=True)
    return step_results(
        model, sum(summed_loss(model(i, torch.arange(i.shape[1])[None].expand(rows, -1)), x) for i, x in pieces)
    )


def one_rank() -> float:
    """Difference of our attention to torchtitan's, without context parallelism."""
    return largest_difference(by_documents(make_model(False), False, 2), by_documents(make_model(True), False, 2))


def context_parallel(packed: bool, balancer: str | None) -> float:
    """Difference of a step of two rows under context parallelism and FSDP2 to torchtitan's own attention on one rank."""
    ranks = dist.get_world_size()
    model = make_model(True)
    parallelism = ParallelismConfig(context_parallel_degree=ranks, spmd_backend=LEGACY)
    with patch.object(parallel_dims, "device_type", "cpu"):  # torchtitan takes "cuda" where there is no accelerator
        dims = ParallelDims.from_config(parallelism, ranks)
        dims.build_mesh()
    training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32")
    options: dict[str, Any] = dict(parallel_dims=dims, training=training, parallelism=parallelism, dump_folder="")
    llama3.parallelize.parallelize_llama(model, compile_config=CompileConfig(enable=False), ac_config=None, **options)
    assert all(isinstance(layer.attention.inner_attention, RingspanAttention) for layer in model.layers.values())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    ids, labels = tokens(2)
    kwargs = dict(positions=positions_of(packed, 2))
    device = torch.device("cpu")
    prepare = torchtitan.trainer.prepare_context_parallel_input
    ids, labels, kwargs = prepare(ids, labels, kwargs, dims.get_mesh("cp"), device, balancer, None)
    loss = summed_loss(model(ids, **kwargs), labels)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    results = {"loss": total} | {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    with patch.object(dist, "is_initialized", lambda: False):
        expected = by_documents(make_model(False), packed, 2)
    return largest_difference(expected, results)


def wrong_backend() -> None:
    """A call as under another spmd_backend, which gathers keys."""
    layer = RingspanAttention.Config().build()
    x = torch.randn(1, 8, 2, 16)
    layer(x, torch.cat([x, x], 1), torch.cat([x, x], 1))
