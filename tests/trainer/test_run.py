"""Whole runs: signals, gradients that are not finite, what is tracked, what the ring is needed for."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ringspan.launch import sweep
from ringspan.launch.__main__ import workers
from ringspan.trainer.checkpoint import load_model, run_folder
from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import Config, Parallel
from ringspan.trainer.monitoring import tracking
from tests.trainer import jobs, wandb_server
from tests.trainer.checkpoint.test_resume import lines

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_one_rank_saves_and_stops_all(tmp_path: Path, number: int) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=50"]
    assert jobs.run_ranks(2, jobs.train, options, jobs.send, int(number), 3) == [0, 0]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert not (tmp_path / "run" / "finished.json").exists()


def signal_in(run: Any, phase: str) -> None:
    """A signal while the run evaluates or saves."""
    at = run.watchdog.at

    def then_signal(step: int, where: str) -> None:
        at(step, where)
        if where.startswith(phase) and run.distributed.rank == 1 and not run.signals.stop:
            os.kill(os.getpid(), signal.SIGTERM)

    run.watchdog.at = then_signal


@pytest.mark.parametrize(("phase", "step"), [("evaluation", 2), ("checkpoint", 4), ("micro-batch", 1), ("optimizer", 1)])
def test_a_signal_is_honoured_in_every_phase(tmp_path: Path, phase: str, step: int) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=50", "evaluate.every=2", "checkpoint.every=3"]
    assert jobs.run_ranks(2, jobs.train, options, signal_in, phase) == [0, 0]
    newest = max(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert newest == f"step-{step:08d}"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_steps_that_are_not_finite_on_one_rank_are_skipped_and_counted(tmp_path: Path, zero: int) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=5", f"engine.zero={zero}"]
    assert jobs.run_ranks(2, jobs.train, options, jobs.poison, [2, 4]) == [0, 0]
    found = lines(tmp_path / "run")
    assert [line.get("skipped") for line in found] == [None, 1, None, 2, None]
    assert all(math.isfinite(line["loss"]) and ((line["grad"] is None) == ("skipped" in line)) for line in found)
    assert found[4]["loss"] < found[0]["loss"]


def test_too_many_in_a_row_end_the_run_with_the_samples(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=9", "debug.bad_steps=3", "checkpoint.every=1"]
    assert set(jobs.run_ranks(2, jobs.train, options, jobs.poison, [3, 4, 5])) == {1}
    assert "not finite in 3 steps in a row, the last of samples 16 to 19" in jobs.said


def test_a_line_says_how_it_goes(tmp_path: Path) -> None:
    assert jobs.run_ranks(2, jobs.train, [f"runs={tmp_path}", "name=run", "steps=2"]) == [0, 0]
    text = jobs.said
    pattern = r"step 2/2  loss \d\.\d{3}  grad \d+\.\d\d  lr \d\.\de-\d+  [\d.]+k? tok/s  [\de.-]+ TFLOP/s  ETA 0s"
    assert re.search(pattern, text), text
    assert "data 1 × ring 2 × ulysses 1, ZeRO 1" in text and "What to try next" in text
    start = json.loads((tmp_path / "run" / "starts.jsonl").read_text())
    assert (
        start["ranks"] == 2 and {"torch", "deepspeed", "python"} <= set(start["versions"]) and len(start["git"]["commit"]) == 40
    )
    assert "steps: 2" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_run_with_too_little_memory_says_so_once_and_goes_on(tmp_path: Path) -> None:
    assert jobs.run_ranks(2, jobs.train_in_a_mebibyte, [f"runs={tmp_path}", "name=run", "steps=1"]) == [0, 0]
    assert jobs.said.count("memory: a rank is planned to need") == 1


def test_losses_by_source_add_up(tmp_path: Path) -> None:
    assert jobs.run_ranks(2, jobs.train, [f"runs={tmp_path}", "name=run", "steps=3"]) == [0, 0]
    for line in lines(tmp_path / "run"):
        if line["kind"] == "train":
            least, most = min(line["source"].values()), max(line["source"].values())
            assert least * (1 - 1e-6) <= line["loss"] <= most * (1 + 1e-6)  # added up in another order
    assert any(len(line.get("source", {})) > 1 for line in lines(tmp_path / "run"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """A run's lines that recomputes nothing, by ZeRO stage."""
    root = tmp_path_factory.mktemp("plain")
    for zero in (1, 3):
        options = [*KEEPING, f"runs={root}", f"name={zero}", f"engine.zero={zero}", "engine.activations=none"]
        assert jobs.run_ranks(2, jobs.train, options) == [0, 0]
    return {zero: lines(root / str(zero)) for zero in (1, 3)}


