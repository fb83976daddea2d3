"""No option is ignored silently: an option that the config does not use is rejected; and configs of older runs."""

import re
from operator import attrgetter
from pathlib import Path

import pytest

from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.config import compose, validate
from ringspan.trainer.config.schema import Config, Source

# (arguments, texts in the message)
IGNORED: list[tuple[list[str], list[str]]] = [
    (["schedule=constant", "schedule.floor=0.2"], ["schedule.floor=0.2, schedule.kind=constant", "cosine or linear or wsd"]),
    (["schedule.decay=0.5"], ["only schedule.kind=wsd uses it", "leave schedule.decay=0.2"]),
    (["optim.muon_lr=0.1", "optim.muon_momentum=0.9"], ["optim.muon_lr=0.1, optim.kind=adamw", "optim.muon_momentum=0.9"]),
    (["rope=linear", "rope.original_length=4096"], ["rope.original_length=4096, rope.kind=linear: only rope.kind=yarn or"]),
    (["rope=llama3", "rope.beta_fast=16"], ["rope.beta_fast=16.0", "only rope.kind=yarn"]),
    (["rope=yarn", "rope.low_freq_factor=2"], ["rope.low_freq_factor=2.0", "only rope.kind=llama3"]),
    (["model.positions=learned", "rope.base=500"], ["rope.base=500.0, model.positions=learned", "leave rope.base=10000.0"]),
    (["model.max_positions=4096"], ["only model.positions=learned"]),
    (["tokenizer.end=eos"], ["tokenizer.end=eos, tokenizer.kind=bytes"]),
    (["tokenizer.begin=bos"], ["tokenizer.begin=bos, tokenizer.kind=bytes: only tokenizer.kind=hf or tiktoken"]),
    (["tracking.project=mine", "tracking.tags=[a]"], ["tracking.project=mine, tracking.wandb=disabled", "tracking.tags=['a']"]),
    (["tracking=offline", "tracking.init_timeout=5"], ["only tracking.wandb=online", "leave tracking.init_timeout=15.0"]),
    (["engine=zero0", "engine.bucket_mb=64"], ["engine.bucket_mb=64, engine.zero=0: only engine.zero=1 or 2 or 3"]),
    (["engine.prefetch_mb=64"], ["only engine.zero=3"]),
    (["evaluate=often", "evaluate.batches=0"], ["evaluate.every=100, evaluate.batches=0: only evaluate.batches above 0"]),
    (["evaluate.sample=0", "evaluate.temperature=1"], ["evaluate.temperature=1.0, evaluate.sample=0"]),
    (["data.sources.recall.digits=3"], ["data.sources.recall.digits=3", "only data.sources.recall.kind=passkey or needles"]),
    (["data.sources.recall.num_questions=3"], ["only data.sources.recall.kind=needles", "recall.num_questions=16"]),
    (["rope.layers=full"], ["rope.layers=full, rope.kind=base: only rope.kind=linear or ntk or yarn or llama3"]),
    (["rope=yarn", "rope.layers=full"], ["rope.layers=full, model.windows=[]", "use rope.layers=all"]),
    (["debug.cut_ring=true"], ["debug.cut_ring=true, parallel.layout=zigzag", "engine.memory=none"]),
    (["data.sources.stdlib.keys=3"], ["data.sources.stdlib.keys=3", "leave data.sources.stdlib.keys=8"]),
    (["data.sources.stdlib.dtype=uint32"], ["only data.sources.stdlib.kind=tokens"]),
    (["data.sources.stdlib.text_key=body"], ["only data.sources.stdlib.kind=text"]),
]


@pytest.mark.parametrize(("arguments", "messages"), IGNORED, ids=lambda x: str(x)[:60])
def test_unused_option_is_rejected(arguments: list[str], messages: list[str]) -> None:
    with pytest.raises(compose.ConfigError) as error:
        compose.load(arguments, world_size=1)
    assert all(message in str(error.value) for message in messages), error.value


def test_options_that_are_used_or_have_their_default_are_accepted() -> None:
    for options in (
        ["schedule=wsd", "schedule.decay=0.5", "schedule.floor=0"],
        ["optim=muon", "optim.muon_lr=0.1"],
        ["schedule=constant", "schedule.floor=0.1", "evaluate.batches=0", "evaluate.every=0"],
        ["model.positions=learned", "model.max_positions=4096"],
        ["tracking=offline", "tracking.project=mine", "tracking.entity=us", "tracking.tags=[a]"],
        ["tracking=wandb", "tracking.init_timeout=5"],
        ["data=passkey", "data.sources.passkey.digits=3"],
        ["data=needles", "data.sources.needles.digits=3", "data.sources.needles.families=[single]"],
        ["rope=yarn", "rope.layers=full", "model.windows=[64,0]"],
        ["debug.cut_ring=true", "parallel.layout=contiguous", "engine.memory=none"],
    ):
        assert compose.load(options, world_size=1)


def test_rules_name_existing_options_and_choices() -> None:
    for table, node in ((validate.USED_ONLY_WITH, Config()), (validate.USED_ONLY_BY_SOURCES, Source())):
        for switch, users, names in table:
            group, _, last = switch.rpartition(".")
            choices = type(attrgetter(group)(node) if group else node).__dataclass_fields__[last].metadata["choices"]
            assert set(users) < set(choices) or not users
            assert all(attrgetter(name)(node) is not None for name in names)


def test_config_of_an_older_run_may_set_unused_options(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("schedule: {kind: constant, floor: 0.3}\nevaluate: {batches: 0, every: 5}\n")
    assert run_folder.config_of(tmp_path).schedule.floor == 0.3


def test_run_without_a_newer_option_has_its_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An option missing from the run's folder does not count as changed if the command has the default."""
    composed = compose.load(["steps=2", "name=run"], world_size=1)
    older = re.sub(r"\n +(begin|digits):.*", "", composed.yaml)
    (tmp_path / "config.yaml").write_text(older)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    run_folder._validate_options(tmp_path, composed.config)
    run_folder.finish(tmp_path, dict(steps=2))
    run_folder._validate_options(tmp_path, composed.config)
    assert len(composed.yaml.splitlines()) == len(older.splitlines()) + 3 and capsys.readouterr().out == ""
    other = compose.load(["steps=2", "name=run", "data.sources.recall.keys=9"], world_size=1).config
    with pytest.raises(compose.ConfigError, match=r"other options: data\.sources\.recall\.keys=9 \(was 8\);"):
        run_folder._validate_options(tmp_path, other)
    (tmp_path / "config.yaml").write_text(older + "gone: 1\n")
    with pytest.raises(compose.ConfigError, match=r"other options: .*config\.yaml: not a config of this version: .*gone"):
        run_folder._validate_options(tmp_path, composed.config)
    (tmp_path / run_folder.FINISHED).unlink()
    run_folder._validate_options(tmp_path, composed.config)
    assert "continues with other options" in capsys.readouterr().out
