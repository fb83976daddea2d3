"""Validates a config: values out of bounds, unused options, and options that contradict each other. Imports no torch.

Each problem is one line, `option=value: what is wrong; what works`. All problems of a config are reported together.
"""

import difflib
import importlib.util
import math
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from ringspan.trainer.checkpoint import compatibility
from ringspan.trainer.config.mixture import BYTES_VOCABULARY, only_shards, shares, tokenizer_file
from ringspan.trainer.config.schema import Config, Hardware, Model, Rope, Source
from ringspan.trainer.memory.plan import KEYWORDS, parse

# (option, values of it that use other options (empty: any value above 0), those other options). An option that is set but
# unused would be ignored silently, so it is a problem.
USED_ONLY_WITH: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...] = (
    ("model.positions", ("rope",), ("rope.base",)),
    ("model.positions", ("learned",), ("model.max_positions",)),
    ("rope.kind", ("yarn", "llama3"), ("rope.original_length",)),
    ("rope.kind", ("linear", "ntk", "yarn", "llama3"), ("rope.layers",)),
    ("rope.kind", ("yarn",), ("rope.beta_fast", "rope.beta_slow", "rope.attention_factor")),
    ("rope.kind", ("llama3",), ("rope.low_freq_factor", "rope.high_freq_factor")),
    ("tokenizer.kind", ("hf", "tiktoken"), ("tokenizer.path", "tokenizer.begin", "tokenizer.end")),
    ("engine.zero", (1, 2, 3), ("engine.bucket_mb",)),
    ("engine.zero", (3,), ("engine.prefetch_mb",)),
    ("optim.kind", ("muon",), ("optim.muon_lr", "optim.muon_momentum")),
    ("schedule.kind", ("cosine", "linear", "wsd"), ("schedule.floor",)),
    ("schedule.kind", ("wsd",), ("schedule.decay",)),
    ("tracking.wandb", ("offline", "online"), ("tracking.project", "tracking.entity", "tracking.tags")),
    ("tracking.wandb", ("online",), ("tracking.init_timeout",)),
    ("evaluate.batches", (), ("evaluate.every", "evaluate.bins")),
    ("evaluate.sample", (), ("evaluate.temperature", "evaluate.sample_every")),
)
USED_ONLY_BY_SOURCES = (
    ("kind", ("text",), ("text_key",)),
    ("kind", ("tokens",), ("dtype", "end_token", "header")),
    ("kind", ("recall",), ("keys", "values", "facts", "questions")),
    ("kind", ("passkey", "needles"), ("digits",)),
    ("kind", ("needles",), ("families", "num_questions", "seen", "random_words")),
)
ITEMS = {int: "a whole number", float: "a number", str: "a text"}  # of list options


def validate_config(config: Config, world_size: int, planning: bool = False) -> list[str]:
    """Return every problem of a config.

    Args:
        config: a composed config.
        world_size: number of ranks.
        planning: the config is for `ringspan check`; the run's files and machine may be absent.
    Returns:
        One line per problem; empty for a valid config.
    """
    problems = validate_values(config)
    if problems:
        return problems  # the rules below may divide by these values
    problems += validate_rope(config.rope)
    if replace(config.hardware, ignore_plan=False) != Hardware() and not planning:
        problems.append(f"hardware.name={config.hardware.name}: only `ringspan check` plans for a machine; leave it out")
    if config.hardware.host_gib and (config.hardware.name == "cpu" or not on_gpu(config)):
        problems.append(
            f"hardware.host_gib={config.hardware.host_gib:g}: nothing is offloaded without GPUs; set hardware.memory_gib"
        )
    problems += filter(None, unused_options(config).values())
    for rule in (validate_model, _data, _mesh, _engine, _optim, _run, *([] if planning else [_files])):
        problems += rule(config)
    return problems or list(_ranks(config, world_size))


