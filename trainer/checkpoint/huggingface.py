"""Hugging Face's weights in and out: folders of safetensors and a config.json, of Llama, Qwen3 and GPT-2.

    init_from=Llama-3.2-1B                                        a run starts from such a folder
    ringspan export checkpoint=runs/my-run to=my-model    writes one, which transformers loads

Weights are read by memory map, one tensor at a time and only as much of it as is asked for, from one file or from the shards
that an index names. GPT-2 keeps q, k and v in one matrix and every matrix transposed; otherwise only the names differ, since
our rotary pairs are halves as theirs are.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.trainer.checkpoint.safetensors import File, write
from ringspan.trainer.config.schema import Model, Rope
from ringspan.trainer.planning.flops import head_dim, window

SHARD = 4 * 2**30  # bytes of a file that is written


@dataclass(frozen=True)
class TensorLocation:
    """Where one of our weights is in their file: rows [begin, end) of a tensor, transposed first if it is kept so."""

    name: str
    transposed: bool = False
    rows: tuple[int, int] | None = None


def places(model: Model, family: str) -> dict[str, TensorLocation]:
    """Their place of each of our weights."""
    found: dict[str, TensorLocation] = {}
    if family == "gpt2":
        found |= {"embedding.weight": TensorLocation("wte.weight"), "position_embedding.weight": TensorLocation("wpe.weight")}
        found |= {f"norm.{part}": TensorLocation(f"ln_f.{part}") for part in ("weight", "bias")}
        for i in range(model.layers):
            for part in ("weight", "bias"):
                matrix = part == "weight"
                for j, name in enumerate("qkv"):
                    rows = (j * model.dim, (j + 1) * model.dim)
                    found[f"layers.{i}.attention.{name}.{part}"] = TensorLocation(f"h.{i}.attn.c_attn.{part}", matrix, rows)
                found[f"layers.{i}.attention.o.{part}"] = TensorLocation(f"h.{i}.attn.c_proj.{part}", matrix)
                found[f"layers.{i}.mlp.up.{part}"] = TensorLocation(f"h.{i}.mlp.c_fc.{part}", matrix)
                found[f"layers.{i}.mlp.down.{part}"] = TensorLocation(f"h.{i}.mlp.c_proj.{part}", matrix)
                found[f"layers.{i}.attention_norm.{part}"] = TensorLocation(f"h.{i}.ln_1.{part}")
                found[f"layers.{i}.mlp_norm.{part}"] = TensorLocation(f"h.{i}.ln_2.{part}")
        return found
    found |= {
        "embedding.weight": TensorLocation("model.embed_tokens.weight"),
        "norm.weight": TensorLocation("model.norm.weight"),
    }
    if not model.tied:
        found["head.weight"] = TensorLocation("lm_head.weight")
    for i in range(model.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        found[f"{ours}.attention_norm.weight"] = TensorLocation(f"{theirs}.input_layernorm.weight")
        found[f"{ours}.mlp_norm.weight"] = TensorLocation(f"{theirs}.post_attention_layernorm.weight")
        for name in "qkvo":
            found[f"{ours}.attention.{name}.weight"] = TensorLocation(f"{theirs}.self_attn.{name}_proj.weight")
        for name in ("gate", "up", "down"):
            found[f"{ours}.mlp.{name}.weight"] = TensorLocation(f"{theirs}.mlp.{name}_proj.weight")
        for name in ("q_norm", "k_norm") if model.qk_norm else ():
            found[f"{ours}.attention.{name}.weight"] = TensorLocation(f"{theirs}.self_attn.{name}.weight")
    return found


class Folder:
    """The tensors of a folder by name, whichever of its files they are in."""

    def __init__(self, path: Path) -> None:
        index = path / "model.safetensors.index.json"
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
        missing = [name for name in names if not (path / name).exists()]
        if missing:
            raise ValueError(
                f"{path} lacks {', '.join(missing)}: weights are read from safetensors, whole or in shards with an index"
            )
        self.files = {name: file for file in map(File, (path / name for name in names)) for name in file}

    def __contains__(self, name: str) -> bool:
        return self._full(name) in self.files

    def __getitem__(self, name: str) -> Tensor:
        full = self._full(name)
        return self.files[full][full]

    def _full(self, name: str) -> str:
        """GPT-2's own files leave out the prefix that transformers writes."""
        return name if name in self.files else f"transformer.{name}"


