"""The GPT in fp64: packed documents, gradients, causality, windows, heads, positions, dropout and initial weights."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from ringspan import Mask, attention
from ringspan.trainer.config.schema import Model, Rope
from ringspan.trainer.model import CHUNK, GPT, frequencies, initial_values
from ringspan.trainer.planning.flops import parameters

LENGTHS = [7, 1, 300, 24]  # 300 is more than a chunk of queries
SHAPE = Model(vocabulary=31, layers=2, dim=24, heads=4, kv_heads=2, mlp_dim=40, head_dim=16)
GPT2 = dict(norm="layernorm", positions="learned", max_positions=512, activation="gelu", bias=True)
VARIANTS = {
    "llama": {},
    "gpt2": GPT2,
    "qwen3": dict(qk_norm=True),
    "gpt-oss": dict(sinks=True, windows=[5, 0], tied=False),
    "gemma": dict(softcap=5.0, logit_softcap=3.0),
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def build(attention_function=attention, device="cpu", rope: Rope | None = None, **changes) -> GPT:
    gpt = GPT(dataclasses.replace(SHAPE, **changes), rope, attention_function).to(device, torch.float64)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # initial norms, biases and sinks are constant, and matrices are small
        for weight in gpt.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator).to(weight), alpha=0.2)
    return gpt


def packed(lengths: list[int], device="cpu"):
    """tokens, labels (a document's last has none), positions and documents of one sequence."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randint(0, SHAPE.vocabulary, (n,), generator=generator) for n in lengths]
    tokens = torch.cat(parts)[None]
    labels = torch.cat([F.pad(part[1:], (0, 1), value=-100) for part in parts])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    return tokens.to(device), labels.to(device), positions.to(device), documents


def alone(tokens, labels, lengths: list[int], device="cpu"):
    parts = zip(tokens.split(lengths, 1), labels.split(lengths, 1), strict=True)
    return [(part, label, torch.arange(part.shape[1], device=device)[None]) for part, label in parts]


@variants
def test_loss_of_packed_documents_is_the_sum_of_their_losses(device: str, variant: str) -> None:
    model = build(device=device, **VARIANTS[variant])
    tokens, labels, positions, documents = packed(LENGTHS, device)
    loss, num_valid = model(tokens, labels, positions, documents)
    losses = [model(*part) for part in alone(tokens, labels, LENGTHS, device)]
    assert num_valid == sum(count for _, count in losses) == sum(LENGTHS) - len(LENGTHS)
    torch.testing.assert_close(loss, sum(loss for loss, _ in losses), rtol=1e-10, atol=0)


@variants
def test_gradient_of_packed_documents_is_the_sum_of_their_gradients(variant: str) -> None:
    model = build(**VARIANTS[variant])
    batch = packed(LENGTHS)
    weights = dict(model.named_parameters())
    together = torch.autograd.grad(model(*batch)[0], list(weights.values()))
    for part in alone(*batch[:2], LENGTHS):
        model(*part)[0].backward()
    for (name, weight), grad in zip(weights.items(), together, strict=True):
        torch.testing.assert_close(grad, weight.grad, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@variants
def test_gradient_is_the_slope_of_the_loss_for_every_weight(variant: str) -> None:
    model = build(**VARIANTS[variant])
    batch = packed([9, 14])
    model(*batch)[0].backward()
    for name, weight in model.named_parameters():
        direction = torch.randn_like(weight)
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(direction, alpha=sign * 1e-5)
                losses.append(model(*batch)[0])
                weight.sub_(direction, alpha=sign * 1e-5)
        slope = (losses[0] - losses[1]) / 2e-5
        if name.endswith("k.bias"):  # it adds the same number to all scores of a query
            assert weight.grad.abs().max() < 1e-10
            continue
        assert weight.grad.any(), name
        torch.testing.assert_close(slope, (weight.grad * direction).sum(), rtol=1e-4, atol=1e-6, msg=name)


@variants
def test_later_tokens_change_nothing(variant: str) -> None:
    model = build(**VARIANTS[variant])
    tokens, _, positions, documents = packed([300])
    before = model.logits(tokens, positions, documents)
    tokens[0, 270] = (tokens[0, 270] + 1) % 31
    after = model.logits(tokens, positions, documents)
    torch.testing.assert_close(after[:, :270], before[:, :270], rtol=0, atol=1e-12)
    assert (after[:, 270:] != before[:, 270:]).any(-1).all() or VARIANTS[variant].get("windows")


def test_window_pattern_repeats_over_the_layers() -> None:
    calls = []

    def recorded_attention(q, k, v, **options):
        calls.append(options["mask"].window)
        return attention(q, k, v, **options)

    model = build(recorded_attention, layers=5, windows=[4, 4, 0])
    batch = packed([20, 3])
    model(*batch)
    assert calls == [4, 4, None, 4, 4]
    one = build(windows=[4], layers=1)  # in a single layer a token changes only the logits of its window
    tokens, _, positions, _ = packed([30])
    before = one.logits(tokens, positions)
    tokens[0, 10] = (tokens[0, 10] + 1) % 31
    changed = (one.logits(tokens, positions) != before).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == [10, 11, 12, 13]


def test_padding_changes_no_loss() -> None:
    model = build()
    tokens, labels, positions, _ = packed([20])
    loss, num_valid = model(tokens, labels, positions)
    documents = torch.tensor([0] * 20 + [-1] * 5)
    padded = model(F.pad(tokens, (0, 5)), F.pad(labels, (0, 5), value=-100), F.pad(positions, (0, 5)), documents)
    torch.testing.assert_close(padded[0], loss, rtol=1e-12, atol=0)
    assert padded[1] == num_valid


def test_rows_of_a_batch_have_their_own_documents() -> None:
    model = build()
    documents = torch.tensor([[0] * 5 + [1] * 15, [0] * 12 + [1] * 8])
    positions = torch.arange(20) - Mask(documents=documents).bounds().starts
    tokens = torch.randint(0, 31, (2, 20))
    loss, _ = model(tokens, tokens, positions, documents)
    rows = [model(tokens[i : i + 1], tokens[i : i + 1], positions[i : i + 1], documents[i])[0] for i in (0, 1)]
    torch.testing.assert_close(loss, sum(rows), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_query_heads_share_key_heads_in_order(kv_heads: int) -> None:
    grouped, full = build(kv_heads=kv_heads), build(kv_heads=4)
    weights = grouped.state_dict()
    for name in weights:
        if name.endswith((".k.weight", ".v.weight")):
            weights[name] = weights[name].unflatten(0, (kv_heads, 16)).repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
    full.load_state_dict(weights)
    batch = packed([30])
    torch.testing.assert_close(grouped(*batch)[0], full(*batch)[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["base", "linear", "ntk", "yarn", "llama3"])
def test_logits_depend_only_on_distances_between_positions(kind: str) -> None:
    model = build(rope=Rope(kind=kind, factor=1.0 if kind == "base" else 4.0, original_length=64))
    tokens, _, positions, _ = packed([50])
    far = model.logits(tokens, positions + 4_000_000)
    torch.testing.assert_close(far, model.logits(tokens, positions), rtol=0, atol=1e-7)
    assert not torch.allclose(model.logits(tokens, positions * 2), far)


def test_rope_of_full_layers_scales_those_without_a_window_only() -> None:
    """A model of windows equals an unscaled one, a model of full layers a scaled one; mixed, each layer gets its own angles."""
    shape = dict(vocabulary=64, layers=2, dim=32, heads=2, kv_heads=2, head_dim=16, mlp_dim=32)
    tokens, positions = torch.randint(0, 64, (1, 100)), torch.arange(100)[None]

    def logits(windows: list[int], **rope: Any) -> torch.Tensor:
        return GPT(Model(windows=windows, **shape), Rope(**rope)).logits(tokens, positions)

    yarn = dict(kind="yarn", factor=8.0, original_length=32)
    assert torch.equal(logits([90], **yarn, layers="full"), logits([90]))
    assert torch.equal(logits([0], **yarn, layers="full"), logits([0], **yarn))
    mixed = logits([90, 0], **yarn, layers="full")
    assert not any(torch.allclose(mixed, logits([90, 0], **other)) for other in ({}, yarn))
    model, seen = GPT(Model(windows=[90, 0], **shape), Rope(**yarn, layers="full")), []
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[1]))
    model.logits(tokens, positions)
    assert torch.equal(seen[0][0], model.rotation(positions, scaled=False)[0])
    assert torch.equal(seen[1][0], model.rotation(positions)[0]) and not torch.equal(seen[0][0], seen[1][0])


def test_scaled_rope_divides_low_frequencies_by_the_factor_and_keeps_high_ones() -> None:
    base, _ = frequencies(Rope(), 64)
    torch.testing.assert_close(base[[0, -1]], torch.tensor([1.0, 10_000 ** (-62 / 64)], dtype=torch.float64))
    for kind in ("ntk", "yarn", "llama3"):
        scaled, scale = frequencies(Rope(kind=kind, factor=8.0, original_length=2048), 64)
        assert scaled[0] == base[0] and (scaled.diff() < 0).all(), kind
        torch.testing.assert_close(scaled[-1], base[-1] / 8, rtol=1e-9, atol=0)
        assert scale == pytest.approx(1 + 0.1 * math.log(8) if kind == "yarn" else 1.0)
    linear, _ = frequencies(Rope(kind="linear", factor=8.0), 64)
    torch.testing.assert_close(linear, base / 8)


def test_loss_and_hits_of_each_token_are_those_of_the_logits() -> None:
    model = build(logit_softcap=3.0)
    tokens, labels, positions, documents = packed(LENGTHS)
    logits = model.logits(tokens, positions, documents)
    expected = F.cross_entropy(logits[0], labels[0], reduction="none")
    loss, num_valid, losses, hits = model(tokens, labels, positions, documents, each=True)
    torch.testing.assert_close(loss, expected.sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(losses[0], expected, rtol=1e-10, atol=1e-12)
    assert num_valid == (labels >= 0).sum() and not losses.requires_grad
    assert torch.equal(hits, (logits.argmax(-1) == labels)) and 0 < hits.sum() < num_valid
    torch.testing.assert_close(model.logits(tokens, positions, documents, last=True), logits[:, -1:])


def test_attention_is_an_argument() -> None:
    calls = []

    def recorded_attention(q, k, v, **options):
        calls.append((q.shape, k.shape))
        return attention(q, k, v, **options)

    batch = packed([16])
    torch.testing.assert_close(build(recorded_attention)(*batch), build()(*batch), rtol=0, atol=0)
    assert calls == [((1, 16, 4, 16), (1, 16, 2, 16))] * 2
    logits = build().logits(batch[0], batch[2], attention=recorded_attention)
    assert len(calls) == 4 and torch.equal(logits, build().logits(batch[0], batch[2]))


def test_documents_reach_the_mask_unless_a_sequence_is_one() -> None:
    model = build()
    for documents, length in (([[0] * 9], None), ([[3] * 9, [4] * 9], None), ([[0] * 4 + [1] * 5], 9), ([[-1] * 9], 9)):
        masks = model.masks(torch.tensor(documents), torch.device("cpu"))
        assert [mask.length for mask in masks.values()] == [length]


def test_dropout_depends_on_the_seeds_and_only_while_training() -> None:
    model = build(dropout=0.3)
    batch = packed([40])
    losses = [model(*batch, torch.tensor([seed]))[0].item() for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    with pytest.raises(ValueError, match=r"seeds=None, but model.dropout=0.3"):
        model(*batch)
    model.eval()
    assert model(*batch)[0] == build()(*batch)[0] == model(*batch, torch.tensor([1]))[0]


@pytest.mark.slow
def test_layers_compile_once_per_window_size_for_all_lengths() -> None:
    torch._dynamo.reset()
    plain, compiled = (build(windows=[8, 0], sinks=True, qk_norm=True, layers=4) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    for layer in compiled.layers:
        layer.compile(backend=counter, fullgraph=True)
    for length in (40, 48, 56, 64):
        batch = packed([length, 9])
        losses = [model(*batch)[0] for model in (plain, compiled)]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        losses[1].backward()
    assert counter.frame_count <= 4  # two window sizes, each once for one length and once for any


@variants
def test_parameters_are_counted_by_term(variant: str) -> None:
    model = build(**VARIANTS[variant])
    terms = dict(embedding=0, attention=0, mlp=0, norms=0, head=0)
    for name, weight in model.named_parameters():
        kind = next(k for k in ("norm", "embedding", "head", "attention", "mlp") if k in name)
        terms["norms" if kind == "norm" else kind] += weight.numel()
    counted = parameters(model.config)
    assert terms == {name: getattr(counted, name) for name in terms}
    matmuls = sum(w.numel() for n, w in model.named_parameters() if w.ndim == 2 and "embedding" not in n and n != "head.weight")
    assert counted.matmuls == matmuls + model.head.weight.numel()


def test_initial_weights_depend_on_seed_name_and_index_alone() -> None:
    shape = torch.Size((3 * CHUNK // 64, 64))
    full = initial_values("layers.0.mlp.up.weight", shape, SHAPE, seed=1)
    assert full.std().item() == pytest.approx(SHAPE.init_std, rel=1e-2)
    for start, stop in ((0, 5), (CHUNK - 3, CHUNK + 3), (2 * CHUNK + 1, 3 * CHUNK), (7, 7)):
        assert torch.equal(initial_values("layers.0.mlp.up.weight", shape, SHAPE, 1, start, stop), full[start:stop])
    for name, seed in (("layers.1.mlp.up.weight", 1), ("layers.0.mlp.up.weight", 2)):
        assert abs(torch.corrcoef(torch.stack([full, initial_values(name, shape, SHAPE, seed)]))[0, 1]) < 0.01
    residual = initial_values("layers.0.mlp.down.weight", shape, SHAPE, seed=1)
    assert residual.std().item() == pytest.approx(SHAPE.init_std / 2, rel=1e-2)  # √(2 layers)


def test_initial_loss_is_that_of_chance() -> None:
    model = GPT(dataclasses.replace(SHAPE, **GPT2, sinks=True), seed=5)
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    loss, count = model(*packed([200]))
    assert loss.item() / count.item() == pytest.approx(math.log(31), rel=0.02)
    again = GPT(model.config, seed=5).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocabulary=0), "model.vocabulary=0"),
        (dict(heads=3), "model.heads=3, model.kv_heads=2"),
        (dict(head_dim=0, dim=30), "model.dim=30, model.heads=4"),
        (dict(head_dim=12), "model.head_dim=12"),
        (dict(windows=[-1]), "model.windows"),
        (dict(positions="learned"), "model.max_positions=0"),
    ],
)
def test_invalid_shape_is_rejected(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPT(dataclasses.replace(SHAPE, **changes))


def test_bf16_matmuls_keep_the_loss_and_fp32_gradients() -> None:
    batch = packed(LENGTHS)
    exact, model = build(), build().float()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model(*batch)
    loss.backward()
    assert loss.dtype == torch.float32 and all(w.grad.dtype == torch.float32 for w in model.parameters())
    torch.testing.assert_close(loss.double(), exact(*batch)[0], rtol=5e-3, atol=0)