KEEPING = ["steps=3", "debug.deterministic=true"]


@pytest.mark.parametrize("activations", ["none", "full", "attention"])
@pytest.mark.parametrize("zero", [1, 3])
def test_what_a_layer_keeps_changes_no_number(
    plain: dict[int, list[dict[str, Any]]], tmp_path: Path, activations: str, zero: int
) -> None:
    options = [*KEEPING, f"runs={tmp_path}", "name=kept", f"engine.zero={zero}", f"engine.activations={activations}"]
    if activations != "none":
        options.append("engine.offload_activations=true")
    assert jobs.run_ranks(2, jobs.train, options) == [0, 0]
    kept = lines(tmp_path / "kept")
    assert [(x["loss"], x["grad"]) for x in kept] == [(x["loss"], x["grad"]) for x in plain[zero]]


def compiled_for_steps_alone(run: Any) -> None:
    """Its layers are compiled, and what the sample compiles anew is an error."""
    from torch._dynamo.utils import counters

    for layer in run.model.layers:
        layer.compile(backend="eager")  # which needs no C++ compiler
    sample = run._sample

    def then_count() -> str:
        before = counters["stats"]["unique_graphs"]
        text = sample()
        assert 0 < before == counters["stats"]["unique_graphs"]
        return text

    run._sample = then_count


def test_a_sample_compiles_nothing(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "steps=1", "evaluate.sample=4", "evaluate.batches=0", "engine.activations=none"]
    assert jobs.run_ranks(1, jobs.train, options, compiled_for_steps_alone) == [0]
    assert "from the bar on the model" in jobs.said


