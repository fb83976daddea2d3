"""Command lines: composition, sweeps, and over sixty mistakes: one message each, exit code 2, no traceback, no torch."""

import contextlib
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringspan.launch import __main__ as launch
from ringspan.launch import sweep
from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.config import compose, help, validate
from ringspan.trainer.config.schema import Config

ROOT = Path(__file__).resolve().parents[3]
RUNS = "runs=/nowhere"

# (arguments, ranks, texts in the message)
WRONG: list[tuple[list[str], int, list[str]]] = [
    # names
    (["optim.lrr=1"], 1, ["optim.lrr=1", "did you mean optim.lr?"]),
    (["lr=1e-3"], 1, ["there is no option lr", "optim.lr"]),
    (["step=5"], 1, ["there is no option step", "steps"]),
    (["optimizer.lr=1"], 1, ["optimizer.lr", "optim.lr"]),
    (["modle.layers=2"], 1, ["model.layers"]),
    (["batch_size=4"], 1, ["there is no option batch_size; the option is data.batch"]),
    (["training.seq_len=4096"], 1, ["the option is data.length"]),
    (["num_train_epochs=3"], 1, ["the option is steps"]),
    (["parallel.rings=2"], 1, ["did you mean parallel.ring?"]),
    (["engine.zero_stage=1"], 1, ["engine.zero_stage=1", "did you mean"]),
    (["checkpoint.evry=10"], 1, ["checkpoint.every"]),
    (["data.lenght=10"], 1, ["data.length"]),
    (["data.sources.stdlib.wieght=2"], 1, ["a source has no option wieght", "weight"]),
    (["data.paths=[a]"], 1, ["there is no option data.paths", "did you mean data.sources.NAME.paths?"]),
    (["foo=1"], 1, ["there is no option foo"]),
    (["+foo=1"], 1, ["neither added nor removed"]),
    (["++optim.lr=1"], 1, ["neither added nor removed"]),
    (["~optim.lr"], 1, ["neither added nor removed"]),
    (["hydra.run.dir=x"], 1, ["hydra's own options"]),
    (["steps"], 1, ["'steps' is not an option: write key=value"]),
    (["--steps=5"], 1, ["there is no such flag", "without dashes: steps=5"]),
    (["--optim.lr", "3e-4"], 1, ["without dashes: optim.lr=…"]),
    (["--hepl"], 1, ["did you mean --help?"]),
    (["--cfg=all"], 1, ["--cfg takes job"]),
    (["--config-dir=/nowhere"], 1, ["/nowhere", "no such folder"]),
    (["--multirun", "seed=1,2"], 1, ["ringspan launch --multirun"]),
    (["seed=1,2"], 1, ["several values are a sweep"]),
    # choices of groups
    (["model=llama1b"], 1, ["conf/model has no llama1b", "did you mean llama-1b?"]),
    (["experiment=llama_8b"], 1, ["did you mean llama_8b_"]),
    (["engine=zero4"], 1, ["conf/engine has no zero4", "zero3"]),
    (["schedule=cosin"], 1, ["did you mean cosine?"]),
    # types
    (["steps=many"], 1, ["steps=many", "'many' is not a whole number"]),
    (["steps=10k"], 1, ["'10k' is not a whole number"]),
    (["data.length=128kb"], 1, ["'128kb' is not a whole number"]),
    (["optim.lr=fast"], 1, ["optim.lr=fast: 'fast' is not a number"]),
    (["model.tied=perhaps"], 1, ["model.tied=perhaps", "neither true nor false"]),
    (["optim.betas=[0.9,x]"], 1, ["optim.betas=[0.9,x]"]),
    (["debug.profile=3"], 1, ["debug.profile=3: this is not a list; write a list as [a,b]"]),
    (["data.sources.recall.weight=heavy"], 1, ["data.sources.recall.weight=heavy"]),
    # bounds and choices of values
    (["steps=0"], 1, ["steps=0: it must be at least 1"]),
    (["optim.lr=0"], 1, ["optim.lr=0.0: it must be above 0"]),
    (["optim.lr=nan"], 1, ["optim.lr=nan: it must be a finite number"]),
    (["engine.zero=4"], 1, ["engine.zero=4: choose 0, 1, 2, 3"]),
    (["parallel.layout=spiral"], 1, ["parallel.layout=spiral: choose zigzag"]),
    (["tracking.wandb=yes"], 1, ["choose disabled, offline, online"]),
    (["optim.betas=[0.9]"], 1, ["optim.betas=[0.9]: two numbers"]),
    (["optim.betas=[0.9,1.0]"], 1, ["below 1"]),
    (["seed=-1"], 1, ["seed=-1"]),
    (["seed=4294967296"], 1, ["below 2**32"]),
    (["data.held_out=1"], 1, ["data.held_out=1.0"]),
    (["model.dropout=1.5"], 1, ["model.dropout=1.5"]),
    (["schedule.floor=2"], 1, ["schedule.floor=2.0"]),
    (["schedule=wsd", "schedule.decay=3"], 1, ["schedule.decay=3.0"]),
    (["schedule.warmup=500", "steps=100"], 1, ["schedule.warmup=500", "steps=100"]),
    # contradictions
    (["model.heads=3", "model.head_dim=32"], 1, ["model.heads=3, model.kv_heads=2"]),
    (["model.head_dim=0", "model.dim=98"], 1, ["model.dim=98"]),
    (["model.positions=learned", "rope=yarn"], 1, ["learned"]),
    (["rope.factor=4"], 1, ["rope.factor=4.0"]),
    (["parallel.ring=4"], 2, ["4 ranks, but there are 2", "--nproc-per-node=4"]),
    (["parallel.data=1", "parallel.ulysses=3"], 4, ["ulysses"]),
    (["parallel.ulysses=8"], 8, ["parallel.ulysses=8", "model.heads=4"]),
    (["parallel.layout=striped", "parallel.ulysses=2"], 2, ["striped"]),
    (["parallel=data", "data.batch=6"], 4, ["data.batch=6", "such as 8"]),
    (["data.micro_batch=3"], 1, ["data.batch=8", "data.micro_batch=3"]),
    (["optim=muon", "engine=zero3"], 1, ["optim.kind=muon, engine.zero=3", "engine.zero=1 or 2"]),
    (["optim.kind=muon"], 1, ["optim.kind=muon, optim.clip=1", "optim.clip=0"]),
    (["optim=muon", "engine=zero0"], 1, ["optim.kind=muon, engine.zero=0"]),
    (["engine.zero=0", "engine.offload_optimizer=true"], 1, ["engine.offload_optimizer=true, engine.zero=0"]),
    (["engine.zero=2", "engine.offload_parameters=true"], 1, ["only ZeRO 3 shards weights"]),
    (
        ["engine.compile=on", "engine=zero3", "engine.memory=none"],
        1,
        ["engine.compile=on, engine.zero=3", "engine.memory=auto"],
    ),
    (["engine.activations=full"], 1, ["engine.memory replaces this option", "'x/1' (was full)"]),
    (["engine.offload_activations=true"], 1, ["engine.memory replaces this option", "'x/1@LAYERS'"]),
    (["engine.memory=much"], 1, ["engine.memory='much' is no plan; write auto, least, none or"]),
    (["engine.memory=x/1 outs=99"], 1, ["outs=99 is more than the model's"]),
    (["engine.memory='x/2 heads=3'"], 1, ["heads=3 must divide the model's"]),
    (["data=text"], 1, ["data.sources.text.paths=[]"]),
    (["data=text", "data.sources.text.paths=[/nowhere]"], 1, ["/nowhere does not exist"]),
    (["data=text", f"data.sources.text.paths=[/{'n' * 300}]"], 1, ["n" * 300]),  # longer than any file name may be
    (["data=tokens", "data.sources.tokens.paths=[README.md]"], 1, ["model.vocabulary"]),
    (["data.sources.stdlib.weight=0", "data.sources.recall.weight=0"], 1, ["every weight is 0"]),
    (["data=needles", "data.sources.needles.random_words=1.5"], 1, ["random_words=1.5: it is a share; set 0 to 1"]),
    (["~data.sources.stdlib", "~data.sources.recall"], 1, ["data.sources"]),
    (["~data.sources.recall.weight"], 1, ["options are not removed; set data.sources.recall.weight= instead"]),
    (["~data.sources.recal"], 1, ["no source recal; did you mean recall?", "data.sources: stdlib, recall"]),
    (["tokenizer=hf"], 1, ["tokenizer"]),
    (["tokenizer.path=x.json"], 1, ["tokenizer.path=x.json", "only tokenizer.kind=hf or tiktoken"]),
    (["init_from=/nowhere"], 1, ["init_from=/nowhere"]),
    (["checkpoint.resume=/nowhere"], 1, ["checkpoint.resume=/nowhere"]),
    (["checkpoint.keep_every=5", "checkpoint.every=2"], 1, ["checkpoint.keep_every=5"]),
    (["name=a/b"], 1, ["name=a/b"]),
    (["hardware=cpu", "hardware.host_gib=100"], 1, ["hardware.host_gib=100", "set hardware.memory_gib"]),
    (["hardware=h200", "engine.precision=bf16"], 1, ["hardware.name=h200: only `ringspan check`"]),
    (["--config-dir"], 1, ["--config-dir takes a folder"]),
    (["--config-dir="], 1, ["--config-dir takes a folder"]),
    (["--ranks=2"], 1, ["ringspan launch --ranks=N"]),
    (["data.workers=2", "data.prefetch=0"], 1, ["data.workers=2, data.prefetch=0: workers prefetch"]),
    (["debug.profile=[0]"], 1, ["debug.profile=[0]"]),
    (["model.windows=[[1]]"], 1, ["model.windows=[[1]]: [1] is not a whole number; write a list as [a,b]"]),
    (["debug.profile=[[1]]"], 1, ["debug.profile=[[1]]: [1] is not a whole number"]),
    (["debug.memory=[{a:1}]"], 1, ["debug.memory=[{'a': 1}]: {'a': 1} is not a whole number"]),
    (["optim.betas=[[0.9],0.95]"], 1, ["optim.betas=[[0.9], 0.95]: [0.9] is not a number"]),
    (["data.sources.stdlib.paths=[[a]]"], 1, ["data.sources.stdlib.paths=[['a']]: ['a'] is not a text"]),
    (["model.name=../../x"], 1, ["model.name=../../x: it must be a folder name without slashes"]),
    (["debug.profile=[201]", "steps=200"], 1, ["debug.profile=[201]"]),
]
WITHOUT_GPU: list[tuple[list[str], int, list[str]]] = [
    (["parallel.device=cuda"], 1, ["this machine has no GPU"]),
    (["parallel.attention=triton"], 1, ["parallel.attention=triton"]),
    (["engine.precision=bf16"], 1, ["engine.precision=bf16"]),
    (["debug.memory=[1]"], 1, ["debug.memory=[1]"]),
]


