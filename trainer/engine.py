"""DeepSpeed, and all its quirks in this one file. The loop knows four calls:

    loss_sum, num_valid = engine(batch)           a micro-batch's forward
    engine.backward(loss_sum, num_labels)         its gradient, divided by the labels of all ranks and micro-batches
    norm, applied = engine.step(fraction)         clip, and step unless a gradient is not finite
    engine.read(name), engine.load_moments(…)     a weight with its moments, whole, for checkpoints; and back again

What was found out, and is used here:
- DeepSpeed is told nothing of rings: every rank is a data-parallel one to it. Its gradients are means over the ranks, so
  local_sum · world / labels is exact for ZeRO 0 to 3, any split, accumulation and uneven masks. Its own sequence-parallel
  ways are wrong by a factor at some stage.
- Sums of gradients travel and gather in fp32 only if both dtypes are set; clipping is 1.0 unless set.
- Its first start on a CPU compiles a shared-memory op for over a minute; without the op gloo does that work.
- It makes process groups of its own without our timeout.
- Muon's steps take the place of its gradients before the norm is taken and clipped (bf16's ZeRO 1 aside): clipped to a norm of
  1, a step would be as many times too short as the model is large. So there is no clipping with Muon, and `norm` is of steps.
- In fp32, ZeRO 0 steps on gradients that are not finite; the other stages skip the step.
- In bf16, ZeRO 1 has an optimizer of its own, with fp32 sums of all gradients. Unless told to add each one when it comes
  (immediate_grad_update), it keeps them all in bf16 too until the backward is over.
- ZeRO 0 has no fp32 master weights beside bf16 ones: there the weights are fp32 and autocast makes the products bf16.
"""

import contextlib
import gc
import io
import logging
import math
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringspan.trainer import optim
from ringspan.trainer.config.schema import Config
from ringspan.trainer.config.validate import multiplies_bf16

Values = Callable[[str, str, int, int], Tensor]  # (a weight's name, "weight" or a moment, start, stop) → that part, flat
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}


