"""What a run does about memory before its first step: choose the plan on all ranks, and prepare the layers for it."""

import os
import sys
from dataclasses import asdict, replace

import torch

from ringspan.trainer.config import validate
from ringspan.trainer.config.compose import ConfigError
from ringspan.trainer.config.schema import Config, Model
from ringspan.trainer.distributed import DistributedContext
from ringspan.trainer.memory.kept import KeptTensors, host_sizes
from ringspan.trainer.memory.plan import MemoryPlan
from ringspan.trainer.memory.streamed import Streaming
from ringspan.trainer.model import GPT
from ringspan.trainer.monitoring import profiling
from ringspan.trainer.planning.host_memory import free_host_memory_per_rank
from ringspan.trainer.planning.machines import machine_of_run
from ringspan.trainer.planning.plans import PlannedStep, Planner


def choose_plan(config: Config, model: Model, device_name: str, distributed: DistributedContext) -> tuple[Planner, PlannedStep]:
    """Choose the memory plan on rank 0, for the least memory of all ranks; warn if it does not fit. All ranks call it together.

    The warning precedes all large allocations: a machine without enough memory may kill a rank silently.

    Args:
        config: a valid config.
        model: its resolved model.
        device_name: name of this rank's device. Rank 0's is taken.
        distributed: the ranks.

    Returns:
        The planner for this machine, and the plan, equal on all ranks.

    Raises:
        ConfigError: the plan needs far more memory than there is; raised on all ranks.
    """
    each = distributed.gather((profiling.rank_memory(distributed.device), free_host_memory_per_rank()))
    memory, host = map(min, zip(*each, strict=True))
    ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", distributed.world))
    name = distributed.broadcast(device_name)
    machine = machine_of_run(name, distributed.device.type == "cuda", memory, host, ranks_per_host)
    planner, plan, refusal = Planner(replace(config, model=model), distributed.world, machine), {}, ""
    if distributed.rank == 0:
        planned = planner.choose()
        plan, refusal = asdict(planned.plan), planner.refusal(planned)
        if not refusal and (warning := planner.misfit(planned)):
            text = f"memory: the plan does not fit, so the run may run out of memory: {warning}"
            print(text, file=sys.stderr, flush=True)
    plan, refusal = distributed.broadcast((plan, refusal))
    if refusal:
        raise ConfigError(refusal)
    return planner, planner.step(MemoryPlan(**plan))


def prepare_layers(model: GPT, streaming: Streaming | None, config: Config, num_rows: int, device: torch.device) -> None:
    """Take the host memory of the plan, and compile the layers.

    Args:
        model: the model that the engine took.
        streaming: how its layers are streamed; None if they are not.
        config: a valid config.
        num_rows: tokens of each sequence on this rank.
        device: this rank's device.

    Raises:
        ValueError: the host memory is not available.
    """
    gpu = device.type == "cuda"
    compiled, bf16 = validate.compiles(config, gpu, streamed=streaming is not None), validate.uses_bf16(config, gpu)
    if streaming is None:
        if compiled:
            model.compile_layers()
        return
    if compiled:
        streaming.compile()
    attention = torch.bfloat16 if bf16 else torch.float32
    hidden = torch.float32 if config.engine.zero == 0 else attention  # ZeRO 0 runs under autocast
    sizes = host_sizes(streaming.plan, model.config, config.data.micro_batch, num_rows, hidden, attention)
    try:
        streaming.kept = KeptTensors(device, sizes)
    except MemoryError as error:
        raise ValueError(str(error)) from None