def test_at_least_sixty_mistakes_are_tested() -> None:
    assert len(WRONG) >= 60


@pytest.mark.parametrize(
    ("arguments", "ranks", "messages"), WRONG + ([] if validate.has_gpu() else WITHOUT_GPU), ids=lambda x: str(x)[:60]
)
def test_wrong_config_gives_one_message(
    arguments: list[str], ranks: int, messages: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as stop:
        compose.main("ringspan train", None, [RUNS, *arguments])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == ""
    assert all(message in captured.err for message in messages), captured.err
    assert "Traceback" not in captured.err and len(captured.err.splitlines()) < 12


@pytest.mark.parametrize("program", ["ringspan.trainer.train", "ringspan.launch"])
@pytest.mark.parametrize("arguments", [["optim.lrr=1"], ["model.heads=3"], ["model=lama"], ["--what"], ["--ranks", "2"]])
def test_mistake_is_reported_within_three_seconds_and_without_torch(program: str, arguments: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    # The torch of this folder cannot be imported, so an import fails with a traceback.
    environment["PYTHONPATH"] = str(ROOT / "tests" / "trainer" / "without_torch")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-m", program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time, because other processes may have the cores. The timeout ends a program that waits.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert result.returncode == 2 and "Traceback" not in result.stderr and "--help" in result.stderr, result.stderr
    assert "starting" not in result.stdout and seconds < 3, f"{seconds:.1f} s"


@pytest.mark.parametrize("package", ["hydra", "omegaconf"])
def test_missing_package_names_the_extra_to_install(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import ringspan.trainer.config.compose"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and f"needs the package {package}" in result.stderr, result.stderr
    assert result.stderr.splitlines()[-1].startswith("ModuleNotFoundError: ringspan.trainer.config.compose needs")
    assert 'pip install "ringspan[train]"' in result.stderr


def test_typo_in_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("kind: adamw\nlearning_rate: 1e-3\n")
    with pytest.raises(compose.ConfigError) as error:
        compose.load(["optim=mine"], str(tmp_path), 1)
    assert "learning_rate" in str(error.value) and "optim/mine.yaml" in str(error.value)
    (tmp_path / "optim" / "mine.yaml").write_text("kind: adamw\nlr: fast\n")
    with pytest.raises(compose.ConfigError, match=r"optim/mine\.yaml"):
        compose.load(["optim=mine"], str(tmp_path), 1)
    (tmp_path / "optim" / "mine.yaml").write_text("kind: adamw\nlr: 0.5\n")
    assert compose.load(["optim=mine"], str(tmp_path), 1).config.optim.lr == 0.5


def test_sweep_accepts_flags_as_one_or_two_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("lr: 0.5\n")
    for flags in (["--cfg", "job", "--config-dir", str(tmp_path)], ["--cfg=job", f"--config-dir={tmp_path}"]):
        with pytest.raises(SystemExit) as stop:
            launch.main(["--ranks=1", "--multirun", *flags, "optim=mine", "seed=1,2"])
        assert stop.value.code == 0 and "seed: 1" in (output := capsys.readouterr().out) and "lr: 0.5" in output


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        compose.main("ringspan train", "About.", ["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(f"  {key}=" in text for key in compose.option_names())
    assert "experiment= " in text and "llama-8b" in text


def test_cfg_job_prints_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        compose.main("ringspan train", None, ["model=llama-8b", "optim.lr=0.125", "--cfg", "job"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "lr: 0.125" in text and "dim: 4096" in text and "kind: llama3" in text


@pytest.mark.parametrize(
    "group", sorted(path.name for path in compose.CONF.iterdir() if path.is_dir() and path.name != "experiment")
)
def test_every_choice_of_every_group_composes(group: str) -> None:
    needs = {
        "tokenizer=hf": ["tokenizer.path=README.md", "data=stdlib"],
        "tokenizer=tiktoken": ["tokenizer.path=README.md", "data=stdlib"],
        "data=text": ["data.sources.text.paths=[README.md]"],
        "data=tokens": ["data.sources.tokens.paths=[README.md]", "model.vocabulary=512"],
        "tracking=tensorboard": [],
    }
    for path in sorted((compose.CONF / group).glob("*.yaml")):
        choice = f"{group}={path.stem}"
        if choice in ("engine=offload", "debug=profile") and not validate.has_gpu():
            continue  # they need a GPU
        ranks = 2 if choice == "parallel=ulysses" else 1
        os.chdir(ROOT)
        assert isinstance(
            compose.load([choice, *needs.get(choice, [])], world_size=ranks, planning=group == "hardware").config, Config
        )


def test_lengths_accept_k_and_m() -> None:
    for text, length in (("128k", 131072), ("1M", 1048576), ("1m", 1048576), ("4K", 4096), ("512", 512)):
        assert compose.load(["experiment=laptop", f"data.length={text}"]).config.data.length == length


@pytest.mark.parametrize("text", ["2026_11_30", "1e3", "12e45678", "007", "+5", "-1_0.5e-3", "inf", "true", "v1.5", "12 34"])
def test_texts_that_look_like_numbers_are_kept(text: str) -> None:
    """Hydra's grammar would make 20261130 of 2026_11_30, and inf of 12e45678."""
    quoted = f"tracking.tags=[{text}, 'a,{text},b',\"{text}\"]"
    options = [f"name={text}", f"runs={text}", f"model.name='{text}'", "tracking=offline", quoted]
    config = compose.load(options, world_size=1).config
    assert (config.name, config.runs, config.model.name) == (text, text, text)
    assert config.tracking.tags == [text, f"a,{text},b", text]
    source = compose._compose([f"data.sources.new.paths=[{text}]", f"data.sources.new.text_key={text}"], None).config
    assert (source.data.sources["new"].paths, source.data.sources["new"].text_key) == ([text], text)
    jobs = compose.sweep([f"name={text},b", "steps=1_0,20"])
    assert [(c.name, c.steps) for c in (compose.load(job, world_size=1).config for job in jobs)] == [
        (text, 10), (text, 20), ("b", 10), ("b", 20),
    ]  # fmt: skip


def test_mesh_assigns_the_remaining_ranks() -> None:
    def mesh(world: int, *overrides: str) -> tuple[int, int, int]:
        return validate.mesh_of(compose.load([*overrides], world_size=world).config, world)

    assert mesh(4) == (1, 4, 1)
    assert mesh(4, "parallel=data") == (4, 1, 1)
    assert mesh(8, "parallel=ulysses") == (1, 4, 2)
    assert mesh(8, "parallel.ring=2", "parallel.data=0") == (4, 2, 1)


def test_new_source_needs_no_plus() -> None:
    config = compose.load(
        ["data.sources.mine.kind=text", f"data.sources.mine.paths=[{ROOT}]", "~data.sources.recall"], world_size=1
    ).config
    assert set(config.data.sources) == {"stdlib", "mine"} and config.data.sources["mine"].kind == "text"


def test_sweep_expands_to_every_combination() -> None:
    assert compose.sweep(["seed=1,2", "model=tiny", "optim.lr=choice(0.1,0.2)"]) == [
        ["seed=1", "model=tiny", "optim.lr=0.1"],
        ["seed=1", "model=tiny", "optim.lr=0.2"],
        ["seed=2", "model=tiny", "optim.lr=0.1"],
        ["seed=2", "model=tiny", "optim.lr=0.2"],
    ]


def test_sweep_leaves_out_options_that_a_job_does_not_use() -> None:
    assert compose.sweep(["optim=adamw,muon", "optim.muon_lr=0.01,0.02", "seed=1"]) == [
        ["optim=adamw", "seed=1"],
        ["optim=muon", "optim.muon_lr=0.01", "seed=1"],
        ["optim=muon", "optim.muon_lr=0.02", "seed=1"],
    ]
    assert compose.sweep(["seed=1,1"]) == [["seed=1"], ["seed=1"]], "a repeated value stays repeated"
    jobs = compose.sweep(["schedule=cosine,wsd,constant", "schedule.decay=0.1", "schedule.floor=0.2"])
    assert [len(compose.load(job, world_size=1).overrides) for job in jobs] == [2, 3, 1]


def test_option_that_no_job_of_a_sweep_uses_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        launch.main(["--ranks=1", "--multirun", "schedule=cosine,linear", "schedule.decay=0.1"])
    assert stop.value.code == 2 and "only schedule.kind=wsd uses it" in capsys.readouterr().err


SHARDS = ["data=tokens", "data.sources.tokens.paths=[README.md]", "model.vocabulary=64"]


def test_only_token_shards_may_have_fewer_ids_than_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert compose.load(SHARDS, world_size=1).config.model.vocabulary == 64
    for others in (["data.sources.recall.kind=recall"], ["data=stdlib"]):
        with pytest.raises(compose.ConfigError, match=r"model\.vocabulary=64: bytes need 257"):
            compose.load([*SHARDS, *others], world_size=1)


def test_source_that_would_never_be_drawn_is_rejected() -> None:
    with pytest.raises(compose.ConfigError, match=r"data\.sources\.recall\.weight=0\.0005: less than 1 in 1000 .* give more"):
        compose.load(["data.sources.recall.weight=0.0005"], world_size=1)


class Jobs:
    """Stands in for `launch.start`: a job ends with its exit code, and a finished one leaves its files in its folder."""

    def __init__(self, *codes: int, stop_after: int = 0) -> None:
        self.codes, self.stop_after = list(codes), stop_after
        self.ran: list[str] = []
        self.folders: list[str] = []

    def __call__(self, arguments: list[str], num_ranks: int) -> tuple[int, bool]:
        code = self.codes[len(self.ran)] if self.codes else 0
        composed = compose.load(arguments, world_size=num_ranks)
        folder = run_folder.choose(composed.config)
        self.ran.append(arguments[-1])
        self.folders.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(composed.yaml)
        metrics = dict(kind="train", step=1, loss=float("nan") if code else 2.0 + len(self.ran), tokens_per_s=1000.0)
        (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
        stopped = len(self.ran) == self.stop_after
        if not code and not stopped:
            run_folder.finish(folder, dict(steps=composed.config.steps))
        return code, stopped


def test_sweep_continues_after_a_failed_job_and_marks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["--ranks=1", "--multirun", f"runs={tmp_path}", "seed=1,2,3"]
    for jobs, code, ran in ((Jobs(3, 1, 0), 3, 3), (Jobs(0, 2, 0), 2, 2), (Jobs(stop_after=1), 0, 1)):
        monkeypatch.setattr(launch, "start", jobs)
        assert launch.main([*command, f"name={ran}"]) == code
        assert len(jobs.ran) == ran
    rows = capsys.readouterr().out.split("[3 of 3]")[1].splitlines()[3:6]
    assert [row.split("seed=")[1][0] for row in rows] == ["3", "1", "2"], "finite losses first, then NaN"
    assert [row.rpartition("   ")[2] for row in rows[1:]] == ["failed: exit code 3", "failed: exit code 1"]
    assert "failed" not in rows[0]


def test_repeated_sweep_runs_only_unfinished_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_sweep(*options: str, stop_after: int = 0) -> Jobs:
        monkeypatch.setattr(launch, "start", jobs := Jobs(stop_after=stop_after))
        assert launch.main(["--ranks=1", "--multirun", f"runs={tmp_path}", *options]) == 0
        return jobs

    for name in ([], ["name=run"]):
        assert run_sweep(*name, "seed=1,2", stop_after=2).ran == ["seed=1", "seed=2"]
        capsys.readouterr()
        assert run_sweep(*name, "seed=1,2").ran == ["seed=2"]
        output = capsys.readouterr().out
        assert output.count("is finished, so it is not run again") == 1
        assert sorted(text.split("seed=")[1][0] for text in output.splitlines()[-3:-1]) == ["1", "2"]
    assert run_sweep("name=run", "steps=7", "seed=1,2").ran == ["seed=1", "seed=2"], "other options are another run"
    first, second = run_sweep("seed=9", "engine.zero=0,1").folders
    assert second == f"{first}-2", "jobs that differ only in options outside the identity have separate folders"
    assert run_sweep("seed=9", "engine.zero=0,1").ran == []
    assert all(name.endswith("-2") for name in run_sweep("checkpoint.resume=none", "seed=1,2").folders)


def test_table_sorts_nan_after_finite_losses(tmp_path: Path) -> None:
    for name, loss in (("a", 3.0), ("b", float("nan")), ("c", 2.0), ("d", None)):
        (tmp_path / name).mkdir()
        line = dict(kind="train", step=1, loss=loss, tokens_per_s=1.0)
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    table = sweep.table([(name, tmp_path / name, 0) for name in "abcd"], 4).splitlines()
    assert [line.split()[4] for line in table[1:-1]] == ["c", "a", "b", "d"]


RANK = """
import pathlib, signal, sys, time
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
print("ready", flush=True)
while not received:
    time.sleep(0.01)
pathlib.Path(sys.argv[1]).write_text("saved")
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_ranks_save_when_the_terminal_closes(tmp_path: Path, ignored: bool) -> None:
    """A script stands in for the rank. With SIGHUP ignored, as under nohup, the ranks keep running."""
    saved, rank = tmp_path / "saved", tmp_path / "rank"
    rank.write_text(f"#!{sys.executable}\nimport sys\nsys.argv[1:] = [{str(saved)!r}]\n{RANK}")
    rank.chmod(0o755)
    code = f"""if True:
        import signal, sys
        from ringspan.launch import __main__ as launch
        sys.executable = {str(rank)!r}
        signal.signal(signal.SIGHUP, signal.{"SIG_IGN" if ignored else "SIG_DFL"})
        raise SystemExit(launch.main(["--ranks=1", "--multirun", "runs={tmp_path}", "seed=1,2"]))"""
    master, terminal = pty.openpty()
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=terminal, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    os.close(terminal)
    output = b""
    while b"ready\r\n" not in output:  # the whole line, because a write to a closed terminal fails
        output += os.read(master, 1000)
    os.close(master)
    launcher.send_signal(signal.SIGHUP)
    if ignored:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(0.5)
        assert launcher.poll() is None and not saved.exists()
        launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 0 and saved.read_text() == "saved" and "Error" not in errors, errors


def test_names_of_other_trainers_lead_to_options_that_exist() -> None:
    known = {*help.option_names(), "data.sources.NAME.paths", *(path.name for path in help.CONF.iterdir())}
    for name, text in help.FOREIGN.items():
        assert re.split("[ ,;:=(]", text)[0] in known and name not in known, name


def test_help_of_a_word_lists_matching_options_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        compose.main("ringspan train", "About", ["--help", "optim"])
    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0 and "  optim.lr=0.0003" in lines
    assert all("optim" in line.partition("=")[0] for line in lines[::2]) and len(lines) < 40
    assert "did you mean optim.lr" in help.help_text("ringspan train", None, Config, ["lrr"])