def test_wandb_offline_makes_a_run_that_wandb_sync_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    options = [f"runs={tmp_path}", "name=run", "tracking=offline"]
    assert jobs.run_ranks(1, jobs.train, [*options, "steps=2"]) == [0]
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")
    run_id = file.stem.removeprefix("run-")
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert state["run_id"] == run_id, "a resumed run goes on under the same id"
    assert jobs.run_ranks(1, jobs.train, [*options, "steps=3"]) == [0]
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert {file.name for folder in folders for file in folder.glob("*.wandb")} == {f"run-{run_id}.wandb"}
    with wandb_server.listening() as server:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        sync = [sys.executable, "-m", "wandb", "sync", "--yes", *map(str, folders)]
        done = subprocess.run(sync, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr.count("Finished syncing") == 2, done.stderr
    assert server.runs == {run_id} and server.configs[0]["data"]["value"]["length"] == 150
    check_history(server, lines(tmp_path / "run"), steps=3)
    other = f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000002"
    assert jobs.run_ranks(1, jobs.train, [*options, "name=other", "steps=3", other]) == [0]
    (file,) = (tmp_path / "other" / "wandb").glob("offline-run-*/*.wandb")
    assert file.stem != f"run-{run_id}", "a run that begins at another's checkpoint has curves of its own"


def test_wandb_online_sends_while_the_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with wandb_server.listening() as server:
        assert jobs.run_ranks(1, online, str(tmp_path), server.url) == [0]
    assert "going on offline" not in jobs.said
    check_history(server, lines(tmp_path / "run"), steps=2)


def check_history(server: wandb_server.Server, ours: list[dict[str, Any]], steps: int) -> None:
    """What wandb's server was sent is what metrics.jsonl has."""
    assert len(ours) == steps
    for line in ours:
        assert server.history[line["step"]]["train/loss"] == pytest.approx(line["loss"], rel=1e-8)
    assert {"config.yaml", "wandb-summary.json"} <= server.files


def online(folder: str, url: str) -> None:
    os.environ.update(WANDB_API_KEY="0" * 40, WANDB_BASE_URL=url)
    jobs.train([f"runs={folder}", "name=run", "steps=2", "tracking=wandb"])


def test_wandb_with_a_key_and_no_network_goes_on_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    began = time.monotonic()
    assert jobs.run_ranks(1, without_network, str(tmp_path)) == [0]
    assert time.monotonic() - began < 60, "with its start-up; the wait itself is capped at tracking.init_timeout"
    assert jobs.said.count("going on offline") == 1
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


def without_network(folder: str) -> None:
    os.environ.update(WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")  # the port that discards
    jobs.train([f"runs={folder}", "name=run", "steps=1", "tracking=wandb", "tracking.init_timeout=5"])


def test_a_profile_is_written(tmp_path: Path) -> None:
    assert jobs.run_ranks(2, jobs.train, [f"runs={tmp_path}", "name=run", "steps=2", "debug.profile=[2]"]) == [0, 0]
    traces = sorted((tmp_path / "run" / "profile").iterdir())
    assert [trace.name for trace in traces] == ["step-2-rank-0.json", "step-2-rank-1.json"]
    assert "ringspan::ring_forward" in traces[0].read_text()


def test_launch_starts_ranks_forwards_signals_and_sweeps(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "launch",
        "--ranks=2",
        "--multirun",
        *jobs.TOY,
        f"runs={tmp_path}",
        "steps=2",
        "seed=0,1",
        "name=run",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "[2 of 2]" in done.stdout
    head, *table = done.stdout.splitlines()[-4:-1]
    assert head.split() == ["held", "out", "loss", "tokens/s", "step"]
    assert {line.split()[3] for line in table} == {"2"}  # steps
    assert sorted(line[line.index("seed=") :].split()[0] for line in table) == ["seed=0", "seed=1"]
    losses = [float(line.split()[0].replace("–", "inf")) for line in table]
    assert losses == sorted(losses)
    assert sorted(path.parent.name for path in tmp_path.glob("*/finished.json")) == ["run-1", "run-2"]


def test_a_sweep_tells_of_runs_that_were_killed_or_never_began(tmp_path: Path) -> None:
    for name, losses, end in (("good", (3.0, 2.0), ""), ("killed", (1.5,), '{"kind": "tra')):
        (tmp_path / name).mkdir()
        lines = [json.dumps(dict(kind="train", step=i, loss=x, tokens_per_s=2000.0)) for i, x in enumerate(losses, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n" + end)
    table = sweep.table([(f"name={name}", tmp_path / name, 0) for name in ("never", "good", "killed")]).splitlines()
    assert "last 10 steps" in table[-1]
    assert [line.split()[:5] for line in table[1:-1]] == [
        ["–", "1.500", "2.0k", "1", "name=killed"],
        ["–", "2.500", "2.0k", "2", "name=good"],
        ["–", "–", "–", "0", "name=never"],
    ]


@pytest.mark.parametrize(
    ("file", "says"),
    [("bad.jsonl", "bad.jsonl:2 is no JSON object"), ("/proc/self/mem", "/proc/self/mem cannot be read: Input/output error")],
)
def test_data_that_cannot_be_read_is_one_message_and_exit_code_2(tmp_path: Path, file: str, says: str) -> None:
    """Also when ranks find it, long after the config was checked."""
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nnot json\n')
    data = ["data=text", f"data.sources.text.paths=[{tmp_path / file}]", f"data.cache={tmp_path}", f"runs={tmp_path}/runs"]
    command = [sys.executable, "-m", "ringspan.launch", "--ranks=2", "experiment=laptop", "parallel.device=cpu", *data]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count(says) == 1, done.stderr
    assert "Traceback" not in done.stderr and "rank" not in done.stderr


@pytest.mark.parametrize("zero", [1, 2])
def test_muon_steps_as_far_as_its_rate_says(tmp_path: Path, zero: int) -> None:
    """Its steps are orthogonal up to a factor near 1, of which DeepSpeed's clipping would leave a part."""
    options = [f"runs={tmp_path}", "name=run", "steps=2", "checkpoint.every=1", "optim=muon", f"engine.zero={zero}"]
    assert jobs.run_ranks(2, jobs.train, [*options, "optim.weight_decay=0", "schedule=constant"]) == [0, 0]
    before, after = (load_model.Restored(str(path)) for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*")))
    names = [name for name in before.reader.names if name.startswith("layers.") and before.weight(name).ndim == 2]
    for name in names:
        step = after.weight(name) - before.weight(name)
        rows, columns = step.shape
        far = 0.02 * math.sqrt(min(rows, columns) * max(1, rows / columns))
        assert 0.6 * far < float(step.norm()) < 1.3 * far, (name, float(step.norm()) / far)
    assert len(names) > 8


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ringspan.launch", "--ranks=2", *jobs.TOY, f"runs={tmp_path}", "name=run", "steps=100000"]
    launched = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launched.stdout is not None
    next(text for text in launched.stdout if text.startswith("step"))
    children = Path(f"/proc/{launched.pid}/task/{launched.pid}/children").read_text().split()
    os.kill(workers(int(children[0]))[1], signal.SIGKILL)
    _, told = launched.communicate(timeout=120)
    assert launched.returncode == 128 + signal.SIGKILL and "was ended by SIGKILL" in told
    assert "ChildFailedError" not in told


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_what_is_far_away_is_recalled_through_the_ring_and_not_without(tmp_path: Path, broken: bool) -> None:
    """`make train`'s own experiment, and once with a ring that carries nothing. Chance is 1 in 8."""
    hook = jobs.local_attention if broken else None
    options = ["experiment=laptop", f"runs={tmp_path}", "name=run", "parallel.device=cpu", "evaluate.sample=0"]
    assert jobs.run_ranks(2, jobs.train_plain, options, hook, limit=500) == [0, 0]
    report = json.loads((tmp_path / "run" / "finished.json").read_text())["held_out"]
    far, chance = report["far/recall"], 1 / 8
    assert far < 1.2 * chance if broken else far > 3 * chance, far


def test_launch_hands_a_signal_to_the_ranks_which_save_and_leave(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ringspan.launch", "--ranks=2", *jobs.TOY, f"runs={tmp_path}", "name=run", "steps=500"]
    launched = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert launched.stdout is not None
    for text in launched.stdout:
        if text.startswith("step   3/500"):
            launched.send_signal(signal.SIGINT)  # Ctrl-C
            break
    launched.communicate(timeout=120)
    assert launched.returncode == 0
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


def test_a_signal_before_there_are_ranks_ends_the_launch(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ringspan.launch", "--ranks=1", *jobs.TOY, f"runs={tmp_path}", "name=run", "steps=100000"]
    launched = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{launched.pid}/task/{launched.pid}/children")
    while not children.read_text():  # torchrun
        time.sleep(0.01)
    launched.send_signal(signal.SIGTERM)
    assert launched.wait(timeout=60) != 0
    assert not list(tmp_path.glob("*/finished.json"))


def not_on_this_rank(options: list[str]) -> None:
    from ringspan.trainer import distributed, train
    from ringspan.trainer.config import compose

    def refuse(name: str, local_rank: int) -> Any:
        raise ValueError(f"rank {local_rank} of this machine has no GPU of its own")

    if os.environ["RANK"] == "1":
        distributed.choose_device = refuse
    raise SystemExit(train.run(compose.load([*jobs.TOY, *options])))


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 17 on node3")
        lock.flush()
        assert jobs.run_ranks(2, as_started, [f"runs={tmp_path}", "name=run", "steps=1"]) == [2, 2]
    assert jobs.said.count("another process trains in this folder (process 17 on node3)") == 1 and "Traceback" not in jobs.said


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert jobs.run_ranks(2, as_started, [f"runs={tmp_path}/file", "steps=1"]) == [2, 2]
    assert jobs.said.count(f"runs={tmp_path}/file: the run's folder cannot be written") == 1 and "Traceback" not in jobs.said
    command = [sys.executable, "-m", "ringspan.trainer.train", *jobs.TOY, f"runs={tmp_path}/file"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "terminate" not in done.stderr, done.stderr


def test_what_a_start_cannot_write_down_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "run" / "starts.jsonl").mkdir(parents=True)
    assert jobs.run_ranks(2, as_started, [f"runs={tmp_path}", "name=run", "steps=1"]) == [2, 2]
    assert jobs.said.count(f"Is a directory: '{tmp_path}/run/starts.jsonl'") == 1 and "Traceback" not in jobs.said


def test_a_finished_named_run_with_other_options_is_refused(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=1"]
    assert jobs.run_ranks(1, as_started, options) == [0]
    assert jobs.run_ranks(1, as_started, options) == [0], "the same command is over already"
    assert jobs.run_ranks(1, as_started, [*options, "optim.lr=1e-3"]) == [2]
    assert "that run is finished, and had other options: optim.lr=0.001 (was 0.003)" in jobs.said
    other = [*options, "optim.lr=1e-3", "steps=2"]
    assert jobs.run_ranks(1, as_started, [*other, "model.layers=3"]) == [2] and "it is of another model" in jobs.said
    assert "layers: 2" in (tmp_path / "run" / "config.yaml").read_text(), "what was refused leaves no trace"
    assert jobs.run_ranks(1, as_started, other) == [0]


def as_started(options: list[str]) -> None:
    """As `ringspan train` does it, with its messages."""
    from ringspan.trainer import train
    from ringspan.trainer.config import compose

    raise SystemExit(train.run(compose.load([*jobs.TOY, *options])))


def test_what_only_one_rank_finds_wrong_is_said_by_it(tmp_path: Path) -> None:
    assert jobs.run_ranks(2, not_on_this_rank, [f"runs={tmp_path}"])[1] == 2
    assert "rank 1: rank 1 of this machine has no GPU of its own" in jobs.said and "Traceback" not in jobs.said


def a_file_fails_here(rank: int) -> None:
    from ringspan.trainer import distributed

    among = distributed.DistributedContext(Config(parallel=Parallel(device="cpu")))

    def make() -> str:
        if among.rank == rank:
            raise PermissionError(13, "Permission denied", "secret.txt")
        return "made"

    try:
        among.alike(make)
    except compose.ConfigError as error:
        print(error)


def test_a_file_that_only_one_rank_cannot_read_is_said_on_all() -> None:
    assert jobs.run_ranks(2, a_file_fails_here, 1) == [0, 0]
    assert jobs.said.count("rank 1: [Errno 13] Permission denied: 'secret.txt'") == 2


def test_the_slurm_script_checks_and_starts_all_ranks(tmp_path: Path) -> None:
    """With a cluster's commands played by scripts."""
    for name, text in (("scontrol", "echo node1"), ("srun", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = dict(JOB_ID="7", NNODES="2", GPUS_ON_NODE="8", JOB_NODELIST="node[1-2]", SUBMIT_DIR=str(ROOT))
    environment = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
    environment |= dict(PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHON=sys.executable)
    command = ["bash", "launch/slurm.sh", "experiment=llama_8b_1m", "parallel.ring=16"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--nnodes=2 --nproc-per-node=8" in done.stdout and "name=slurm-7" in done.stdout


def test_a_run_for_measurement_saves_and_evaluates_nothing(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=2", "checkpoint=none", "evaluate.batches=0"]
    assert jobs.run_ranks(1, jobs.train, options) == [0]
    assert "the whole config" in jobs.said and "checkpoints" not in jobs.said and "trainer.generate" not in jobs.said
    assert not (tmp_path / "run" / "checkpoints").exists() and lines(tmp_path / "run", "held_out") == []


def last_save_fails(run: Any) -> None:
    """The disk is full when step 2 is saved."""
    from ringspan.trainer.checkpoint import checkpoint

    original = checkpoint.save

    def save(folder: Path, engine: Any, position: Any, *rest: Any) -> str:
        return "No space left on device" if position.step == 2 else original(folder, engine, position, *rest)

    checkpoint.save = save


def test_a_run_whose_last_step_is_not_saved_is_not_finished(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=2", "checkpoint.every=1"]
    assert set(jobs.run_ranks(2, as_started_after, options, last_save_fails)) == {1}
    assert "Step 2 is not saved: No space left on device. Make room" in jobs.said and "the weights of step 1," not in jobs.said
    assert "checkpoints the weights of step 1." in jobs.said and not (tmp_path / "run" / "finished.json").exists()
    assert jobs.run_ranks(2, as_started, options) == [0, 0]
    assert "going on after step 1" in jobs.said and (tmp_path / "run" / "finished.json").exists()


def as_started_after(options: list[str], change: Any) -> None:
    change(None)
    as_started(options)


def test_a_full_disk_does_not_end_what_is_only_written_down(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tracker = tracking.Tracker(Config(), tmp_path, active=True)
    tracker.log(1, dict(loss=1.0))
    disk, tracker.file = tracker.file, open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    tracker.log(2, dict(loss=2.0))
    tracker.log(3, dict(loss=3.0))
    assert capsys.readouterr().out.count("metrics.jsonl: No space left on device; its lines wait") == 1
    tracker.file.close()
    tracker.file = disk
    tracker.close()
    assert [line["step"] for line in run_folder.lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_report_that_comes_again_stands_there_once(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=2"]
    for _ in range(2):
        assert jobs.run_ranks(1, as_started, options) == [0]
        assert [line["step"] for line in lines(tmp_path / "run", "held_out")] == [2]
        assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]


def test_who_goes_on_with_other_options_is_told(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run"]
    assert jobs.run_ranks(1, as_started, [*options, "steps=1"]) == [0]
    assert jobs.run_ranks(1, as_started, [*options, "steps=2", "rope.base=500", "seed=3"]) == [0]
    assert "name=run: goes on with other options: rope.base=500.0 (was 10000.0), seed=3 (was 0), steps=2 (was 1)" in jobs.said
    assert jobs.run_ranks(1, as_started, [*options, "steps=3", "rope.base=500", "seed=3"]) == [0]
    assert "other options" not in jobs.said


def test_after_too_many_bad_steps_the_way_on_is_named(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "steps=9", "debug.bad_steps=2", "checkpoint.every=1"]
    assert jobs.run_ranks(1, jobs.train, options, jobs.poison, [3, 4]) == [1]
    (told,) = re.findall(r"checkpoint\.resume=(\S+) goes on from the last checkpoint", jobs.said)
    assert jobs.run_ranks(1, as_started, [*options[:2], "optim.lr=1e-3", f"checkpoint.resume={told}"]) == [0]
    assert f"going on after step {int(told.rpartition('-')[2])}" in jobs.said


def test_changes_are_a_patch_that_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its lines end with, and in whatever encoding they are."""
    repository, folder = tmp_path / "repository", tmp_path / "run"
    repository.mkdir()
    folder.mkdir()
    git = ["git", "-C", str(repository), "-c", "user.name=me", "-c", "user.email=me@here"]
    file = repository / "file"
    file.write_bytes(b"one\ntwo\n\n")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    file.write_bytes(b"one\n\xe9two\n\n")
    monkeypatch.setattr(run_folder, "ROOT", repository)
    assert run_folder.git_state(folder)["changed"] == "changes.patch"
    subprocess.run([*git, "checkout", "-q", "file"], check=True)
    subprocess.run([*git, "apply", str(folder / "changes.patch")], check=True)
    assert file.read_bytes() == b"one\n\xe9two\n\n"
