"""Hugging Face weights: logits equal those of transformers, if installed, and of the published formulas."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ringspan.trainer.checkpoint import huggingface
from ringspan.trainer.checkpoint.safetensors import File, write
from ringspan.trainer.config.schema import Model, Rope
from ringspan.trainer.model import GPT

LLAMA = Model(
    vocabulary=96, layers=2, dim=64, heads=4, kv_heads=2, head_dim=32, mlp_dim=80, norm_eps=1e-5, tied=False, init_std=0.2
)
QWEN3 = dataclasses.replace(LLAMA, qk_norm=True, norm_eps=1e-6, tied=True)
GPT2 = Model(
    vocabulary=96, layers=2, dim=64, heads=4, kv_heads=4, mlp_dim=256, norm="layernorm", positions="learned", max_positions=48,
    activation="gelu", bias=True, tied=True, init_std=0.2,
)  # fmt: skip
LLAMA3 = Rope(kind="llama3", base=500_000.0, factor=8.0, original_length=32)
YARN = Rope(kind="yarn", base=10_000.0, factor=4.0, original_length=64)
CASES = {
    "llama": (LLAMA, LLAMA3),
    "llama-linear": (dataclasses.replace(LLAMA, tied=True), Rope(kind="linear", factor=2.0)),
    "qwen3": (QWEN3, Rope(base=1_000_000.0)),
    "qwen3-yarn": (QWEN3, YARN),
    "gpt2": (GPT2, Rope()),
}
TOKENS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))


def build(model: Model, rope: Rope) -> GPT:
    gpt = GPT(model, rope)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # norms and biases start as ones and zeros
        for weight in gpt.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
    return gpt


def export(gpt: GPT, path: Path) -> None:
    readers = {name: (lambda weight=weight: weight.detach()) for name, weight in gpt.named_parameters()}
    huggingface.export(path, readers, gpt.config, gpt.rope, length=256)


def load(path: Path) -> GPT:
    _, model, rope = huggingface.read_config(path)
    gpt = GPT(model, rope, seed=None)
    read = huggingface.weight_reader(path, model, rope)
    with torch.no_grad():
        for name, weight in gpt.named_parameters():
            weight.copy_(read(name, "weight", 0, weight.numel()).view_as(weight))
    return gpt


def logits(gpt: GPT) -> Tensor:
    return gpt.logits(TOKENS, torch.arange(TOKENS.shape[1]))


@pytest.mark.parametrize("case", CASES)
def test_model_survives_a_round_trip(tmp_path: Path, case: str) -> None:
    gpt = build(*CASES[case])
    export(gpt, tmp_path)
    loaded = load(tmp_path)
    assert loaded.rope == dataclasses.replace(gpt.rope) and loaded.config.heads == gpt.config.heads
    for (name, weight), reloaded in zip(gpt.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(weight, reloaded), name
    assert torch.equal(logits(gpt), logits(loaded))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_published_formulas(tmp_path: Path, case: str) -> None:
    """The formulas use the exported tensors by their Hugging Face names, and none of our code."""
    gpt = build(*CASES[case])
    export(gpt, tmp_path)
    tensors = {name: File(tmp_path / "model.safetensors")[name].double() for name in File(tmp_path / "model.safetensors")}
    config = json.loads((tmp_path / "config.json").read_text())
    expected = (plain_gpt2 if case == "gpt2" else plain_llama)(tensors, config)
    torch.testing.assert_close(logits(gpt).double(), expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.5  # not only small numbers


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(tmp_path: Path, case: str) -> None:
    transformers = pytest.importorskip("transformers")
    gpt = build(*CASES[case])
    export(gpt, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = reference(TOKENS).logits
    torch.testing.assert_close(logits(gpt), expected, rtol=1e-4, atol=1e-4)
    reference.save_pretrained(tmp_path / "reference", max_shard_size="40KB")  # files written by transformers, in shards
    assert (tmp_path / "reference" / "model.safetensors.index.json").exists()
    torch.testing.assert_close(logits(load(tmp_path / "reference")), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["llama", "qwen3-yarn", "llama-linear", "qwen3"])
def test_config_of_older_transformers_is_read(tmp_path: Path, case: str) -> None:
    gpt = build(*CASES[case])
    export(gpt, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]  # older versions have rope_theta, and rope_scaling if positions are scaled
    assert ("rope_scaling" in config) == (case != "qwen3")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert huggingface.read_config(tmp_path)[2] == gpt.rope


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_any_range_of_a_weight_can_be_read(tmp_path: Path, case: str) -> None:
    gpt = build(*CASES[case])
    export(gpt, tmp_path)
    read = huggingface.weight_reader(tmp_path, gpt.config, gpt.rope)
    for name, weight in gpt.named_parameters():
        num = weight.numel()
        for start, stop in ((0, 1), (num // 3, num // 3 + 7), (num - 5, num), (5, 5)):
            assert torch.equal(read(name, "weight", start, stop), weight.detach().flatten()[start:stop]), (name, start, stop)


def test_large_models_are_split_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "SHARD", 40_000)
    gpt = build(LLAMA, LLAMA3)
    export(gpt, tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and not list(tmp_path.glob("part-*"))
    assert all(f"of-{len(files):05}" in name for name in files)
    assert torch.equal(logits(load(tmp_path)), logits(gpt))
    (tmp_path / files[1]).unlink()
    with pytest.raises(ValueError, match=f"lacks {files[1]}"):
        load(tmp_path)
    readers = {name: (lambda weight=weight: weight.detach()) for name, weight in gpt.named_parameters()}
    huggingface.export(tmp_path / "small", readers, gpt.config, gpt.rope, 64, shard=20_000)
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > len(files)


def test_another_shape_is_rejected_with_every_difference(tmp_path: Path) -> None:
    export(build(LLAMA, LLAMA3), tmp_path)
    wrong = dataclasses.replace(LLAMA, kv_heads=4, mlp_dim=96)
    with pytest.raises(ValueError, match=r"model.kv_heads=4 \(there 2\), model.mlp_dim=96 \(there 80\), rope.base=10000"):
        huggingface.weight_reader(tmp_path, wrong, Rope())


def test_another_position_scaling_is_reported(tmp_path: Path) -> None:
    export(build(LLAMA, LLAMA3), tmp_path)
    assert huggingface.rope_difference(tmp_path, LLAMA3) == ""
    warning = huggingface.rope_difference(tmp_path, dataclasses.replace(LLAMA3, factor=32.0))
    assert warning.endswith("rope.factor=32.0 (there 8.0)") and "longer context" in warning
    for kind in ("base", "ntk"):
        assert f"rope.kind={kind} (there llama3), rope.factor=" in huggingface.rope_difference(tmp_path, Rope(kind=kind))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "mamba", "type mamba: llama, qwen3 and gpt2"),
        ("hidden_act", "relu", "hidden_act='relu'"),
        ("attention_bias", True, "attention_bias=True"),
        ("rope_parameters", {"rope_type": "longrope"}, "type longrope"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}, r"not supported: {'mscale': 0.7}"),
        ("layer_types", ["sliding_attention"], "only full_attention"),
    ],
)
def test_unsupported_config_is_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    export(build(LLAMA, LLAMA3), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=message):
        huggingface.read_config(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_config_has_the_dtype_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """Servers of the folder take the dtype from its config.json."""
    export(build(LLAMA, LLAMA3).to(dtype), tmp_path)
    assert f"torch.{json.loads((tmp_path / 'config.json').read_text())['torch_dtype']}" == str(dtype)
    assert File(tmp_path / "model.safetensors")["model.norm.weight"].dtype == dtype


def test_missing_tensor_and_missing_config_are_named(tmp_path: Path) -> None:
    export(build(LLAMA, LLAMA3), tmp_path)
    file = File(tmp_path / "model.safetensors")
    kept = {name: file[name].clone() for name in file if not name.endswith("0.mlp.up_proj.weight")}
    write(tmp_path / "model.safetensors", kept)
    with pytest.raises(ValueError, match=r"lacks the tensors model.layers.0.mlp.up_proj.weight"):
        huggingface.weight_reader(tmp_path, LLAMA, LLAMA3)
    with pytest.raises(ValueError, match=r"no config.json"):
        huggingface.read_config(tmp_path / "nowhere")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: x for key, x in config.items() if key != "hidden_size"}))
    with pytest.raises(ValueError, match=r"has no hidden_size in its config.json"):
        huggingface.read_config(tmp_path)


@pytest.mark.parametrize("changes", [dict(sinks=True), dict(softcap=5.0), dict(windows=[4, 0]), dict(norm="layernorm")])
def test_model_without_a_hugging_face_family_is_rejected(changes: dict) -> None:
    with pytest.raises(ValueError, match=r"no Llama, Qwen3 or GPT-2"):
        huggingface.family_of(dataclasses.replace(LLAMA, **changes), Rope())


def plain_llama(tensors: dict[str, Tensor], config: dict) -> Tensor:
    """Llama and Qwen3 from their papers and model cards, in fp64."""
    H, G, D, eps = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"))

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * tensors[name]

    length = TOKENS.shape[1]
    frequencies, scale = plain_rope(config["rope_parameters"], D)
    angles = torch.arange(length).double()[:, None] * torch.tensor(frequencies).double()
    rotation = torch.polar(torch.full_like(angles, scale), angles)[None, :, None]

    def rotate(x: Tensor) -> Tensor:
        rotated = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * rotation
        return torch.cat([rotated.real, rotated.imag], -1)

    x = tensors["model.embed_tokens.weight"][TOKENS]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = norm(x, layer + "input_layernorm.weight")
        q, k, v = (
            (h @ tensors[f"{layer}self_attn.{name}_proj.weight"].T).unflatten(-1, (heads, D))
            for name, heads in (("q", H), ("k", G), ("v", G))
        )
        if config["model_type"] == "qwen3":
            q, k = norm(q, layer + "self_attn.q_norm.weight"), norm(k, layer + "self_attn.k_norm.weight")
        k, v = (y.repeat_interleave(H // G, 2) for y in (rotate(k), v))
        scores = torch.einsum("bqhd,bkhd->bhqk", rotate(q), k) / math.sqrt(D)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(future, -math.inf).softmax(-1), v)
        x = x + out.flatten(-2) @ tensors[layer + "self_attn.o_proj.weight"].T
        h = norm(x, layer + "post_attention_layernorm.weight")
        gate, up, down = (tensors[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        x = x + (h @ gate * torch.sigmoid(h @ gate) * (h @ up)) @ down
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ tensors[head].T


def plain_rope(rope: dict, D: int) -> tuple[list[float], float]:
    """Frequencies of the pairs, and the scale of cos and sin."""
    base, kind = rope["rope_theta"], rope["rope_type"]
    frequencies = [base ** (-2 * i / D) for i in range(D // 2)]
    if kind == "default":
        return frequencies, 1.0
    interpolated = [frequency / rope["factor"] for frequency in frequencies]
    if kind == "linear":
        return interpolated, 1.0
    length = rope["original_max_position_embeddings"]
    if kind == "llama3":
        out = []
        for original, scaled in zip(frequencies, interpolated, strict=True):
            wave, low, high = 2 * math.pi / original, rope["low_freq_factor"], rope["high_freq_factor"]
            blend = (length / wave - low) / (high - low)
            blended = (1 - blend) * scaled + blend * original
            out.append(original if wave < length / high else scaled if wave > length / low else blended)
        return out, 1.0

    def pair(rotations: float) -> float:
        return D * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair(rope["beta_fast"])), 0), min(math.ceil(pair(rope["beta_slow"])), D - 1)
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(D // 2)]
    return [f * (1 - r) + s * r for f, s, r in zip(frequencies, interpolated, ramp, strict=True)], 0.1 * math.log(
        rope["factor"]
    ) + 1


def plain_gpt2(tensors: dict[str, Tensor], config: dict) -> Tensor:
    H, width, length = config["n_head"], config["n_embd"], TOKENS.shape[1]
    t = {name.removeprefix("transformer."): x for name, x in tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (width,), t[name + ".weight"], t[name + ".bias"], config["layer_norm_epsilon"])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ t[name + ".weight"] + t[name + ".bias"]  # Conv1D stores its matrix transposed

    x = t["wte.weight"][TOKENS] + t["wpe.weight"][:length]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for i in range(config["n_layer"]):
        q, k, v = (y.unflatten(-1, (H, -1)) for y in linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(width, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // H)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(future, -math.inf).softmax(-1), v).flatten(-2)
        x = x + linear(out, f"h.{i}.attn.c_proj")
        h = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ t["wte.weight"].T
