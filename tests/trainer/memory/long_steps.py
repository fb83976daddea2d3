"""Training steps of long sequences: memory and time planned before the run, beside measured ones.

    python -m tests.trainer.memory.long_steps predict                  write docs/results/predictions-long-steps.json
    python -m tests.trainer.memory.long_steps run NAME... --out DIR    run on this machine's GPUs, write DIR/memory-NAME.json

A run pins the memory plan of its prediction. A warm-up in the same process compiles and loads the kernels (debug.warm_up).
The result is written at each phase, so that a run which is cut off shows how far it came. At the end the attention kernel
is measured alone, on one KV head and its query heads at the run's length.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ringspan import ROOT, attention
from ringspan.kernels.mask import Mask
from ringspan.trainer.checkpoint.run_folder import read_jsonl
from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import Config
from ringspan.trainer.data import tokenizer
from ringspan.trainer.planning.flops import head_dim, training_flops
from ringspan.trainer.planning.machines import resolve_machine
from ringspan.trainer.planning.memory import GIB, PHASES
from ringspan.trainer.planning.plans import Planner

PREDICTIONS = ROOT / "docs" / "results" / "predictions-long-steps.json"
COMMON = [
    "data=recall", "data.batch=1", "schedule.warmup=0", "checkpoint=none", "evaluate.batches=0",
    "evaluate.sample=0", "debug.watchdog=0", "parallel.timeout=900", "tracking.log_every=1",
]  # fmt: skip
WARM_UP = 131072  # tokens: one or two chunks of the plans' rows on each rank
HOST_GIB = 125  # of each GPU's share of the host
EVERY = 1.0  # seconds between two looks at a run's metrics


@dataclass(frozen=True)
class LongRun:
    """A run, with the machine that it is planned for."""

    options: str
    hardware: str = "h100"
    gpus: int = 1
    steps: int = 1
    plan: str = "auto"

    @property
    def overrides(self) -> list[str]:
        return [*self.options.split(), *COMMON, f"steps={self.steps}", f"debug.warm_up={WARM_UP}"]


WIDTH_8B, ONE_B = "model=llama-8b engine=zero1", "model=llama-1b engine=zero1"
RUNS = {
    "8b-2-layers-1m-h100": LongRun(f"{WIDTH_8B} model.layers=2 data.length=1M"),
    "8b-4-layers-1m-h200": LongRun(f"{WIDTH_8B} model.layers=4 data.length=1M", "h200"),
    "8b-4-layers-1m-h100": LongRun(f"{WIDTH_8B} model.layers=4 data.length=1M"),
    "8b-8-layers-512k-h100": LongRun(f"{WIDTH_8B} model.layers=8 data.length=512k"),
    "8b-4-layers-512k-h100": LongRun(f"{WIDTH_8B} model.layers=4 data.length=512k"),
    "8b-4-layers-384k-h100": LongRun(f"{WIDTH_8B} model.layers=4 data.length=384k"),
    "8b-512k-4-h100": LongRun(
        "model=llama-8b engine=zero3 parallel.ring=4 data.length=512k", gpus=4, plan="x/1@16 outs=32@32 rows=32768"
    ),
    "qwen3-8b-1m-8-h100": LongRun("experiment=qwen3_8b_1m", gpus=8, plan="x/1@1 outs=36@36 rows=16384"),
    "qwen3-8b-1m-8-h200": LongRun("experiment=qwen3_8b_1m", "h200", gpus=8, plan="x/1 outs=36 rows=16384"),
    "1b-1m-h100": LongRun(f"{ONE_B} data.length=1000000"),
    "8b-2-layers-128k-h100": LongRun(
        f"{WIDTH_8B} model.layers=2 data.length=128k", steps=4, plan="x/1@1 outs=2@2 late heads=2 rows=65536"
    ),
    "1b-128k-h100": LongRun(f"{ONE_B} data.length=128k", steps=4, plan="x/1@11 outs=16@16 rows=65536"),
}


def predict(names: list[str]) -> None:
    """Write the planned memory and time of runs."""
    known = json.loads(PREDICTIONS.read_text()) if PREDICTIONS.exists() else {}
    for name in names:
        run = RUNS[name]
        machine = [f"hardware={run.hardware}", f"hardware.gpus={run.gpus}", f"hardware.host_gib={HOST_GIB * run.gpus}"]
        config = config_of([*run.overrides, *machine, f"engine.memory={run.plan}"], run.gpus)
        target, world = resolve_machine(config)
        step = Planner(config, world, target).choose()
        assert step.fits, (name, str(step))
        phases = {phase: step.need.phase(phase) / GIB for phase in ("start", *PHASES)}
        known[name] = dict(options=run.overrides, gpus=run.gpus, device=target.name, plan=str(step.plan), seconds=step.seconds)
        known[name] |= dict(gib=step.need.peak / GIB, gib_by_phase=phases, host_gib=step.need.on_host / GIB)
        print(f"{name}: {step}")
    PREDICTIONS.write_text(json.dumps(known, indent=1) + "\n")


def config_of(overrides: list[str], gpus: int) -> Config:
    return tokenizer.resolve_config(compose.load(overrides, world_size=gpus, planning=True).config)


def launch(name: str, gpus: int, overrides: list[str], out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ringspan", "launch", f"--ranks={gpus}", *overrides, f"runs={out}", f"name={name}"]
    log = (out / f"{name}.log").open("w")
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True)


def run(name: str, out: Path) -> bool:
    """Run a prediction's command, and write planned and measured values at each phase."""
    out.mkdir(parents=True, exist_ok=True)
    predicted = json.loads(PREDICTIONS.read_text())[name]
    gpus, plan = predicted["gpus"], f"engine.memory={predicted['plan']}"
    result: dict[str, Any] = dict(kind="long step", date=datetime.now(UTC).isoformat(timespec="seconds"), name=name)
    result |= dict(predicted=predicted, device=torch.cuda.get_device_name(), phases=[])
    begin, process = time.monotonic(), launch(name, gpus, [*predicted["options"], plan], out)
    while True:
        code = process.poll()
        read_metrics(out / name / "metrics.jsonl", result)
        result["wall_seconds"] = time.monotonic() - begin
        (out / f"memory-{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        if code is not None:
            break
        time.sleep(EVERY)
    print((out / f"{name}.log").read_text()[-2500:])
    if code == 0:
        config = config_of([*predicted["options"], plan], gpus)
        alone = attention_alone(config)
        step = training_flops(config.model, [config.data.length]) / result["seconds"] / gpus / 1e12
        result |= dict(attention_alone=alone, step_tflops=step, step_of_attention=step / alone["tflops"])
        result |= dict(gib_off=predicted["gib"] / result["gib"] - 1, seconds_off=predicted["seconds"] / result["seconds"] - 1)
        keys = ("gib", "gib_off", "gib_reserved", "seconds", "seconds_off", "step_tflops", "step_of_attention")
        print(name, {key: round(result[key], 4) for key in keys}, alone)
        (out / f"memory-{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return code == 0


def read_metrics(path: Path, result: dict[str, Any]) -> None:
    """Read what a run has written until now."""
    if not path.exists():
        return
    lines = list(read_jsonl(path))
    result["phases"] = [line for line in lines if line["kind"] in ("start", "phase")]
    if steps := [line for line in lines if line["kind"] == "train"]:
        seconds = [line["seconds"] for line in steps]
        result |= dict(step_seconds=seconds, seconds=statistics.median(seconds[1:] or seconds), loss=steps[-1]["loss"])
        result |= dict(gib=max(line["gib"] for line in steps), gib_reserved=max(line["gib_reserved"] for line in steps))
        result |= dict(last_phases=steps[-1]["phases"])


def attention_alone(config: Config) -> dict[str, Any]:
    """Measure forward and backward of one KV head and its query heads, in TFLOP/s."""
    model, length = config.model, config.data.length
    heads, width = model.heads // model.kv_heads, head_dim(model)
    generator = torch.Generator("cuda").manual_seed(0)
    seconds = []
    for n in (65536, length):  # the first compiles
        q, k, v = (
            torch.randn(1, n, h, width, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
            for h in (heads, 1, 1)
        )
        dout = torch.randn(q.shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        out = attention(q, k, v, mask=Mask(causal=True))
        events[1].record()
        out.backward(dout)
        events[2].record()
        torch.cuda.synchronize()
        seconds = [a.elapsed_time(b) / 1000 for a, b in pairwise(events)]
        del q, k, v, dout, out
    forward = 2 * heads * width * float(length) ** 2 / 1e12
    speeds = dict(forward_tflops=forward / seconds[0], backward_tflops=2.5 * forward / seconds[1])
    return dict(heads=heads, length=length, head_dim=width, tflops=3.5 * forward / sum(seconds)) | speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("predict", "run"))
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)}; predict: all")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    if args.action == "predict":
        predict(args.names or list(RUNS))
    else:
        sys.exit(sum(not run(name, args.out) for name in args.names))


if __name__ == "__main__":
    main()
