"""The --help screen, and messages that explain a wrong option, for compose.py. Imports no torch."""

import difflib
import functools
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from ringspan.trainer.config.schema import Config, Data, Source

CONF = Path(__file__).resolve().parents[2] / "conf"
# Options of earlier versions, and what replaces them.
RETIRED = {
    "engine.activations": "leave it out for engine.memory=auto, or take none, least, "
    "'x/1 outs=LAYERS' (was attention) or 'x/1' (was full), with LAYERS the number of the model's layers",
    "engine.offload_activations": "engine.memory=auto uses host memory where a plan needs it; "
    "'x/1@LAYERS' keeps the inputs of all layers there, with LAYERS the number of the model's layers",
}
FOREIGN = {  # names of Hugging Face's TrainingArguments and configs, of torchtitan and of nanochat: ours
    "batch_size": "data.batch, sequences per step of all ranks, in micro-batches of data.micro_batch",
    "total_batch_size": "data.batch, in sequences of data.length tokens",
    "global_batch_size": "data.batch, sequences per step of all ranks",
    "local_batch_size": "data.micro_batch, sequences of a rank's forward",
    "device_batch_size": "data.micro_batch, sequences of a rank's forward",
    "per_device_train_batch_size": "data.micro_batch, sequences of a rank's forward",
    "per_device_eval_batch_size": "data.micro_batch, sequences of a rank's forward",
    "gradient_accumulation_steps": "data.batch: a step has data.batch / (data.micro_batch × data ranks) micro-batches",
    "learning_rate": "optim.lr",
    "embedding_lr": "optim.lr",
    "matrix_lr": "optim.muon_lr, with optim=muon",
    "adam_beta1": "optim.betas, both as [0.9,0.95]",
    "adam_beta2": "optim.betas, both as [0.9,0.95]",
    "adam_epsilon": "optim.eps",
    "optimizer": "optim (adamw or muon)",
    "max_grad_norm": "optim.clip",
    "max_norm": "optim.clip",
    "grad_clip": "optim.clip",
    "lr_scheduler_type": "schedule (cosine, linear, wsd or constant)",
    "lr_scheduler": "schedule (cosine, linear, wsd or constant)",
    "warmup_steps": "schedule.warmup, in steps",
    "warmup_ratio": "schedule.warmup, in steps; by default a tenth of the run",
    "warmdown_ratio": "schedule.decay, with schedule=wsd",
    "epochs": "steps; a run's summary says how often each text was read",
    "num_epochs": "steps; a run's summary says how often each text was read",
    "num_train_epochs": "steps; a run's summary says how often each text was read",
    "max_steps": "steps",
    "num_steps": "steps",
    "num_iterations": "steps",
    "train_steps": "steps",
    "context_length": "data.length",
    "seq_len": "data.length",
    "seq_length": "data.length",
    "sequence_len": "data.length",
    "sequence_length": "data.length",
    "max_seq_len": "data.length",
    "max_seq_length": "data.length",
    "max_length": "data.length",
    "block_size": "data.length",
    "max_position_embeddings": "model.max_positions, with model.positions=learned; else data.length",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "depth": "model.layers",
    "n_embd": "model.dim",
    "d_model": "model.dim",
    "hidden_size": "model.dim",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "num_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "n_kv_heads": "model.kv_heads",
    "num_key_value_heads": "model.kv_heads",
    "intermediate_size": "model.mlp_dim",
    "vocab_size": "model.vocabulary",
    "rope_theta": "rope.base",
    "sliding_window": "model.windows",
    "tie_word_embeddings": "model.tied",
    "model_name_or_path": "init_from, with model.from for the shape",
    "dataset": "data.sources.NAME.paths, with data=text or data=tokens",
    "dataset_name": "data.sources.NAME.paths, with data=text or data=tokens",
    "train_files": "data.sources.NAME.paths, with data=text or data=tokens",
    "output_dir": "runs, and name for the folder in it",
    "dump_folder": "runs, and name for the folder in it",
    "run_name": "name",
    "save_steps": "checkpoint.every",
    "save_every": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "resume_from_checkpoint": "checkpoint.resume; by default the same command resumes",
    "eval_steps": "evaluate.every",
    "eval_every": "evaluate.every",
    "eval_strategy": "evaluate.every",
    "logging_steps": "tracking.log_every",
    "log_freq": "tracking.log_every",
    "report_to": "tracking (console, offline or wandb)",
    "bf16": "engine.precision=bf16, the default on a GPU",
    "fp16": "engine.precision=bf16: fp16 is not supported",
    "dtype": "engine.precision",
    "torch_compile": "engine.compile",
    "gradient_checkpointing": "engine.memory; auto recomputes what does not fit",
    "activation_checkpoint": "engine.memory; auto recomputes what does not fit",
    "context_parallel_degree": "parallel.ring",
    "context_parallel_size": "parallel.ring",
    "cp": "parallel.ring",
    "sequence_parallel_size": "parallel.ulysses",
    "data_parallel_shard_degree": "engine.zero=3, over all ranks",
    "data_parallel_replicate_degree": "parallel.data",
    "fsdp": "engine.zero=3",
    "deepspeed": "engine.zero and engine.offload_optimizer",
    "attn_implementation": "parallel.attention",
    "device_type": "parallel.device",
}
USAGE = """usage: {program} [key=value | group=choice | experiment=name] …

  --help [WORD]      show this page, or the options with WORD in their names
                        --cfg job          print the composed config and exit
  --config-dir=DIR   additional YAML files, in folders named like those of conf/
  --ranks=N          ringspan launch: number of ranks to start (default: one per GPU, or 2 without a GPU)
  --multirun         ringspan launch: key=a,b starts one run after the other
  model.from=FOLDER  fills the groups model and rope from a folder in Hugging Face's format"""


