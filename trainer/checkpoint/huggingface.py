"""Reads and writes Hugging Face weights of Llama, Qwen3 and GPT-2: folders of safetensors and a config.json.

    init_from=Llama-3.2-1B                                a run starts from such a folder
    ringspan export checkpoint=runs/my-run to=my-model    writes one, which transformers loads

Weights are read by memory map, one tensor at a time and only the requested elements, from one file or from the shards of an
index. GPT-2 keeps q, k and v in one matrix and every matrix transposed. In the other families only the names differ: the rotary
pairs are halves in both formats.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.trainer import files
from ringspan.trainer.checkpoint.huggingface_config import ROPE_NAMES, ROPE_OPTIONS, read_config
from ringspan.trainer.checkpoint.safetensors import File, write
from ringspan.trainer.config.schema import Model, Rope
from ringspan.trainer.planning.flops import head_dim, window

SHARD = 4 * 2**30  # maximum bytes of an exported file


@dataclass(frozen=True)
class TensorLocation:
    """Location of a weight in a Hugging Face folder: rows [begin, end) of a tensor, after transposing it if `transposed`."""

    name: str
    transposed: bool = False
    rows: tuple[int, int] | None = None


def tensor_locations(model: Model, family: str) -> dict[str, TensorLocation]:
    """Return the location of each weight of a model, by parameter name."""
    locations: dict[str, TensorLocation] = {}
    if family == "gpt2":
        locations |= {
            "embedding.weight": TensorLocation("wte.weight"),
            "position_embedding.weight": TensorLocation("wpe.weight"),
        }
        locations |= {f"norm.{kind}": TensorLocation(f"ln_f.{kind}") for kind in ("weight", "bias")}
        for i in range(model.layers):
            for kind in ("weight", "bias"):
                matrix = kind == "weight"
                for j, name in enumerate("qkv"):
                    rows = (j * model.dim, (j + 1) * model.dim)
                    locations[f"layers.{i}.attention.{name}.{kind}"] = TensorLocation(f"h.{i}.attn.c_attn.{kind}", matrix, rows)
                locations[f"layers.{i}.attention.o.{kind}"] = TensorLocation(f"h.{i}.attn.c_proj.{kind}", matrix)
                locations[f"layers.{i}.mlp.up.{kind}"] = TensorLocation(f"h.{i}.mlp.c_fc.{kind}", matrix)
                locations[f"layers.{i}.mlp.down.{kind}"] = TensorLocation(f"h.{i}.mlp.c_proj.{kind}", matrix)
                locations[f"layers.{i}.attention_norm.{kind}"] = TensorLocation(f"h.{i}.ln_1.{kind}")
                locations[f"layers.{i}.mlp_norm.{kind}"] = TensorLocation(f"h.{i}.ln_2.{kind}")
        return locations
    locations["embedding.weight"] = TensorLocation("model.embed_tokens.weight")
    locations["norm.weight"] = TensorLocation("model.norm.weight")
    if not model.tied:
        locations["head.weight"] = TensorLocation("lm_head.weight")
    for i in range(model.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        locations[f"{ours}.attention_norm.weight"] = TensorLocation(f"{theirs}.input_layernorm.weight")
        locations[f"{ours}.mlp_norm.weight"] = TensorLocation(f"{theirs}.post_attention_layernorm.weight")
        for name in "qkvo":
            locations[f"{ours}.attention.{name}.weight"] = TensorLocation(f"{theirs}.self_attn.{name}_proj.weight")
        for name in ("gate", "up", "down"):
            locations[f"{ours}.mlp.{name}.weight"] = TensorLocation(f"{theirs}.mlp.{name}_proj.weight")
        for name in ("q_norm", "k_norm") if model.qk_norm else ():
            locations[f"{ours}.attention.{name}.weight"] = TensorLocation(f"{theirs}.self_attn.{name}.weight")
    return locations


class TensorFolder:
    """The tensors of a folder by name, in one file or in the shards of an index."""

    def __init__(self, path: Path) -> None:
        index, names = path / "model.safetensors.index.json", ["model.safetensors"]
        if index.exists():
            names = sorted(set(files.read_json(index)["weight_map"].values()))
        missing = [name for name in names if name != Path(name).name or not (path / name).exists()]
        if missing:
            raise ValueError(
                f"{path} lacks {', '.join(missing)}: give a folder with model.safetensors, or with all shards and their index"
            )
        self.files = {name: file for file in map(File, (path / name for name in names)) for name in file}

    def __contains__(self, name: str) -> bool:
        return self._full(name) in self.files

    def __getitem__(self, name: str) -> Tensor:
        full = self._full(name)
        return self.files[full][full]

    def _full(self, name: str) -> str:
        """Add the prefix that transformers writes for GPT-2, and that OpenAI's files lack."""
        return name if name in self.files else f"transformer.{name}"


