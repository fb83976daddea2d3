"""`ringspan evaluate`: tables, JSON and figure of a checkpoint, equal under a ring; wrong input is one message."""

import json
from pathlib import Path

import pytest
import torch

from ringspan.trainer.evaluation import command, recorded
from ringspan.trainer.reports import results as results_command
from tests.trainer import jobs

SIZES = ["--lengths", "1k", "2k", "--sequences", "2", "--questions", "2"]
SUITE = [*SIZES, "--families", "single", "two_facts", "--device", "cpu"]


def evaluate(arguments: list[str]) -> None:
    command.main(arguments)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    options = [f"runs={folder}", "name=run", "steps=3", "evaluate.batches=0", "data.sources.needles.kind=needles"]
    options += ["data.sources.needles.families=[single]", "data.sources.needles.num_questions=1", "data.length=1024"]
    assert jobs.run_ranks(1, jobs.train, [*options, "data.batch=2"]) == [0]
    return folder / "run"


def test_results_are_equal_under_a_ring_recorded_and_drawn(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for ranks, ring, more in (
        (1, 0, []),
        (2, 0, []),
        (2, 1, []),
        (2, 0, ["--cut-ring"]),
        (1, 0, ["--seen", "keys", "templates"]),
        (1, 0, ["--rope", "kind=yarn", "--rope", "factor=2.0"]),
    ):
        path = tmp_path / f"{len(results)}.json"
        arguments = [str(run), *SUITE, "--ring", str(ring), "--json", str(path), *more]
        assert jobs.run_ranks(ranks, evaluate, arguments) == [0] * ranks
        results.append(json.loads(path.read_text()))
        assert "1k" in jobs.output and "2k*" in jobs.output and jobs.output.count("* beyond the 1024") == 1
    far = [[row.pop("far")["num"] for row in result["rows"]] for result in results]
    one, ring, data, cut, seen, yarn = results
    assert yarn["rope"] == dict(kind="yarn", factor=2.0) and one["rope"] == dict(kind="base", factor=1.0)
    assert seen["seen"] == ["templates", "keys"] and seen["rows"] != one["rows"] and one["seen"] == []
    assert one["rows"] == ring["rows"] == data["rows"] and len(one["rows"]) == 4
    assert sum(far[0]) == sum(far[2]) == 0 and far[1] == far[3] and all(0 < num < 4 for num in far[1][:2])
    assert [result["ring"] for result in results] == [1, 2, 1, 2, 1, 1] and cut["cut_ring"]
    assert one["trained_families"] == ["single"] and one["trained_length"] == 1024 and one["checkpoint"] == "run/step-00000003"
    assert all(row["num"] == 4 for row in one["rows"])

    evaluations = recorded.read(run)
    assert [(each["cut_ring"], len(each["rows"])) for each in evaluations] == [(False, 4), (True, 4), (False, 4), (False, 4)]
    assert recorded.title(evaluations[3]).endswith("trained at 1k, rope.factor=2, rope.kind=yarn")
    assert recorded.title(evaluations[2]) == "run/step-00000003, trained at 1k, templates and keys of training"
    text = recorded.text(evaluations[1])
    assert text.startswith("run/step-00000003, trained at 1k, ring cut") and "further away than one rank's tokens" in text
    assert "rope.kind=base: positions beyond the 1024 tokens" in text and "rope.factor=2 and rope.original_length=1024" in text
    pytest.importorskip("matplotlib")
    assert results_command.main([str(run), "--skip", "0", "--plot", str(tmp_path / "loss.png")]) == 0
    out = capsys.readouterr().out
    assert all(recorded.text(result) in out for result in evaluations)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "loss.png", "suite-run-step-00000003.png", "suite-run-step-00000003-cut.png",
        "suite-run-step-00000003-templates-keys.png", "suite-run-step-00000003-factor=2-kind=yarn.png",
    }  # fmt: skip


def test_wrong_input_is_one_message(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        ([str(tmp_path)], "is no checkpoint and contains none"),
        ([str(run), "--lengths", "64"], "num_questions=16: with their facts, questions of single take"),
        ([str(run), "--lengths", "4q"], "4q: write a number of tokens, such as 4096, 32k or 1M"),
        ([str(run), "--sequences", "0"], "0: it must be a number of at least 1"),
        ([str(run), "--suite", "text", "--seen", "keys"], "--suite text: it has neither figure nor needles"),
        ([str(run), "--rope", "factor"], "'factor' is not an option: write key=value"),
        ([str(run), "--rope", "scale=2"], "scale: there is no such option"),
        ([str(run), "--rope", "factor=two"], "factor=two: "),
        ([str(run), "--rope", "factor=8"], "rope.factor=8.0: rope.kind=base scales nothing"),
        ([str(run), "--rope", "kind=ntk", "factor=2", "layers=full"], "rope.layers=full, model.windows="),
        ([str(run), "--rope", "kind=yarn", "factor=0"], "factor=0.0: it must be at least 1"),
        ([str(run), "--rope", "attention_factor=2"], "rope.attention_factor=2.0, rope.kind=base: only rope.kind=yarn uses it"),
        ([str(run), "--suite", "short"], "invalid choice: 'short'"),
        ([str(run), *SUITE, "--json", str(tmp_path / "no" / "x.json")], "its folder does not exist"),
    ):
        with pytest.raises(SystemExit) as stop:
            command.main(arguments)
        assert stop.value.code == 2 and text in capsys.readouterr().err, arguments


def test_rope_options_reach_the_model(run: Path) -> None:
    given = [[], ["--rope", "kind=yarn", "factor=4", "attention_factor=1.6"]]
    sizes = ["--lengths", "1k", "--questions", "2", "--families", "single"]
    opened = [command._open(command._parser().parse_args([str(run), *sizes, *arguments]))[0] for arguments in given]
    plain, sharp = (restored.build(torch.device("cpu"), torch.float32) for restored in opened)
    assert opened[1].rope.original_length == 1024
    assert plain.rope_scale == 1 and sharp.rope_scale == 1.6 and not torch.equal(plain.frequencies, sharp.frequencies)


def test_learned_positions_and_shards_without_a_tokenizer_are_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = command._parser().parse_args([str(run), "--lengths", "4k"])
    opened = command.RestoredModel(str(run))
    monkeypatch.setattr(command, "RestoredModel", lambda path: opened)
    opened.model.positions, opened.model.max_positions = "learned", 1024
    with pytest.raises(ValueError, match="--lengths 4096: the model has learned 1024 positions"):
        command._open(args)
    with pytest.raises(ValueError, match=r"model\.positions=learned has no rotary positions to scale"):
        command._changed_rope(opened, ["kind=linear", "factor=2"])
    opened.model.positions, opened.model.vocabulary = "rope", 100
    with pytest.raises(ValueError, match=r"model\.vocabulary=100: the tokenizer has 257 tokens"):
        command._open(args)
    opened.has_tokenizer = False
    with pytest.raises(ValueError, match="token shards of an unknown tokenizer, and the suite is text: train with"):
        command._open(args)