def validate_values(node: Any, prefix: str = "") -> list[str]:
    """Return the values of a dataclass that violate the choices and bounds of its fields."""
    problems = []
    for field in fields(node):
        value, name = getattr(node, field.name), prefix + field.name
        if is_dataclass(value):
            problems += validate_values(value, name + ".")
        elif isinstance(value, dict):
            for key, item in value.items():
                problems += validate_values(item, f"{name}.{key}.")
        if isinstance(value, list):
            (kind,) = typing.get_args(field.type)
            wrong = [item for item in value if type(item) is not kind]
            problems += [f"{name}={value}: {item!r} is not {ITEMS[kind]}; write a list as [a,b]" for item in wrong[:1]]
        choices, least, above = (field.metadata.get(kind) for kind in ("choices", "least", "above"))
        if choices and value not in choices:
            problems.append(f"{name}={value}: choose {', '.join(map(str, choices))}")
        numbers = value if isinstance(value, list) else [value]
        for number in (x for x in numbers if isinstance(x, int | float)):
            if not math.isfinite(number):
                problems.append(f"{name}={value}: it must be a finite number")
            elif least is not None and number < least:
                problems.append(f"{name}={value}: it must be at least {least:g}")
            elif above is not None and number <= above:
                problems.append(f"{name}={value}: it must be above {above:g}")
    return problems


def unused_options(config: Config) -> dict[str, str]:
    """Return the options that this config does not use, each with a problem if it is set, or "" if it has its default."""
    problems = dict(_unused(config, Config(), USED_ONLY_WITH, ""))
    for name, source in config.data.sources.items():
        problems |= _unused(source, Source(), USED_ONLY_BY_SOURCES, f"data.sources.{name}.")
    return problems