def weight_reader(path: Path, model: Model, rope: Rope) -> Callable[[str, str, int, int], Tensor]:
    """Return a function that reads the weights of a model from a folder.

    Args:
        path: a Hugging Face folder.
        model, rope: the run's model, which must have the shape of the folder's.
    Returns:
        read(name, "weight", start, stop): elements start … stop − 1 of a flattened weight, in fp32.
    Raises:
        ValueError: the folder holds another model (the message lists every difference) or lacks tensors.
    """
    family, saved, saved_rope = read_config(path)
    differences = [
        f"model.{name}={getattr(model, name)} (there {getattr(saved, name)})"
        for name in _compared_fields(model, saved)
        if getattr(model, name) != getattr(saved, name)
    ]
    if model.positions == "rope" and rope.base != saved_rope.base:
        differences.append(f"rope.base={rope.base:g} (there {saved_rope.base:g})")
    if differences:
        raise ValueError(f"init_from={str(path)!r} holds another model than this run's: {', '.join(differences)}")
    folder, locations = TensorFolder(path), tensor_locations(model, family)
    missing = sorted({location.name for location in locations.values() if location.name not in folder})
    if missing:
        raise ValueError(
            f"init_from={str(path)!r} lacks the tensors {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}"
        )

    def read(name: str, key: str, start: int, stop: int) -> Tensor:
        location = locations[name]
        tensor = folder[location.name]
        tensor = tensor.T if location.transposed else tensor
        tensor = tensor if location.rows is None else tensor[location.rows[0] : location.rows[1]]
        if tensor.is_contiguous():
            return tensor.reshape(-1)[start:stop].float()
        width = tensor[0].numel()  # only the rows that hold these elements are copied
        first = start // width
        rows = tensor[first : -(-stop // width)].float().reshape(-1)
        return rows[start - first * width : stop - first * width]

    return read


def rope_difference(path: Path, rope: Rope) -> str:
    """Return a warning if the run scales positions differently from the folder's model, as for a longer context; else ""."""
    saved = read_config(path)[2]
    names = [name for kind in (rope.kind, saved.kind) for name in ROPE_OPTIONS.get(kind, ["factor"])]  # transformers has no ntk
    pairs = [(name, getattr(rope, name), getattr(saved, name)) for name in dict.fromkeys(["kind", *names])]
    differences = ", ".join(f"rope.{name}={value} (there {other})" for name, value, other in pairs if value != other)
    if not differences:
        return ""
    return f"init_from={str(path)!r}: positions are scaled otherwise than there, as a longer context needs: {differences}"


def write_config(path: Path, model: Model, rope: Rope, length: int, end: int | None, dtype: torch.dtype) -> str:
    """Write a config.json, and return the family that this model belongs to."""
    family = family_of(model, rope)
    # null means no end token; without the key transformers assumes 2 for a Llama.
    common = dict(model_type=family, vocab_size=model.vocabulary, tie_word_embeddings=model.tied, eos_token_id=end)
    common["torch_dtype"] = str(dtype).removeprefix("torch.")  # transformers loads the weights in it
    if family == "gpt2":
        config = common | dict(
            architectures=["GPT2LMHeadModel"],
            n_embd=model.dim,
            n_layer=model.layers,
            n_head=model.heads,
            n_inner=model.mlp_dim,
            n_positions=model.max_positions,
            layer_norm_epsilon=model.norm_eps,
            activation_function="gelu_new",
        )
    else:
        scaling: dict[str, Any] = {ROPE_NAMES[name]: getattr(rope, name) for name in ROPE_OPTIONS[rope.kind]}
        if not scaling.get("attention_factor", 1):
            del scaling["attention_factor"]
        scaling |= dict(rope_type="default" if rope.kind == "base" else rope.kind, rope_theta=rope.base)
        config = common | dict(
            architectures=["LlamaForCausalLM" if family == "llama" else "Qwen3ForCausalLM"],
            hidden_size=model.dim,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            head_dim=head_dim(model),
            intermediate_size=model.mlp_dim,
            rms_norm_eps=model.norm_eps,
            hidden_act="silu",
            max_position_embeddings=length,
            rope_theta=rope.base,
            rope_parameters=scaling,
        )
        if rope.kind != "base":
            config["rope_scaling"] = {name: value for name, value in scaling.items() if name != "rope_theta"}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return family


def family_of(model: Model, rope: Rope) -> str:
    """Return the Hugging Face family that can hold this model; raise a ValueError if there is none."""
    problems = [
        f"model.{name}={getattr(model, name)}"
        for name, default in (("softcap", 0.0), ("logit_softcap", 0.0), ("sinks", False))
        if getattr(model, name) != default
    ]
    if any(window(model, layer) for layer in range(model.layers)):
        problems.append(f"model.windows={list(model.windows)}")
    shape = model.norm, model.positions, model.activation, model.bias
    family = "none"
    if shape == ("layernorm", "learned", "gelu", True) and model.tied and not model.qk_norm:
        if model.kv_heads == model.heads and head_dim(model) * model.heads == model.dim:
            family = "gpt2"
    elif shape == ("rmsnorm", "rope", "swiglu", False) and rope.kind != "ntk":
        family = "qwen3" if model.qk_norm else "llama"
    if problems or family == "none":
        raise ValueError(
            f"this model is no Llama, Qwen3 or GPT-2, so their format cannot hold it: {', '.join(problems) or shape}"
        )
    return family


def export(
    path: Path, weights: Mapping[str, Callable[[], Tensor]], model: Model, rope: Rope, length: int, end: int | None = None,
    shard: int = 0,
) -> None:  # fmt: skip
    """Write a folder that transformers loads. Weights are read one by one and kept until their file is full.

    Args:
        path: the folder to write.
        weights: a function per parameter name that returns the weight.
        model, rope: the model.
        length: context length, for config.json.
        end: id of the end token.
        shard: bytes of a file, unless one tensor has more; 0: SHARD.
    Raises:
        ValueError: no family can hold the model.
    """
    family = family_of(model, rope)
    path.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {}  # our weights of each exported tensor
    locations = tensor_locations(model, family)
    for name, location in locations.items():
        parts.setdefault(location.name, []).append(name)  # q, k and v in order

    def tensors() -> Iterator[tuple[str, Tensor]]:
        prefix = "transformer." if family == "gpt2" else ""
        for exported, names in parts.items():
            joined = torch.cat([weights[name]() for name in names]) if len(names) > 1 else weights[names[0]]()
            yield prefix + exported, (joined.T if locations[names[0]].transposed else joined).contiguous()

    buffer: dict[str, Tensor] = {}
    shards: list[tuple[Path, list[str]]] = []
    total = 0

    def flush() -> None:
        file = path / f"part-{len(shards)}"
        write(file, buffer, {"format": "pt"})
        shards.append((file, list(buffer)))
        buffer.clear()

    for name, tensor in tensors():
        if buffer and sum(x.nbytes for x in buffer.values()) + tensor.nbytes > (shard or SHARD):
            flush()
        buffer[name] = tensor
        total += tensor.nbytes
    flush()
    for pattern in ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"):
        for earlier in path.glob(pattern):  # of an earlier export: some loaders prefer an index, others the single file
            earlier.unlink()
    if len(shards) == 1:
        shards[0][0].rename(path / "model.safetensors")
    else:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        for (file, _), name in zip(shards, names, strict=True):
            file.rename(path / name)
        index = {tensor_name: name for (_, group), name in zip(shards, names, strict=True) for tensor_name in group}
        text = json.dumps(dict(metadata=dict(total_size=total), weight_map=index), indent=2)
        (path / "model.safetensors.index.json").write_text(text + "\n")
    write_config(path, model, rope, length, end, tensor.dtype)


def _compared_fields(model: Model, saved: Model) -> list[str]:
    """Fields that must be equal for weights to fit and mean the same. Rope scalings may differ: they extend the context."""
    fields = [field.name for field in dataclasses.fields(Model) if field.name not in ("name", "init_std", "dropout", "windows")]
    skip = set()
    if saved.positions == "rope":
        skip.add("max_positions")
    if head_dim(model) == head_dim(saved):
        skip.add("head_dim")
    return [name for name in fields if name not in skip]
