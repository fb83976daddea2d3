"""TrainerMixin: losses, evaluation, weights and a resumed run of transformers' Trainer on one rank."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate import ParallelismConfig

from ringspan.hf import context_parallel
from tests.hf import trainer_jobs
from tests.hf.models import relative_errors

Run = tuple[list[dict[str, float]], dict[str, Any]]


def values(log: list[dict[str, float]], name: str) -> dict[int, float]:
    return {int(entry["step"]): entry[name] for entry in log if name in entry}


def compare(run: Run, expected: Run, from_step: int = 1) -> None:
    for name in ("loss", "eval_loss", "grad_norm"):
        actual = values(run[0], name)
        wanted = {step: value for step, value in values(expected[0], name).items() if step >= from_step}
        assert wanted and {step: actual[step] for step in wanted} == pytest.approx(wanted, rel=1e-6 if "loss" in name else 1e-5)
    errors = relative_errors(run[1], expected[1])
    assert max(errors.values()) < 1e-5, errors


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trainer_jobs.train(str(tmp_path_factory.mktemp("one")), attention="eager")


def test_two_ranks_and_a_resumed_run(ranks: Callable[..., list[Any]], one_rank: Run, tmp_path: Path) -> None:
    runs = [run for run in ranks(trainer_jobs.train_on_ring, 2, 1, str(tmp_path)) if run]
    assert len(runs) == 2 and values(runs[0][0], "loss") == values(runs[1][0], "loss")
    for run in runs:
        compare(run, one_rank)
    resumed = ranks(partial(trainer_jobs.train_on_ring, resume=str(tmp_path / "checkpoint-10")), 2, 1, str(tmp_path / "b"))[0]
    compare(resumed, one_rank, from_step=11)


def test_two_replicas_of_two_ranks(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Numbers of samples that leave no short batch: with replicas, the Trainer fills those from the start of the data."""
    sizes = dict(samples=24, evaluated=8)
    one = trainer_jobs.train(str(tmp_path / "one"), attention="eager", per_device_train_batch_size=4, **sizes)
    for run in ranks(partial(trainer_jobs.train_on_ring, **sizes), 4, 2, str(tmp_path / "four")):
        compare(run, one)


def test_options_that_a_ring_cannot_honour_are_refused(tmp_path: Path) -> None:
    for options, name in (
        (dict(label_smoothing_factor=0.1), "label_smoothing_factor=0.1"),
        (dict(average_tokens_across_devices=False), "average_tokens_across_devices=False"),
        (dict(train_sampling_strategy="batch_rebalance"), "train_sampling_strategy='batch_rebalance'"),
        (dict(attention="eager"), "attn_implementation='eager'"),
        (dict(compute_loss_func=lambda outputs, labels, **_: outputs.logits.sum()), "compute_loss_func"),
        (dict(use_liger_kernel=True), "use_liger_kernel=True"),
        (dict(parallelism_config=ParallelismConfig()), "parallelism_config"),
    ):
        with pytest.raises(ValueError, match=f"^{name} under a ring"):
            trainer_jobs.train(str(tmp_path), ring=context_parallel(), **options)


def test_whole_logits_are_predicted_once(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Metrics see the sequences that one rank would predict. Five sequences leave a short batch, eight do not."""
    for size, data, samples in ((2, 1, 5), (4, 2, 8)):
        logits, labels, loss = trainer_jobs.predict(str(tmp_path), samples, attention="eager")
        for predicted in filter(None, ranks(trainer_jobs.predict_on_ring, size, data, str(tmp_path), samples)):
            assert predicted[0].shape == logits.shape and abs(predicted[0] - logits).max() < 1e-4
            assert (predicted[1] == labels).all() and predicted[2] == pytest.approx(loss, rel=1e-5)