@functools.cache
def option_names(schema: type = Config, prefix: str = "") -> list[str]:
    """Return the dotted name of every option."""
    names = []
    for field in fields(schema):
        kind: Any = typing.get_type_hints(schema)[field.name]
        is_group = is_dataclass(kind)
        names += option_names(kind, f"{prefix}{field.name}.") if is_group else [prefix + field.name]
    return names


@functools.cache
def text_options() -> set[str]:
    """Return the dotted name of every option that is a text or a list of texts; of a source's without data.sources.NAME."""
    named = [*_named_fields(Config, ""), *_named_fields(Source, "data.sources.")]
    return {name for name, option in named if option.type in (str, list[str])}


def group_choices(group: str, folders: list[Path]) -> list[str]:
    """Return the choices of a group: the names of its YAML files."""
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def help_text(program: str, about: str | None, schema: type, words: Sequence[str] = ()) -> str:
    """Return the --help screen: usage, then every option with its default, help and choices.

    Args:
        program: the command.
        about: text above the usage.
        schema: the dataclass of all options.
        words: shows only groups and options whose name contains one of them, without usage.
    """
    if words:
        return _matching_options(words)
    lines = [
        *([about.strip(), ""] if about else []),
        USAGE.format(program=program),
        "",
        "Options, with their defaults:",
    ]
    single = [f for f in fields(schema) if not is_dataclass(typing.get_type_hints(schema)[f.name])]
    lines += ["", *_option_lines(single, "")]
    for field in fields(schema):
        kind = typing.get_type_hints(schema)[field.name]
        if is_dataclass(kind):
            chosen = ", ".join(group_choices(field.name, [CONF]))
            lines += ["", f"{field.name}: {field.metadata['help']}  ({field.name}= {chosen})"]
            lines += _option_lines(fields(kind), field.name + ".")
            if kind is Data:
                lines += [
                    "",
                    "data.sources.NAME: one source of the mixture",
                    *_option_lines(fields(Source), "data.sources.NAME."),
                ]
    lines += ["", "experiment= " + ", ".join(group_choices("experiment", [CONF]))]
    return "\n".join(lines)


def _matching_options(words: Sequence[str]) -> str:
    lines = []
    for name, option in [*_named_fields(Config, ""), *_named_fields(Source, "data.sources.NAME.")]:
        if any(word.partition("=")[0] in name for word in words):
            lines += _option_lines([option], name.removesuffix(option.name))
    return "\n".join(lines) or f"no option has {' or '.join(words)} in its name{nearest_key(words[0], [])}"