def prepare(device: torch.device) -> None:
    """Before deepspeed is imported for the first time."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    warnings.filterwarnings("ignore", module="deepspeed")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # it calls what torch 2.13 renames
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Engine:
    def __init__(
        self, config: Config, build: Callable[[], nn.Module], values: Values, device: torch.device, accumulation: int
    ) -> None:
        prepare(device)
        import deepspeed

        gc.freeze()  # what stands by now, imports above all: else a rank would look through it at times, while the others wait
        self.zero, self.kind = config.engine.zero, config.optim.kind
        self.device, self.accumulation, self.clip = device, accumulation, config.optim.clip
        self.world = dist.get_world_size()
        self.on_cpu = config.engine.offload_optimizer
        bf16 = multiplies_bf16(config, device.type == "cuda")
        self.autocast = bf16 and self.zero == 0
        settings = _settings(config, bf16 and self.zero > 0, accumulation)
        with _built(deepspeed, settings):
            module = build()
        if self.zero < 3:
            module = module.to(device, torch.bfloat16 if bf16 and self.zero else torch.float32)
        named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
        with torch.no_grad():
            for name, weight in named:
                self._fill(weight, partial(values, name, "weight"))
        optimizer = optim.build(named, config)
        with contextlib.redirect_stdout(io.StringIO()):  # some of its optimizers print their memory
            self.ds, self.optimizer, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
        self.module, self.named = module, named
        set_timeouts(config.parallel.timeout)
        if bf16 and self.zero:  # the masters were made from rounded weights
            for name, weight in named:
                self._set(weight, None, partial(values, name, "weight"))
        self._linked = False
        self.backwards = 0  # since the last step
        self.applied = 0  # steps that moved the weights: what AdamW's bias correction counts

    def __call__(self, *batch: Any, **options: Any) -> tuple[Tensor, ...]:
        with self.precision():
            return self.ds(*batch, **options)

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    def backward(self, loss_sum: Tensor, num_labels: float) -> None:
        self.backwards += 1
        self.ds.set_gradient_accumulation_boundary(self.backwards == self.accumulation)
        with self._uncompiled():
            self.ds.backward(loss_sum * (self.world / max(num_labels, 1)), scale_wrt_gas=False)

    def step(self, fraction: float) -> tuple[float, bool]:
        """The gradient's norm before clipping, and whether the weights moved: the same on every rank."""
        assert self.backwards == self.accumulation, "a step comes after the backward of its last micro-batch"
        self.backwards = 0
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * fraction
        if self.zero == 0:
            norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), self.clip or math.inf))
            if not math.isfinite(norm):
                self.ds.zero_grad()
                return norm, False
        with self._uncompiled():
            self.ds.step()
        applied = self.ds.was_step_applied()
        self.applied += applied
        return norm if self.zero == 0 else float(self.ds.get_global_grad_norm()), applied

    def _uncompiled(self) -> contextlib.AbstractContextManager[Any]:
        """Its Muon compiles itself, which on a CPU takes a C++ compiler and longer than it saves."""
        plain = self.kind == "muon" and self.device.type == "cpu"
        return torch.compiler.set_stance("force_eager") if plain else contextlib.nullcontext()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.named]

    def shape(self, name: str) -> tuple[int, ...]:
        return _shape(self._weight[name])

    def moments(self, name: str) -> tuple[str, ...]:
        """Which averages the optimizer keeps of a weight."""
        return MOMENTS["muon" if getattr(self._weight[name], "use_muon", False) else "adamw"]

    def read(self, name: str) -> dict[str, Tensor]:
        """A weight in fp32 and its moments, whole. Every rank calls this with the same names in the same order."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        weight = self._weight[name]
        if self.zero == 0:
            state = self.optimizer.state.get(weight, {})
            found = {"weight": weight.detach().float()}
            found |= {key: state[key].float() if key in state else torch.zeros_like(weight) for key in self.moments(name)}
            return found
        if self.applied:
            self._link()
        found = {"weight": safe_get_full_fp32_param(weight)}
        for key in self.moments(name):
            if not self.applied:
                found[key] = torch.zeros_like(found["weight"])
            elif key == "momentum_buffer" and self._whole_momentum:
                slot, owns = self._momentum(weight)
                found[key] = slot.float() if owns else torch.zeros_like(found["weight"]).flatten()
                dist.all_reduce(found[key])
            else:
                found[key] = safe_get_full_optimizer_state(weight, key)
        return {key: value.reshape(_shape(weight)) for key, value in found.items()}

    @torch.no_grad()
    def load_moments(self, values: Values, applied: int) -> None:
        """Puts the optimizer where it was after so many steps. Each rank asks only for the parts that it owns."""
        self.applied = applied
        if not applied:
            return
        base = self.optimizer if self.zero == 0 else self.optimizer.optimizer
        if self.zero == 0:
            for name, weight in self.named:
                whole = {key: values(name, key, 0, weight.numel()).to(weight) for key in self.moments(name)}
                base.state[weight] = {key: x.view_as(weight).clone() for key, x in whole.items()} | self._count(weight)
            return
        flats = getattr(self.optimizer, "fp32_partitioned_groups_flat", None)
        pieces = flats or [piece for group in base.param_groups for piece in group["params"]]
        muon = {id(piece) for group in base.param_groups if group.get("use_muon") for piece in group["params"]}
        for index, piece in enumerate(pieces):
            if id(piece) in muon:
                mine = self.optimizer.params_in_partition[index] if self._whole_momentum else [piece]
                base.state[piece] = {"momentum_buffer": torch.zeros(sum(x.numel() for x in mine), device=self.device)}
            else:
                base.state[piece] = {key: torch.zeros_like(piece) for key in MOMENTS["adamw"]} | self._count(piece)
        self._link()
        for name, weight in self.named:
            for key in self.moments(name):
                if key == "momentum_buffer" and self._whole_momentum:
                    slot, _ = self._momentum(weight)
                    if slot is not None:
                        slot.copy_(values(name, key, 0, weight.numel()))
                else:
                    self._set(weight, key, partial(values, name, key))

    def close(self) -> None:
        self.ds.destroy()
        del self.ds, self.optimizer, self.module, self.named
        gc.collect()

    @property
    def _weight(self) -> dict[str, nn.Parameter]:
        return dict(self.named)

    def _count(self, piece: Tensor) -> dict[str, Tensor | int]:
        """torch counts in a tensor, DeepSpeed's CPU optimizer in an int."""
        return {"step": self.applied if self.on_cpu else torch.tensor(float(self.applied), device=piece.device)}

    @property
    def _whole_momentum(self) -> bool:
        """ZeRO 1 and 2 keep muon's momentum of whole weights, of each that a rank owns a piece of; bf16's ZeRO 1 of pieces."""
        return self.kind == "muon" and hasattr(self.optimizer, "params_in_partition")

    def _momentum(self, weight: nn.Parameter) -> tuple[Any, bool]:
        """A weight's momentum on this rank, flat, if it has it; and whether it is the first that does."""
        zero, base = self.optimizer, self.optimizer.optimizer
        for index, mine in enumerate(zero.params_in_partition):
            begin = 0
            for other in mine:
                if other is weight:
                    buffer = base.state[base.param_groups[index]["params"][0]]["momentum_buffer"]
                    offset = zero.grad_start_offset[index][dist.get_rank()][zero.get_param_id(weight)]
                    return buffer[begin : begin + weight.numel()], offset == 0
                begin += other.numel()
        return None, False

    def _link(self) -> None:
        """ZeRO 1 and 2 tie the moments to the weights after the first group's step, when the others have none yet."""
        if hasattr(self.optimizer, "_lazy_init_hp_params_optimizer_state") and not self._linked:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()
            self._linked = True

    def _fill(self, weight: nn.Parameter, part: Callable[[int, int], Tensor]) -> None:
        """Before DeepSpeed has the weight: whole, or this rank's piece of it."""
        if hasattr(weight, "ds_tensor"):
            weight.ds_tensor.copy_(_piece(weight, part))
        else:
            weight.copy_(part(0, weight.numel()).view_as(weight))

    @torch.no_grad()
    def _set(self, weight: nn.Parameter, key: str | None, part: Callable[[int, int], Tensor]) -> None:
        """This rank's piece of the fp32 master (key None) or of a moment."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        if self.zero == 3:
            piece = _piece(weight, part).to(self.device)
            safe_set_local_fp32_param(weight, piece) if key is None else safe_set_local_optimizer_state(weight, piece, key)
        elif weight._hp_mapping is not None:
            at = weight._hp_mapping.lp_fragment_address
            weight._hp_mapping.get_hp_fragment(key).copy_(part(at.start, at.start + at.numel))


def set_timeouts(seconds: float) -> None:
    """On every group that is alive: DeepSpeed's own were made with the default."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def _settings(config: Config, bf16: bool, accumulation: int) -> dict[str, Any]:
    engine = config.engine
    elements = engine.bucket_mb * 2**20 // 4
    zero: dict[str, Any] = dict(stage=engine.zero)
    if engine.zero:
        zero |= dict(reduce_bucket_size=elements, allgather_bucket_size=elements, overlap_comm=engine.zero > 1)
    if engine.zero == 3:
        zero |= dict(
            stage3_prefetch_bucket_size=engine.prefetch_mb * 2**20 // (2 if bf16 else 4),
            stage3_param_persistence_threshold=10_000,  # norms and biases stay whole
        )
    if engine.offload_optimizer:
        zero["offload_optimizer"] = dict(device="cpu", pin_memory=True)
    if engine.offload_parameters:
        zero["offload_param"] = dict(device="cpu", pin_memory=True)
    return dict(
        train_micro_batch_size_per_gpu=config.data.micro_batch,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=config.optim.clip if engine.zero else 0.0,
        communication_data_type="fp32",
        data_types=dict(grad_accum_dtype="fp32"),
        bf16=dict(enabled=bf16, immediate_grad_update=True),
        zero_optimization=zero,
        zero_allow_untested_optimizer=True,
        steps_per_print=None,
    )


def _built(deepspeed: Any, settings: dict[str, Any]) -> Any:
    """ZeRO 3 shards each weight the moment it is made, so no rank ever has them all."""
    if settings["zero_optimization"]["stage"] < 3:
        return contextlib.nullcontext()
    return deepspeed.zero.Init(config_dict_or_path=settings)  # a dtype given here is ignored on CPUs: bf16 it would be


def _shape(weight: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(weight, "ds_shape", weight.shape))


def _piece(weight: nn.Parameter, part: Callable[[int, int], Tensor]) -> Tensor:
    """This rank's piece of a weight under ZeRO 3; the last is filled up with zeros."""
    size, numel = weight.ds_tensor.numel(), weight.ds_numel
    begin = min(dist.get_rank() * size, numel)
    end = min(begin + size, numel)
    return nn.functional.pad(part(begin, end).float(), (0, size - (end - begin)))