def _unused(node: Any, defaults: Any, table: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for switch, users, names in table:
        setting = attrgetter(switch)(node)
        if setting in users or (not users and setting):
            continue
        required = f"{prefix}{switch}={' or '.join(map(str, users))}" if users else f"{prefix}{switch} above 0"
        for name in names:
            value, default = attrgetter(name)(node), attrgetter(name)(defaults)
            problem = (
                f"{prefix}{name}={value}, {prefix}{switch}={setting}: only {required} uses it; "
                f"set that, or leave {prefix}{name}={default}"
            )
            yield prefix + name, problem * (value != default)


def mesh_of(config: Config, world_size: int) -> tuple[int, int, int]:
    """Return (data, ring, ulysses) for world_size ranks; 0 in the config stands for the ranks left over by the others."""
    data, ring, ulysses = config.parallel.data, config.parallel.ring, config.parallel.ulysses
    if not ring:
        ring = max(1, world_size // (max(1, data) * ulysses))
    if not data:
        data = max(1, world_size // (ring * ulysses))
    return data, ring, ulysses


def uses_bf16(config: Config, gpu: bool) -> bool:
    """Whether matmuls run in bf16."""
    return config.engine.precision == "bf16" or (config.engine.precision == "auto" and gpu)


def compiles(config: Config, gpu: bool, streamed: bool) -> bool:
    """Whether layers are compiled: whole layers, or the row functions of streamed ones, which ZeRO 3's hooks do not reach."""
    if config.engine.zero == 3 and not streamed:
        return False
    return config.engine.compile == "on" or (config.engine.compile == "auto" and gpu)


def has_gpu() -> bool:
    """Whether the machine has a GPU device file: a guess without importing torch, which decides later."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()


def on_gpu(config: Config) -> bool:
    """Whether the run, or the plan, is for GPUs."""
    if config.hardware.name not in ("auto", "cpu"):
        return config.parallel.device != "cpu"  # a plan for a named machine
    return config.parallel.device == "cuda" or (config.parallel.device == "auto" and has_gpu())


def validate_shape(model: Model) -> Iterator[str]:
    """Yield the problems of a model's shape, independent of data and ranks. The model also calls this."""
    if model.heads % model.kv_heads:
        yield f"model.heads={model.heads}, model.kv_heads={model.kv_heads}: heads must be a multiple of kv_heads"
    if not model.head_dim and model.dim % model.heads:
        yield f"model.dim={model.dim}, model.heads={model.heads}: heads must divide dim, or set model.head_dim"
    head_dim = model.head_dim or model.dim // model.heads
    if not 16 <= head_dim <= 256 or head_dim % 8:
        yield f"model.head_dim={head_dim}: attention supports 16 to 256, in steps of 8"
    if any(window < 0 for window in model.windows):
        yield f"model.windows={model.windows}: a window is a number of tokens, or 0 for all keys"
    if model.dropout >= 1:
        yield f"model.dropout={model.dropout}: it must be below 1"


def validate_model(config: Config) -> Iterator[str]:
    """Yield the problems of the model and of its positions."""
    model = config.model
    yield from validate_shape(model)
    if model.positions == "learned" and config.rope.kind != "base":
        yield f"rope.kind={config.rope.kind}: model.positions=learned has no rotary positions to scale; use rope=base"
    if config.rope.layers == "full" and not (any(model.windows) and 0 in model.windows):
        yield (
            f"rope.layers=full, model.windows={model.windows}: it tells layers with a window from those without, and the "
            "model does not have both; use rope.layers=all"
        )
    if model.positions == "learned" and 0 < model.max_positions < config.data.length:
        yield f"model.max_positions={model.max_positions}: data.length={config.data.length} needs as many rows; 0 sets them"


def validate_rope(rope: Rope) -> Iterator[str]:
    """Yield the problems of the rotary options. The model also calls this."""
    if rope.kind == "base" and rope.factor != 1:
        yield f"rope.factor={rope.factor}: rope.kind=base scales nothing; choose linear, ntk, yarn or llama3"
    if rope.kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        yield f"rope.low_freq_factor={rope.low_freq_factor}: it must be below rope.high_freq_factor={rope.high_freq_factor}"
    if rope.kind == "yarn" and rope.beta_slow >= rope.beta_fast:
        yield f"rope.beta_slow={rope.beta_slow}: it must be below rope.beta_fast={rope.beta_fast}"


def _data(config: Config) -> Iterator[str]:
    data, tokenizer = config.data, config.tokenizer
    if not data.sources:
        yield "data.sources: there is none; choose data=mix, stdlib, packages, recall, passkey, needles, text or tokens"
    elif not sum(source.weight for source in data.sources.values()):
        yield "data.sources: every weight is 0; set one above 0"
    else:
        try:
            shares({name: source.weight for name, source in data.sources.items()})
        except ValueError as error:
            yield str(error)
    for name, source in data.sources.items():
        if source.kind not in ("text", "tokens") and source.paths:
            yield f"data.sources.{name}.paths={source.paths}: {source.kind} reads no files; use kind: text"
        if source.kind == "tokens" and not config.model.vocabulary:
            yield f"data.sources.{name}: token shards do not store the vocabulary size; set model.vocabulary"
        if source.random_words > 1:
            yield f"data.sources.{name}.random_words={source.random_words:g}: it is a share; set 0 to 1"
    if data.held_out >= 1:
        yield f"data.held_out={data.held_out}: it must be below 1, so that data for training remain"
    if tokenizer.kind == "bytes" and 0 < config.model.vocabulary < BYTES_VOCABULARY and not only_shards(data):
        yield (
            f"model.vocabulary={config.model.vocabulary}: bytes need {BYTES_VOCABULARY} ids, one of which ends documents; "
            f"set 0 or at least {BYTES_VOCABULARY}"
        )


def _files(config: Config) -> Iterator[str]:
    """Files and folders that a run needs on this machine; a plan needs none of them."""
    resume = config.checkpoint.resume
    for name, source in config.data.sources.items():
        if source.kind not in ("text", "tokens"):
            continue
        if not source.paths:
            yield f"data.sources.{name}.paths=[]: {source.kind} reads files; write 'data.sources.{name}.paths=[a,b/*.txt]'"
        for path in source.paths:
            if not any(c in path for c in "*?[") and not Path(path).expanduser().exists():
                yield f"data.sources.{name}.paths: {path} does not exist"
    if config.tokenizer.kind != "bytes":
        try:
            tokenizer_file(config.tokenizer)
        except ValueError as error:
            yield str(error)
    if config.init_from and not Path(config.init_from).expanduser().is_dir():
        yield f"init_from={config.init_from}: there is no such folder"
    if resume not in ("auto", "none") and not Path(resume).expanduser().is_dir():
        yield f"checkpoint.resume={resume}: choose auto, none, or the folder of a checkpoint that exists"


def _mesh(config: Config) -> Iterator[str]:
    parallel, heads = config.parallel, config.model.heads
    if parallel.layout == "striped" and parallel.ulysses > 1:
        yield f"parallel.layout=striped, parallel.ulysses={parallel.ulysses}: striped does not support ulysses; use zigzag"
    if heads % parallel.ulysses:
        yield f"parallel.ulysses={parallel.ulysses}, model.heads={heads}: it splits the heads, so it must divide model.heads"
    if config.debug.cut_ring and (parallel.layout != "contiguous" or parallel.ulysses > 1 or config.engine.memory != "none"):
        yield (
            f"debug.cut_ring=true, parallel.layout={parallel.layout}, parallel.ulysses={parallel.ulysses}, "
            f"engine.memory={config.engine.memory}: each rank attends to its own range of tokens, without a memory plan; "
            "use parallel.layout=contiguous, parallel.ulysses=1 and engine.memory=none"
        )
    if parallel.device == "cuda" and not has_gpu():
        yield "parallel.device=cuda: this machine has no GPU; use auto or cpu"
    if parallel.attention in ("triton", "hopper") and not on_gpu(config):
        yield f"parallel.attention={parallel.attention}: it needs a GPU; on a CPU use auto, chunked or reference"


def _ranks(config: Config, world_size: int) -> Iterator[str]:
    data, ring, ulysses = mesh_of(config, world_size)
    ranks = f"{world_size} rank{'s' * (world_size != 1)}"
    if (needed := data * ring * ulysses) != world_size:
        yield (
            f"parallel.data={data} × ring={ring} × ulysses={ulysses} is {needed} ranks, but there are {ranks}: "
            f"start that many (--ranks={needed}, with torchrun --nproc-per-node={needed}), or leave data or ring at 0"
        )
        return
    concurrent = config.data.micro_batch * data
    if config.data.batch % concurrent:
        yield (
            f"data.batch={config.data.batch}: it must be a multiple of data.micro_batch={config.data.micro_batch} × "
            f"{data} data rank{'s' * (data != 1)}, such as {math.ceil(config.data.batch / concurrent) * concurrent}"
        )


def _engine(config: Config) -> Iterator[str]:
    engine = config.engine
    if engine.offload_optimizer and engine.zero == 0:
        yield "engine.offload_optimizer=true, engine.zero=0: only a sharded optimizer offloads; use engine.zero=1, 2 or 3"
    if engine.offload_parameters and engine.zero != 3:
        yield f"engine.offload_parameters=true, engine.zero={engine.zero}: only ZeRO 3 shards weights; use engine.zero=3"
    if engine.offload_optimizer and not on_gpu(config):
        yield "engine.offload_optimizer=true: without a GPU the optimizer is on the CPU already; leave it out"
    if engine.offload_parameters and not on_gpu(config):
        yield "engine.offload_parameters=true: without a GPU the weights are on the CPU already; leave it out"
    if engine.compile == "on" and engine.zero == 3 and engine.memory == "none":
        yield (
            "engine.compile=on, engine.zero=3, engine.memory=none: ZeRO 3's hooks break compiled layers; "
            "use engine.zero=1 or 2, or engine.memory=auto, which compiles functions without hooks"
        )
    if engine.memory not in KEYWORDS:
        try:
            parse(engine.memory, config.model)
        except ValueError as error:
            yield str(error)
    if engine.precision == "bf16" and not on_gpu(config):
        yield "engine.precision=bf16: without a GPU matmuls are in fp32; use auto or fp32"


def _optim(config: Config) -> Iterator[str]:
    optim, schedule, engine = config.optim, config.schedule, config.engine
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"optim.betas={optim.betas}: two numbers, each at least 0 and below 1, such as [0.9,0.95]"
    if optim.kind == "muon" and engine.zero not in (1, 2):
        yield f"optim.kind=muon, engine.zero={engine.zero}: muon needs whole matrices; use engine.zero=1 or 2"
    if optim.kind == "muon" and engine.offload_optimizer:
        yield "optim.kind=muon, engine.offload_optimizer=true: muon's matmuls run on the GPU; leave the offload out"
    if optim.kind == "muon" and optim.clip:
        yield (
            f"optim.kind=muon, optim.clip={optim.clip:g}: DeepSpeed would clip muon's finished steps, not the gradients; "
            "use optim=muon or optim.clip=0"
        )
    if optim.muon_momentum >= 1:
        yield f"optim.muon_momentum={optim.muon_momentum}: it must be below 1"
    if schedule.warmup > config.steps:
        yield f"schedule.warmup={schedule.warmup}: the run has only steps={config.steps}"
    if schedule.floor > 1:
        yield f"schedule.floor={schedule.floor}: a share of the peak must be at most 1"
    if schedule.decay > 1:
        yield f"schedule.decay={schedule.decay}: a share of the steps must be at most 1"


def _run(config: Config) -> Iterator[str]:
    checkpoint, debug = config.checkpoint, config.debug
    if config.seed >= 2**32:
        yield f"seed={config.seed}: it must be below 2**32"
    for option, name in (("name", config.name), ("model.name", config.model.name)):
        if "/" in name or name in (".", ".."):
            yield f"{option}={name}: it must be a folder name without slashes; `runs` sets the folder above it"
    if checkpoint.keep_every and (not checkpoint.every or checkpoint.keep_every % checkpoint.every):
        yield f"checkpoint.keep_every={checkpoint.keep_every}: it must be a multiple of checkpoint.every={checkpoint.every}"
    known = compatibility.names(config)
    for name in checkpoint.changed:
        if name not in known:
            near = "".join(f"; do you mean {close}?" for close in difflib.get_close_matches(name, known, 1))
            yield (
                f"checkpoint.changed=[{name}]: a checkpoint is not compared by that{near}; "
                "groups and options of model, rope, tokenizer, data.sources, data.length, data.held_out and seed are"
            )
    for name, steps in (("profile", debug.profile), ("memory", debug.memory)):
        if any(not 1 <= step <= config.steps for step in steps):
            yield f"debug.{name}={steps}: steps are counted from 1 to steps={config.steps}"
    if config.data.workers and not config.data.prefetch:
        yield f"data.workers={config.data.workers}, data.prefetch=0: workers prefetch; set data.prefetch to at least 1"
    if debug.warm_up > config.data.length:
        yield f"debug.warm_up={debug.warm_up}: it must be at most data.length={config.data.length}"
    if debug.memory and not on_gpu(config):
        yield f"debug.memory={debug.memory}: memory snapshots need a GPU; leave it empty"
    if config.tracking.wandb != "disabled" and importlib.util.find_spec("wandb") is None:
        yield f"tracking.wandb={config.tracking.wandb}: wandb is not installed; pip install wandb, or leave it disabled"
    if config.tracking.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield "tracking.tensorboard=true: tensorboard is not installed; pip install tensorboard"
