"""Time of a training step: matmuls, attention, and exposed communication. Imports no torch."""

import json
import math
from pathlib import Path
from typing import Any

from ringspan.trainer.config import validate
from ringspan.trainer.config.schema import Config
from ringspan.trainer.planning.flops import attention_flops, head_dim, parameters
from ringspan.trainer.planning.machines import MACHINES, Machine

SPEEDS = Path(__file__).with_name("attention_speeds.json")  # measured_speeds() of docs/results; `make tables` writes it
LINK_EFFICIENCY = 0.6  # share of a link's nominal speed
EXPOSED = 0.3  # share of ZeRO 2's and 3's communication that compute does not hide
SHAPE = ("head_dim", "length", "causal", "window", "documents")


def measured_speeds(results: Path) -> list[dict[str, Any]]:
    """Return forward and backward TFLOP/s of our kernels from a folder of attention-*.json, newest file first.

    The planner reads these rows from SPEEDS, which the wheel ships; docs/results exists in a checkout only.
    """
    files = [(path.name, json.loads(path.read_text())) for path in sorted(results.glob("attention-*.json"))]
    rows = []
    for name, result in sorted(files, key=lambda file: file[1]["date"], reverse=True):
        shapes = {shape["name"]: shape for shape in result["shapes"]}
        for row in result["rows"]:
            if row["ours"] and row["status"] == "ok" and "backward_tflops" in row:
                shape = shapes[row["shape"]] | dict(documents=bool(shapes[row["shape"]]["documents"]))
                speeds = dict(forward_tflops=row["forward_tflops"], backward_tflops=row["backward_tflops"])
                about = dict(file=name, device=result["device"], kernel=row["kernel"], shape=row["shape"])
                rows.append(about | {key: shape[key] for key in SHAPE} | speeds)
    return rows


def attention_speed(config: Config, target: Machine) -> tuple[float, float, str]:
    """Return FLOP/s of attention's forward and backward, and the source of the figures.

    The figures are measured on this machine, or the nearest row of SPEEDS; rows of another device are scaled by the peaks.
    """
    if target.attention:
        return *target.attention, "measured on this machine"
    best: tuple[float, float, float, str] | None = None
    width, windowed = head_dim(config.model), any(config.model.windows)
    rows = json.loads(SPEEDS.read_text())
    # `auto` runs hopper where its kernels were measured, else triton
    auto = {row["device"]: "triton" for row in rows} | {row["device"]: "hopper" for row in rows if row["kernel"] == "hopper"}
    for row in rows:
        known = next((m for m in MACHINES.values() if m.name == row["device"]), None)
        same = row["device"] in target.name or target.name in row["device"]
        if not row["causal"] or (not same and (known is None or not target.peak)):
            continue
        distance = abs(math.log2(row["head_dim"] / width)) + abs(math.log2(row["length"] / 32768)) / 4
        distance += 2 * (bool(row["window"]) != windowed) + row["documents"] + 8 * (not same)
        distance += 4 * (row["kernel"] != auto[row["device"]])
        factor = 1.0 if same else target.peak / known.peak  # type: ignore[union-attr]
        source = f"{row['shape']} in {row['file']}" + ("" if same else f", scaled from {row['device']} by the peaks")
        if best is None or distance < best[0]:
            best = distance, row["forward_tflops"] * factor * 1e12, row["backward_tflops"] * factor * 1e12, source
    if best is None:
        return target.matmuls / 2, target.matmuls / 2, "no measurement: half the speed of matmuls is assumed"
    return best[1], best[2], best[3]


def step_time(config: Config, world: int, target: Machine) -> dict[str, float]:
    """Return the seconds of a step by kind, for documents as long as the sequence.

    Not counted: the ring's transfers (attention hides them), Ulysses' exchange of heads, and offloading.

    Args:
        config: a valid config whose model is resolved.
        world: number of ranks.
        target: the machine.
    """
    model, engine, data = config.model, config.engine, config.data
    forward, backward, _ = attention_speed(config, target)
    lengths = [data.length] * data.batch
    counts = parameters(model)
    tokens = data.batch * data.length
    recomputes = engine.activations != "none"
    layer_weights = counts.matmuls - model.vocabulary * model.dim
    matmuls = (6 * counts.matmuls + 2 * recomputes * layer_weights) * tokens / target.matmuls / world
    flops = attention_flops(model, lengths, 1.0)
    attention = (flops * (1 + (engine.activations == "full")) / forward + 2.5 * flops / backward) / world
    num = data.batch // (data.micro_batch * validate.mesh_of(config, world)[0])
    width = 2 if target.gpu else 4
    bytes_per_weight = {0: 2 * 4, 1: 4 + width, 2: 4 * num + width, 3: (2 * width + 4) * num}[engine.zero]
    nbytes = bytes_per_weight * counts.total * (world - 1) / world
    # ZeRO 2 and 3 reduce gradients during the backward, and ZeRO 3 prefetches weights: compute hides most of it.
    communication = nbytes / (LINK_EFFICIENCY * target.link) * (1.0 if engine.zero < 2 else EXPOSED)
    return {"matmuls": matmuls, "attention": attention, "exposed communication of ZeRO": communication}


if __name__ == "__main__":  # `make tables`
    SPEEDS.write_text("[\n" + ",\n".join(map(json.dumps, measured_speeds(Path("docs/results")))) + "\n]\n")
