"""The GPT: what it promises about documents, heads, gradients and time, in fp64."""

import pytest
import torch
from torch.nn import functional as F

import kernels
from kernels import Mask
from trainer.model import GPT, GPTConfig

LENGTHS = [7, 1, 300, 24]  # 300 is more than a chunk of queries
SHAPE = dict(vocabulary=31, layers=2, dim=24, heads=4, kv_heads=2, mlp_dim=40, head_dim=16)


def build(attention=kernels.attention, device="cpu", **changes) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**(SHAPE | changes)), attention).to(device, torch.float64)


def documents(lengths: list[int], device="cpu"):
    """tokens, labels (a document's last has none), mask and positions of documents packed into one sequence."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randint(0, SHAPE["vocabulary"], (n,), generator=generator) for n in lengths]
    tokens = torch.cat(parts)[None]
    labels = torch.cat([F.pad(part[1:], (0, 1), value=-100) for part in parts])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])
    return tokens.to(device), labels.to(device), Mask.from_lengths(lengths, causal=True), positions.to(device)


def test_packed_documents_cost_what_each_costs_alone(device: str) -> None:
    model = build(device=device)
    tokens, labels, mask, positions = documents(LENGTHS, device)
    loss, num_valid = model(tokens, labels, mask, positions)
    total, count = 0.0, 0
    for part, label in zip(tokens.split(LENGTHS, 1), labels.split(LENGTHS, 1), strict=True):
        alone = model(part, label, Mask(causal=True), torch.arange(part.shape[1], device=device))
        total, count = total + alone[0], count + alone[1]
    assert num_valid == count == sum(LENGTHS) - len(LENGTHS)
    torch.testing.assert_close(loss, total, rtol=1e-10, atol=0)


def test_packed_documents_have_the_gradients_of_each_alone() -> None:
    model = build()
    tokens, labels, mask, positions = documents(LENGTHS)
    packed = torch.autograd.grad(model(tokens, labels, mask, positions)[0], list(model.parameters()))
    for part, label in zip(tokens.split(LENGTHS, 1), labels.split(LENGTHS, 1), strict=True):
        model(part, label, Mask(causal=True), torch.arange(part.shape[1]))[0].backward()
    for (name, weight), grad in zip(model.named_parameters(), packed, strict=True):
        torch.testing.assert_close(grad, weight.grad, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_padding_changes_nothing() -> None:
    model = build()
    tokens, labels, _, positions = documents([20])
    loss, num_valid = model(tokens, labels, Mask(causal=True), positions)
    ids = torch.tensor([0] * 20 + [-1] * 5)
    padded = model(
        F.pad(tokens, (0, 5)), F.pad(labels, (0, 5), value=-100), Mask(True, documents=ids), F.pad(positions, (0, 5))
    )
    torch.testing.assert_close(padded[0], loss, rtol=1e-12, atol=0)
    assert padded[1] == num_valid


def test_a_batch_may_have_different_documents_in_each_row() -> None:
    model = build()
    ids = torch.tensor([[0] * 5 + [1] * 15, [0] * 12 + [1] * 8])
    positions = torch.arange(20) - Mask(documents=ids).bounds().starts
    tokens = torch.randint(0, 31, (2, 20))
    loss, _ = model(tokens, tokens, Mask(causal=True, documents=ids), positions)
    rows = [model(tokens[i : i + 1], tokens[i : i + 1], Mask(True, documents=ids[i]), positions[i])[0] for i in (0, 1)]
    torch.testing.assert_close(loss, sum(rows), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_query_heads_share_key_heads_in_order(kv_heads: int) -> None:
    grouped, full = build(kv_heads=kv_heads), build(kv_heads=4)
    weights = grouped.state_dict()
    for name in weights:
        if name.endswith((".k.weight", ".v.weight")):
            weights[name] = weights[name].unflatten(0, (kv_heads, 16)).repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
    full.load_state_dict(weights)
    batch = documents([30])
    torch.testing.assert_close(grouped(*batch)[0], full(*batch)[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_reach_every_weight(tied: bool) -> None:
    model = build(tied=tied)
    model(*documents([40]))[0].backward()
    assert [name for name, w in model.named_parameters() if w.grad is None or not w.grad.any()] == []
    assert len(list(model.parameters())) == 2 * 9 + 2 + (not tied)  # a layer has 9
    assert (model.head.weight is model.embedding.weight) == tied


def test_the_gradient_is_the_losses_slope() -> None:
    model = build()
    batch = documents([9, 4])
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
        torch.testing.assert_close(slope, (weight.grad * direction).sum(), rtol=1e-5, atol=1e-7, msg=name)


def test_the_future_changes_nothing() -> None:
    model = build()
    tokens, _, mask, positions = documents([300])
    before = model.logits(tokens, mask, positions)
    tokens[0, 270] = (tokens[0, 270] + 1) % 31
    after = model.logits(tokens, mask, positions)
    torch.testing.assert_close(after[:, :270], before[:, :270], rtol=0, atol=1e-13)
    assert (after[:, 270:] != before[:, 270:]).any(-1).all()


def test_only_distances_between_positions_matter() -> None:
    model = build()
    tokens, _, mask, positions = documents([50])
    far = model.logits(tokens, mask, positions + 4_000_000)
    torch.testing.assert_close(far, model.logits(tokens, mask, positions), rtol=0, atol=1e-8)
    assert not torch.allclose(model.logits(tokens, mask, positions * 2), far)


def test_logits_and_loss_agree() -> None:
    model = build()
    tokens, labels, mask, positions = documents(LENGTHS)
    expected = F.cross_entropy(model.logits(tokens, mask, positions)[0], labels[0], reduction="sum")
    torch.testing.assert_close(model(tokens, labels, mask, positions)[0], expected, rtol=1e-12, atol=0)


def test_attention_is_an_argument() -> None:
    calls = []

    def attention(q, k, v, **options):
        calls.append((q.shape, k.shape, options["mask"]))
        return kernels.attention(q, k, v, **options)

    batch = documents([16])
    torch.testing.assert_close(build(attention)(*batch), build()(*batch), rtol=0, atol=0)
    assert calls == [((1, 16, 4, 16), (1, 16, 2, 16), batch[2])] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layers=0), "layers=0"),
        (dict(dim=-8), "dim=-8"),
        (dict(heads=3), "heads=3, kv_heads=2"),
        (dict(head_dim=7), "head_dim=7"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**(SHAPE | changes))


def test_bf16_products_keep_the_loss_and_fp32_gradients() -> None:
    batch = documents(LENGTHS)
    exact, model = build(), build().float()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model(*batch)
    loss.backward()
    assert loss.dtype == torch.float32 and all(w.grad.dtype == torch.float32 for w in model.parameters())
    torch.testing.assert_close(loss.double(), exact(*batch)[0], rtol=2e-3, atol=0)