def values(path: Path, model: Model, rope: Rope) -> Callable[[str, str, int, int], Tensor]:
    """What fills a model from this folder: (our name, "weight", start, stop) → those elements, flat and in fp32.

    A folder whose shape is not the model's is refused at once, with every difference named.
    """
    family, theirs, their_rope = read_config(path)
    differ = [
        f"model.{name}={getattr(model, name)} (there {getattr(theirs, name)})"
        for name in _compared(model, theirs)
        if getattr(model, name) != getattr(theirs, name)
    ]
    if model.positions == "rope" and rope.base != their_rope.base:
        differ.append(f"rope.base={rope.base:g} (there {their_rope.base:g})")
    if differ:
        raise ValueError(f"init_from={str(path)!r} holds another model than this run's: {', '.join(differ)}")
    folder, where = Folder(path), places(model, family)
    missing = sorted({place.name for place in where.values() if place.name not in folder})
    if missing:
        raise ValueError(
            f"init_from={str(path)!r} lacks the tensors {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}"
        )

    def read(name: str, key: str, start: int, stop: int) -> Tensor:
        place = where[name]
        tensor = folder[place.name]
        tensor = tensor.T if place.transposed else tensor
        tensor = tensor if place.rows is None else tensor[place.rows[0] : place.rows[1]]
        if tensor.is_contiguous():
            return tensor.reshape(-1)[start:stop].float()
        width = tensor[0].numel()  # only the rows that hold these elements are copied
        first = start // width
        rows = tensor[first : -(-stop // width)].float().reshape(-1)
        return rows[start - first * width : stop - first * width]

    return read


def scaled_otherwise(path: Path, rope: Rope) -> str:
    """What to say where positions are not scaled as this folder's: meant for a longer context, a mistake without one."""
    theirs = read_config(path)[2]
    used = [name for kind in (rope.kind, theirs.kind) for name in USED.get(kind, ["factor"])]  # ntk, which they do not have
    pairs = [(name, getattr(rope, name), getattr(theirs, name)) for name in dict.fromkeys(["kind", *used])]
    differ = ", ".join(f"rope.{name}={ours} (there {there})" for name, ours, there in pairs if ours != there)
    if not differ:
        return ""
    return f"init_from={str(path)!r}: positions are scaled otherwise than there, as a longer context wants it: {differ}"


class HFConfig(dict[str, Any]):
    """A config.json, which tells what it lacks."""

    def __init__(self, *given: Any, path: Path) -> None:
        super().__init__(*given)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"init_from={str(self.path)!r} has no {key} in its config.json")


def read_config(path: Path) -> tuple[str, Model, Rope]:
    """The family, shape and rotary positions that a folder's config.json describes."""
    try:
        given = HFConfig(json.loads((path / "config.json").read_text()), path=path)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"init_from={str(path)!r} has no config.json that can be read: {error}") from None
    family = given.get("model_type")
    if family == "gpt2":
        dim = given["n_embd"]
        model = Model(
            name=path.name,
            vocabulary=given["vocab_size"],
            layers=given["n_layer"],
            dim=dim,
            heads=given["n_head"],
            kv_heads=given["n_head"],
            mlp_dim=given.get("n_inner") or 4 * dim,
            norm="layernorm",
            norm_eps=given.get("layer_norm_epsilon", 1e-5),
            positions="learned",
            max_positions=given["n_positions"],
            activation="gelu",
            bias=True,
            tied=given.get("tie_word_embeddings", True),
        )
        _supported(path, given, activation_function=("gelu_new", "gelu_pytorch_tanh"), tie_word_embeddings=(True,))
        _supported(path, given, scale_attn_by_inverse_layer_idx=(False,), scale_attn_weights=(True,))
        return family, model, Rope()
    if family not in ("llama", "qwen3"):
        raise ValueError(f"init_from={str(path)!r} is a model of type {family}: llama, qwen3 and gpt2 can be read")
    _supported(path, given, hidden_act=("silu",), attention_bias=(False,), mlp_bias=(False,), use_sliding_window=(False,))
    if set(given.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"init_from={str(path)!r} has layers of types {given['layer_types']}; only full_attention can be read")
    model = Model(
        name=path.name,
        vocabulary=given["vocab_size"],
        layers=given["num_hidden_layers"],
        dim=given["hidden_size"],
        heads=given["num_attention_heads"],
        kv_heads=given.get("num_key_value_heads") or given["num_attention_heads"],
        head_dim=given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"],
        mlp_dim=given["intermediate_size"],
        norm_eps=given["rms_norm_eps"],
        qk_norm=family == "qwen3",
        tied=given.get("tie_word_embeddings", False),
    )
    # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling.
    scaling = given.get("rope_parameters") or given.get("rope_scaling") or {}
    return family, model, _read_rope(path, scaling, given)


ROPE_NAMES = {
    "factor": "factor",
    "original_length": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
}
USED = {
    "base": [],
    "linear": ["factor"],
    "yarn": ["factor", "original_length", "beta_fast", "beta_slow", "attention_factor"],
    "llama3": ["factor", "original_length", "low_freq_factor", "high_freq_factor"],
}


