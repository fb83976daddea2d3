"""The DeepSpeed engine. This file holds all DeepSpeed specifics; the loop uses four calls:

    loss_sum, num_valid, … = engine(batch)        forward of a micro-batch
    engine.backward(loss_sum, num_labels)         gradient, divided by the labels of all ranks and micro-batches
    norm, applied = engine.step(fraction)         clip, then step unless a gradient is not finite
    engine.read(name), engine.load_moments(…)     a full weight with its moments, for checkpoints

Every rank is a data-parallel rank for DeepSpeed. Its gradients are means over the ranks, so that local_sum · world / labels
is exact for ZeRO 0 to 3, any split, accumulation and uneven masks. (DeepSpeed's own sequence parallelism is wrong by a factor
at some stage.) The comments below name the other DeepSpeed behaviours that this code relies on.
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
from ringspan.trainer.config.validate import uses_bf16
from ringspan.trainer.model import Segment

Values = Callable[[str, str, int, int], Tensor]  # (weight name, "weight" or a moment, start, stop) → elements start … stop - 1
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}


def prepare(device: torch.device) -> None:
    """Import deepspeed with quiet logging and without its shared-memory op for CPUs."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    warnings.filterwarnings("ignore", module="deepspeed")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # deprecated in torch 2.13
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":  # compiling the op takes over a minute; without it gloo communicates
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Engine:
    """A model, its optimizer and its ZeRO stage.

    Args:
        config: the run's config.
        build: makes the model; ZeRO 3 shards each weight as it is made.
        values: initial weights, from a seed or a checkpoint. Each rank reads only the elements that it owns.
        device: this rank's device.
        accumulation: micro-batches per step.
    """

    def __init__(
        self, config: Config, build: Callable[[], nn.Module], values: Values, device: torch.device, accumulation: int
    ) -> None:
        prepare(device)
        import deepspeed

        gc.freeze()  # a collection would scan all imported objects on one rank while the other ranks wait
        self.zero, self.kind = config.engine.zero, config.optim.kind
        self.device, self.accumulation, self.clip = device, accumulation, config.optim.clip
        self.world = dist.get_world_size()
        self.on_cpu = config.engine.offload_optimizer
        bf16 = uses_bf16(config, device.type == "cuda")
        self.autocast = bf16 and self.zero == 0
        settings = _settings(config, bf16 and self.zero > 0, accumulation)
        with _sharded_init(deepspeed, settings):
            module = build()
        if self.zero < 3:
            module = module.to(device, torch.bfloat16 if bf16 and self.zero else torch.float32)
        if self.zero == 3:  # row functions read weights without calling the modules that own them, so hooks are on the segments
            deepspeed.utils.set_z3_leaf_modules(module, [Segment])
        named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
        with torch.no_grad():
            for name, weight in named:
                self._initialize(weight, partial(values, name, "weight"))
        optimizer = optim.build_optimizer(named, config)
        with contextlib.redirect_stdout(io.StringIO()):  # some DeepSpeed optimizers print their memory use
            self.ds, self.optimizer, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
        self.module, self.named = module, named
        set_timeouts(config.parallel.timeout)
        if bf16 and self.zero:  # DeepSpeed made the fp32 master weights from rounded ones
            for name, weight in named:
                self._set(weight, None, partial(values, name, "weight"))
        self._linked = False
        self.num_backwards = 0  # since the last step
        self.applied = 0  # steps that changed the weights; AdamW's bias correction counts them

    def __call__(self, *batch: Any, **options: Any) -> tuple[Tensor, ...]:
        """Run the model's forward."""
        with self.precision():
            return self.ds(*batch, **options)

    def precision(self) -> torch.autocast:
        """Return the autocast context of a forward.

        DeepSpeed's ZeRO 0 has no fp32 master weights next to bf16 ones. There the weights are fp32, and autocast runs
        matmuls in bf16.
        """
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    def backward(self, loss_sum: Tensor, num_labels: float) -> None:
        """Accumulate the gradient of loss_sum / num_labels.

        Args:
            loss_sum: scalar, this rank's sum over its labels.
            num_labels: labels of all ranks and micro-batches of the step.
        """
        self.num_backwards += 1
        self.ds.set_gradient_accumulation_boundary(self.num_backwards == self.accumulation)
        with self._uncompiled():
            self.ds.backward(loss_sum * (self.world / max(num_labels, 1)), scale_wrt_gas=False)

    def warm_up(self, first_weight: Tensor, *batch: Any, **options: Any) -> None:
        """Run a forward and backward without a step; their gradients are dropped. first_weight: where the backward ends."""
        if self.zero < 3:
            with self.precision():
                loss = self.module(*batch, **options)[0]
            torch.autograd.grad(loss, first_weight)  # accumulates no gradient of another weight
        else:  # DeepSpeed's hooks gather the weights
            self.ds.set_gradient_accumulation_boundary(False)
            self.ds.backward(self(*batch, **options)[0], scale_wrt_gas=False)
            self.optimizer.zero_grad()  # also counts backwards from 0 again: the next one overwrites the gradients

    def step(self, fraction: float) -> tuple[float, bool]:
        """Step with the learning rates `fraction` · peak.

        In fp32, DeepSpeed's ZeRO 0 steps on gradients that are not finite; the other stages skip the step, as does this
        function for ZeRO 0.

        Returns:
            The gradient's norm before clipping, and whether the weights changed; the same on every rank. With Muon the norm is
            the step's, because Muon replaces the gradients before the norm is computed (except in bf16's ZeRO 1). Clipping
            would then shorten each step by a factor that grows with the model, so that there is none with Muon.
        """
        assert self.num_backwards == self.accumulation, "a step needs the backward of all its micro-batches"
        self.num_backwards = 0
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
        """DeepSpeed compiles its Muon, which on a CPU needs a C++ compiler and takes more time than it saves."""
        eager = self.kind == "muon" and self.device.type == "cpu"
        return torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.named]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a weight, sharded or not."""
        return _shape(self._weight[name])

    def moments(self, name: str) -> tuple[str, ...]:
        """Return the names of the moments that the optimizer keeps of a weight."""
        return MOMENTS["muon" if getattr(self._weight[name], "use_muon", False) else "adamw"]

    def replicas(self) -> list[tuple[str, Tensor]]:
        """Return the weights that every rank holds in full: all, except under ZeRO 3, which shards them."""
        return [] if self.zero == 3 else [(name, weight.detach()) for name, weight in self.named]

    def read(self, name: str) -> dict[str, Tensor]:
        """Return a weight in fp32 ("weight") and its moments, each in full shape.

        A collective: every rank calls it with the same names in the same order.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        weight = self._weight[name]
        if self.zero == 0:
            state = self.optimizer.state.get(weight, {})
            values = {"weight": weight.detach().float()}
            values |= {key: state[key].float() if key in state else torch.zeros_like(weight) for key in self.moments(name)}
            return values
        if self.applied:
            self._link()
        values = {"weight": safe_get_full_fp32_param(weight)}
        for key in self.moments(name):
            if not self.applied:
                values[key] = torch.zeros_like(values["weight"])
            elif key == "momentum_buffer" and self._keeps_full_momentum:
                momentum, is_first = self._momentum(weight)
                values[key] = momentum.float() if is_first else torch.zeros_like(values["weight"]).flatten()
                dist.all_reduce(values[key])
            else:
                values[key] = safe_get_full_optimizer_state(weight, key)
        return {key: value.reshape(_shape(weight)) for key, value in values.items()}

    @torch.no_grad()
    def allocate_moments(self) -> None:
        """Allocate the moments before the first step, so that memory that is missing for them is missed at the start.

        Without this, AdamW allocates the same zeros in its first step.
        """
        base = self.optimizer if self.zero == 0 else self.optimizer.optimizer
        if self.zero == 0:
            for name, weight in self.named:
                base.state[weight] = {key: torch.zeros_like(weight) for key in self.moments(name)} | self._step_count(weight)
            return
        flat_shards = getattr(self.optimizer, "fp32_partitioned_groups_flat", None)
        shards = flat_shards or [shard for group in base.param_groups for shard in group["params"]]
        muon = {id(shard) for group in base.param_groups if group.get("use_muon") for shard in group["params"]}
        for index, shard in enumerate(shards):
            if id(shard) in muon:
                local = self.optimizer.params_in_partition[index] if self._keeps_full_momentum else [shard]
                base.state[shard] = {"momentum_buffer": torch.zeros(sum(x.numel() for x in local), device=self.device)}
            else:
                base.state[shard] = {key: torch.zeros_like(shard) for key in MOMENTS["adamw"]} | self._step_count(shard)

    @torch.no_grad()
    def load_moments(self, values: Values, applied: int) -> None:
        """Restore the optimizer's moments after `applied` steps. Each rank reads only the elements that it owns."""
        self.applied = applied
        self.allocate_moments()
        if not applied:
            return
        if self.zero == 0:
            for name, weight in self.named:
                for key in self.moments(name):
                    self.optimizer.state[weight][key].copy_(values(name, key, 0, weight.numel()).view_as(weight))
            return
        self._link()
        for name, weight in self.named:
            for key in self.moments(name):
                if key == "momentum_buffer" and self._keeps_full_momentum:
                    momentum, _ = self._momentum(weight)
                    if momentum is not None:
                        momentum.copy_(values(name, key, 0, weight.numel()))
                else:
                    self._set(weight, key, partial(values, name, key))

    def close(self) -> None:
        self.ds.destroy()
        del self.ds, self.optimizer, self.module, self.named
        gc.collect()

    @property
    def _weight(self) -> dict[str, nn.Parameter]:
        return dict(self.named)

    def _step_count(self, shard: Tensor) -> dict[str, Tensor | int]:
        """torch counts steps in a tensor, DeepSpeed's CPU optimizer in an int."""
        return {"step": self.applied if self.on_cpu else torch.tensor(float(self.applied), device=shard.device)}

    @property
    def _keeps_full_momentum(self) -> bool:
        """Whether a rank keeps Muon's momentum of every weight it owns a part of in full.

        ZeRO 1 and 2 do; bf16's ZeRO 1 keeps shards.
        """
        return self.kind == "muon" and hasattr(self.optimizer, "params_in_partition")

    def _momentum(self, weight: nn.Parameter) -> tuple[Any, bool]:
        """Return a weight's flat momentum on this rank or None, and whether this is the first rank that has it."""
        zero, base = self.optimizer, self.optimizer.optimizer
        for index, local in enumerate(zero.params_in_partition):
            begin = 0
            for parameter in local:
                if parameter is weight:
                    buffer = base.state[base.param_groups[index]["params"][0]]["momentum_buffer"]
                    offset = zero.grad_start_offset[index][dist.get_rank()][zero.get_param_id(weight)]
                    return buffer[begin : begin + weight.numel()], offset == 0
                begin += parameter.numel()
        return None, False

    def _link(self) -> None:
        """Link the moments of ZeRO 1 and 2 to the weights again.

        DeepSpeed links them after the first group's step, when the other groups have no moments yet.
        """
        if hasattr(self.optimizer, "_lazy_init_hp_params_optimizer_state") and not self._linked:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()
            self._linked = True

    def _initialize(self, weight: nn.Parameter, read: Callable[[int, int], Tensor]) -> None:
        """Fill a weight, or this rank's shard of it, before DeepSpeed has it."""
        if hasattr(weight, "ds_tensor"):
            weight.ds_tensor.copy_(_local_shard(weight, read))
        else:
            weight.copy_(read(0, weight.numel()).view_as(weight))

    @torch.no_grad()
    def _set(self, weight: Any, key: str | None, read: Callable[[int, int], Tensor]) -> None:
        """Write this rank's shard of the fp32 master weight (key None) or of a moment."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        if self.zero == 3:
            shard = _local_shard(weight, read).to(self.device)
            safe_set_local_fp32_param(weight, shard) if key is None else safe_set_local_optimizer_state(weight, shard, key)
        elif weight._hp_mapping is not None:
            fragment = weight._hp_mapping.lp_fragment_address
            weight._hp_mapping.get_hp_fragment(key).copy_(read(fragment.start, fragment.start + fragment.numel))


def set_timeouts(seconds: float) -> None:
    """Set the timeout of every process group; DeepSpeed makes its groups with the default one."""
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
            stage3_param_persistence_threshold=10_000,  # norms and biases are not sharded
        )
    if engine.offload_optimizer:
        zero["offload_optimizer"] = dict(device="cpu", pin_memory=True)
    if engine.offload_parameters:
        zero["offload_param"] = dict(device="cpu", pin_memory=True)
    return dict(
        train_micro_batch_size_per_gpu=config.data.micro_batch,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=config.optim.clip if engine.zero else 0.0,  # 1.0 if left out
        # Gradients are reduced and accumulated in fp32 only if both dtypes are set.
        communication_data_type="fp32",
        data_types=dict(grad_accum_dtype="fp32"),
        # bf16's ZeRO 1 has an optimizer of its own, with fp32 sums of all gradients. Without immediate_grad_update it also
        # keeps all bf16 gradients until the backward ends.
        bf16=dict(enabled=bf16, immediate_grad_update=True),
        zero_optimization=zero,
        zero_allow_untested_optimizer=True,
        steps_per_print=None,
    )


def _sharded_init(deepspeed: Any, settings: dict[str, Any]) -> Any:
    """Under ZeRO 3 shard each weight as it is made, so that no rank ever holds them all."""
    if settings["zero_optimization"]["stage"] < 3:
        return contextlib.nullcontext()
    return deepspeed.zero.Init(config_dict_or_path=settings)  # on CPUs it ignores a dtype argument and takes bf16


def _shape(weight: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(weight, "ds_shape", weight.shape))


def _local_shard(weight: Any, read: Callable[[int, int], Tensor]) -> Tensor:
    """Return this rank's shard of a weight under ZeRO 3; zeros fill the last one."""
    size, numel = weight.ds_tensor.numel(), weight.ds_numel
    begin = min(dist.get_rank() * size, numel)
    end = min(begin + size, numel)
    return nn.functional.pad(read(begin, end).float(), (0, size - (end - begin)))
