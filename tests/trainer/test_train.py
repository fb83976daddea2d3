"""A whole run at toy size: it learns, repeats itself bit for bit, and tells users what is wrong."""

import re

import pytest
import torch

from kernels import Mask
from trainer.arguments import Config
from trainer.cost import training_flops, visible_pairs
from trainer.data import VOCABULARY, Dataset, read_documents, split
from trainer.generate import generate
from trainer.loop import evaluate, train
from trainer.model import GPT, GPTConfig
from trainer.optim import Cosine, adamw
from trainer.train import main

TOY = ["--layers=1", "--dim=32", "--heads=1", "--length=64", "--batch=4", "--device=cpu"]
LINE = r"step {}/{}  loss \d\.\d{{3}}  grad \d+\.\d\d  lr \d\.\de-\d\d  \d+k tok  [\d.e-]+ TFLOP/s"


@pytest.fixture(scope="module")
def texts() -> tuple[list[bytes], list[bytes]]:
    return split(read_documents(Config().text))


def model(**changes) -> GPT:
    torch.manual_seed(0)
    shape = dict(vocabulary=VOCABULARY, layers=2, dim=64, heads=4, kv_heads=2, mlp_dim=128, head_dim=16)
    return GPT(GPTConfig(**(shape | changes)))


def run(texts: tuple[list[bytes], list[bytes]], seed: int = 0) -> tuple[list[float], float]:
    data, held_out = (Dataset(part, 128, 4, seed) for part in texts)
    learner = model()
    losses = train(learner, data, held_out, Cosine(30, 4e-3))
    return losses, evaluate(learner, held_out)


def test_thirty_steps_lower_the_loss_and_a_seed_repeats_it_bit_for_bit(texts: tuple[list[bytes], list[bytes]]) -> None:
    losses, held_out = run(texts)
    assert len(losses) == 30
    assert losses[0] > 5 and max(losses[-5:]) < 3.6 and held_out < 3.6
    assert run(texts) == (losses, held_out)
    assert run(texts, seed=1)[0] != losses


def test_evaluation_weighs_tokens_and_not_batches() -> None:
    learner = model()
    data = Dataset([bytes(range(100, 130)), b"ab", b"c"], 8, 2, seed=0)
    total, count = 0.0, 0
    for step in range(len(data)):
        loss_sum, num_valid = learner(*data.batch(step))
        total, count = total + loss_sum.item(), count + num_valid.item()
    assert evaluate(learner, data) == pytest.approx(total / count, rel=1e-6)


def test_a_batch_without_labels_is_no_division_by_zero() -> None:
    losses = train(model(), Dataset([b"a", b"b"], 4, 1, 0), Dataset([b"c"], 4, 1, 0), Cosine(1, 1e-3))
    assert losses == [0.0]


def test_a_run_tells_how_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    main([*TOY, "--steps=21"])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"[\d,]+ weights on cpu; [\d,]+ bytes to learn from", lines[0])
    for line, step in zip(lines[1:4], (" 1", "20", "21"), strict=True):
        assert re.fullmatch(LINE.format(step, 21), line), line
    assert re.fullmatch(r"step 21/21  held-out loss \d\.\d{3}  \d\.\d\d bits per byte", lines[4])
    assert "▌" in "".join(lines[5:])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--steps=0", "steps=0: it must be at least 1"),
        ("--steps=many", "argument --steps: invalid int value: 'many'"),
        ("--step=5", "unrecognized arguments: --step=5"),
        ("optim.lr=1", "unrecognized arguments: optim.lr=1"),
        ("--lr=nan", "lr=nan"),
        ("--length=0", "length=0"),
        ("--batch=0", "batch=0"),
        ("--seed=-1", "seed=-1"),
        ("--layers=0", "layers=0"),
        ("--kv-heads=2", "heads=1, kv_heads=2"),
        ("--text=nowhere/*.md", "text='nowhere/*.md' names 0 different files"),
        ("--device=tpu", "device='tpu': choose auto, cpu or cuda"),
        pytest.param(
            "--device=cuda",
            "torch finds no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="here it finds one"),
        ),
    ],
)
def test_a_wrong_option_is_named(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*TOY, option])
    assert stop.value.code not in (0, None)
    assert message in str(stop.value.code) + capsys.readouterr().err


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit, match="without torchrun"):
        main(TOY)


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')} " in text for name in Config.__dataclass_fields__)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [Cosine(100, 1.0)(step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert Cosine(1, 1.0)(1) == 1.0


def test_norms_do_not_decay() -> None:
    learner = model()
    decaying, others = adamw(learner).param_groups
    assert decaying["weight_decay"] > 0 and others["weight_decay"] == 0
    assert len(others["params"]) == 2 * 2 + 1
    assert len(decaying["params"]) + len(others["params"]) == len(list(learner.parameters()))


def test_cost_counts_the_weights_of_products_and_the_pairs_that_see_each_other() -> None:
    learner = model(tied=False)
    mask = Mask(causal=True, documents=[0, 0, 0, 1, 1, -1])
    pairs = 2 * int(mask.visible(torch.arange(6), torch.arange(6)).sum())
    assert visible_pairs(mask, 2, 6) == pairs == 2 * (6 + 3)
    weights = sum(w.numel() for w in learner.parameters() if w.ndim == 2) - learner.embedding.weight.numel()
    expected = 6 * weights * 12 + 3.5 * 4 * 2 * 4 * 16 * pairs  # layers, heads, head_dim
    assert training_flops(learner.config, torch.Size((2, 6)), mask) == expected


def test_a_sample_repeats_and_may_outgrow_the_context() -> None:
    learner = model()
    sample = generate(learner, b"def ", 40, context=16)
    assert len(sample) == 40
    assert sample == generate(learner, b"def ", 40, context=16)
    assert sample != generate(learner, b"def ", 40, context=16, seed=1)
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(learner, b"", 1, context=16)
    with pytest.raises(ValueError, match="temperature=0"):
        generate(learner, b"a", 1, context=16, temperature=0)