def _read_rope(path: Path, scaling: Mapping[str, Any], given: Mapping[str, Any]) -> Rope:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = "base" if kind == "default" else kind
    if kind not in USED:
        raise ValueError(
            f"init_from={str(path)!r} has rotary positions of type {kind}: default, linear, yarn and llama3 are read"
        )
    known = {*ROPE_NAMES.values(), "rope_type", "type", "rope_theta"}
    plain = {"partial_rotary_factor": 1.0, "truncate": True}
    strange = {name: x for name, x in scaling.items() if name not in known and x is not None and plain.get(name) != x}
    if strange:
        raise ValueError(f"init_from={str(path)!r} has rotary options that are not read: {strange}")
    base = scaling.get("rope_theta", given.get("rope_theta", 10_000.0))
    options = {ours: scaling[ROPE_NAMES[ours]] for ours in USED[kind] if scaling.get(ROPE_NAMES[ours]) is not None}
    if kind == "yarn":
        options.setdefault("original_length", given.get("max_position_embeddings"))
    return Rope(kind=kind, base=float(base), **options)


def write_config(path: Path, model: Model, rope: Rope, length: int, end: int | None, dtype: torch.dtype) -> str:
    """A config.json for the family that this model belongs to, which is returned."""
    family = family_of(model, rope)
    # An eos_token_id that is null is none; left out, a Llama's would be 2.
    common = dict(model_type=family, vocab_size=model.vocabulary, tie_word_embeddings=model.tied, eos_token_id=end)
    common["torch_dtype"] = str(dtype).removeprefix("torch.")  # what it is loaded as
    if family == "gpt2":
        given = common | dict(
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
        scaling: dict[str, Any] = {ROPE_NAMES[ours]: getattr(rope, ours) for ours in USED[rope.kind]}
        if not scaling.get("attention_factor", 1):
            del scaling["attention_factor"]
        scaling |= dict(rope_type="default" if rope.kind == "base" else rope.kind, rope_theta=rope.base)
        given = common | dict(
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
            given["rope_scaling"] = {name: value for name, value in scaling.items() if name != "rope_theta"}
    (path / "config.json").write_text(json.dumps(given, indent=2) + "\n")
    return family


def family_of(model: Model, rope: Rope) -> str:
    """Which of theirs can hold this model."""
    problems = [
        f"model.{name}={getattr(model, name)}"
        for name, plain in (("softcap", 0.0), ("logit_softcap", 0.0), ("sinks", False))
        if getattr(model, name) != plain
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
    path: Path, weights: Mapping[str, Callable[[], Tensor]], model: Model, rope: Rope, length: int, end: int | None = None
) -> None:
    """Writes a folder that transformers loads. Weights are asked for one by one, and kept until their file is full."""
    family = family_of(model, rope)
    path.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {}
    where = places(model, family)
    for name, place in where.items():
        parts.setdefault(place.name, []).append(name)  # q, k and v in their order

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for theirs, ours in parts.items():
            whole = torch.cat([weights[name]() for name in ours]) if len(ours) > 1 else weights[ours[0]]()
            prefix = "transformer." if family == "gpt2" else ""
            yield prefix + theirs, (whole.T if where[ours[0]].transposed else whole).contiguous()

    held: dict[str, Tensor] = {}
    files: list[tuple[Path, list[str]]] = []
    total = 0

    def flush() -> None:
        file = path / f"part-{len(files)}"
        write(file, held, {"format": "pt"})
        files.append((file, list(held)))
        held.clear()

    for name, tensor in tensors():
        size = tensor.numel() * tensor.itemsize
        if held and sum(x.numel() * x.itemsize for x in held.values()) + size > SHARD:
            flush()
        held[name] = tensor
        total += size
    flush()
    if len(files) == 1:
        files[0][0].rename(path / "model.safetensors")
    else:
        names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
        for (file, _), name in zip(files, names, strict=True):
            file.rename(path / name)
        index = {tensor: name for (_, held_there), name in zip(files, names, strict=True) for tensor in held_there}
        text = json.dumps(dict(metadata=dict(total_size=total), weight_map=index), indent=2)
        (path / "model.safetensors.index.json").write_text(text + "\n")
    write_config(path, model, rope, length, end, tensor.dtype)


def _compared(model: Model, theirs: Model) -> list[str]:
    """The fields that decide whether weights fit and mean the same; scalings of rope may differ, which is what it is for."""
    fields = [field.name for field in dataclasses.fields(Model) if field.name not in ("name", "init_std", "dropout", "windows")]
    skip = set()
    if theirs.positions == "rope":
        skip.add("max_positions")
    if head_dim(model) == head_dim(theirs):
        skip.add("head_dim")
    return [name for name in fields if name not in skip]


def _supported(path: Path, given: Mapping[str, Any], **choices: tuple[Any, ...]) -> None:
    for name, fine in choices.items():
        if given.get(name, fine[0]) not in fine:
            raise ValueError(f"init_from={str(path)!r} has {name}={given[name]!r} in its config.json; {fine[0]!r} can be read")