def _named_fields(schema: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in fields(schema):
        kind: Any = typing.get_type_hints(schema)[field.name]
        if is_dataclass(kind):
            yield from _named_fields(cast(type, kind), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def _option_lines(options: Any, prefix: str) -> list[str]:
    lines = []
    for option in options:
        choices = option.metadata.get("choices")
        suffix = f" ({', '.join(map(str, choices))})" if choices else ""
        lines.append(f"  {prefix}{option.name}={default_of(option)}\n      {option.metadata['help']}{suffix}")
    return lines


def default_of(field: Any) -> str:
    """Return the default of an option as a user would write it."""
    value = field.default if field.default is not MISSING else field.default_factory()
    return str(value).lower() if isinstance(value, bool) else str(value)


def nearest_key(key: str, groups: list[str]) -> str:
    """Return "; did you mean …?" with the options nearest to a wrong key; "" if there are none.

    The last part of a key is compared first: a missing or wrong group is the most common mistake.
    """
    options = option_names()
    if key in options:
        return ""
    name = key.rpartition(".")[2]
    if (known := FOREIGN.get(name.lower().replace("-", "_"))) and name not in {o.rpartition(".")[2] for o in options}:
        return f"; the option is {known}"
    same_name = [option for option in options if option.rpartition(".")[2] == name]
    same_name = same_name or [f"data.sources.NAME.{name}" for field in fields(Source) if field.name == name]
    matches = same_name or difflib.get_close_matches(key, options, 3, 0.75)
    if not matches:
        names = difflib.get_close_matches(name, {option.rpartition(".")[2] for option in options}, 2, 0.7)
        matches = [option for option in options if option.rpartition(".")[2] in names]
    matches = matches or difflib.get_close_matches(key, [*options, *groups], 3, 0.6)
    return f"; did you mean {' or '.join(matches[:3])}?" if matches else ""


def nearest(word: str, words: list[str]) -> str:
    """Return "; did you mean …?" with the word nearest to a wrong one; "" if there is none."""
    matches = difflib.get_close_matches(word, words, 1, 0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def retired(key: str) -> str:
    """Return what replaces an option of an earlier version."""
    return f"engine.memory replaces this option; {RETIRED[key]}"


TYPE_ERRORS = {  # OmegaConf's message for a value of the wrong type: ours
    r"Value (?P<value>.*) of type '\w+' could not be converted to Float": "{value} is not a number",
    r"Value (?P<value>.*) of type '\w+' could not be converted to Integer": "{value} is not a whole number",
    r"Value (?P<value>.*) is not a valid bool .*": "{value} is neither true nor false",
    r"Invalid value assigned: \w+ is not a ListConfig, list or tuple\.": "this is not a list; write a list as [a,b]",
}


def first_line(error: BaseException) -> str:
    """Return the first informative line of an OmegaConf or Hydra error, in plain words if its pattern is known."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    line = lines[1] if len(lines) > 1 and lines[0].endswith("raised while composing config:") else lines[0]
    for pattern, message in TYPE_ERRORS.items():
        if match := re.fullmatch(pattern, line):
            return message.format(**match.groupdict())
    return line


def explain(error: BaseException, overrides: list[str], folders: list[Path]) -> str:
    """Return a Hydra error as one message: the argument or file that set the key, and the reason."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    full_keys = (getattr(e, "full_key", None) for e in reversed(chain))
    key = next((str(full_key) for full_key in full_keys if full_key), "")
    key = key or next(iter(re.findall(r"full_key: (\S+)", str(error))), "")
    text = first_line(error)
    argument = next((o for o in overrides if o.lstrip("+").partition("=")[0] == key), None)
    if argument is None:  # the key lies inside a list or dict that an argument sets as a whole
        argument = next((o for o in overrides if key.startswith(o.partition("=")[0]) and "." in o.partition("=")[0]), None)
    if argument is not None:
        return f"{argument}: {text}"
    files = [path for folder in folders for path in sorted(folder.rglob("*.yaml")) if _sets_key(path, folder, key)]
    source = " or ".join(str(path) for path in files[:2])
    if key in RETIRED:
        return f"{key}{f' in {source}' if source else ''}: {retired(key)}"
    hint = nearest_key(key, []) if "not in" in text else ""
    return f"{key or 'the config'}{f' in {source}' if source else ''}: {text}{hint}"


def _sets_key(path: Path, folder: Path, key: str) -> bool:
    """Whether a YAML file sets this key, relative to its group or to the root (`@package _global_`)."""
    text = path.read_text()
    group = path.parent.relative_to(folder).as_posix().replace("/", ".")
    prefix = "" if group == "." or "@package _global_" in text else group + "."
    try:
        node: Any = OmegaConf.to_container(OmegaConf.create(text))
    except Exception:
        return str(path) in key or not key
    if not key.startswith(prefix):
        return False
    for part in key.removeprefix(prefix).split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True
