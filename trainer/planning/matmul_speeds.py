"""Speeds of matmuls by shape, of elementwise kernels and of the optimizer, as measured by `ringspan bench matmul`.

Imports no torch. Without a measurement of a device the planner takes one speed for all matmuls (machines.py).
"""

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringspan.trainer.config.schema import Model
from ringspan.trainer.planning.flops import head_dim
from ringspan.trainer.planning.machines import MATMUL_EFFICIENCY, Machine

SPEEDS = Path(__file__).with_name("matmul_speeds.json")  # matmul-*.json of docs/results; `make tables` writes it
UNALIGNED = 8  # outputs that this does not divide have slower kernels, so that other outputs are no neighbours of theirs
# Bytes that elementwise kernels move per token and layer, in bf16: reads and writes of norms, residuals, rotary positions and
# activations, forward and backward, counted from model.py. The loss reads and writes logits in fp32.
PASSES_OF_DIM, PASSES_OF_MLP, BYTES_OF_LOGIT = 36, 9, 12


@dataclass(frozen=True)
class DeviceSpeeds:
    """Measured speeds of one device."""

    name: str
    rows: list[dict[str, Any]]
    elementwise: float  # bytes/s
    optimizer: float  # seconds per weight

    def layer_seconds(self, rows: int, inputs: int, outputs: int) -> tuple[float, float]:
        """Return seconds of a linear layer's forward, and of both of its gradients, at the nearest measured shape's speed."""
        near = min(self.rows, key=lambda row: _distance(row, rows, inputs, outputs))
        flops = 2 * rows * inputs * outputs
        backward = sum(flops / (near[name] * 1e12) for name in ("input_gradient", "weight_gradient"))
        return flops / (near["forward"] * 1e12), backward

    def elementwise_seconds(self, model: Model, tokens: float) -> float:
        """Return seconds of the kernels of a step that are neither matmul nor attention."""
        per_layer = 2 * (PASSES_OF_DIM * model.dim + PASSES_OF_MLP * model.mlp_dim)
        return tokens * (model.layers * per_layer + BYTES_OF_LOGIT * model.vocabulary) / self.elementwise


def speeds_of(target: Machine) -> DeviceSpeeds | None:
    """Return the speeds of a machine's device; None if it has not been measured, or the machine has a speed of its own."""
    if target.matmuls != MATMUL_EFFICIENCY * target.peak:
        return None
    for result in _read(SPEEDS, SPEEDS.stat().st_mtime_ns) if SPEEDS.is_file() else []:
        if result["device"] in target.name or target.name in result["device"]:
            return DeviceSpeeds(
                result["device"], result["rows"], result["elementwise_bytes_per_s"], result["optimizer_s_per_weight"]
            )
    return None


def layers_of(model: Model) -> dict[str, list[tuple[int, int]]]:
    """Return (inputs, outputs) of the linear layers: of `project` and `finish` of one layer, and of `head`."""
    width = head_dim(model)
    heads, kv_heads = model.heads * width, model.kv_heads * width
    gates = 2 if model.activation == "swiglu" else 1
    finish = [(heads, model.dim), *[(model.dim, model.mlp_dim)] * gates, (model.mlp_dim, model.dim)]
    return dict(project=[(model.dim, heads), *[(model.dim, kv_heads)] * 2], finish=finish, head=[(model.dim, model.vocabulary)])


def measured_speeds(results: Path) -> list[dict[str, Any]]:
    """Return the content of matmul-*.json in a folder of results, newest first, that of each device once."""
    files = [json.loads(path.read_text()) for path in sorted(results.glob("matmul-*.json"))]
    keys = ("device", "date", "elementwise_bytes_per_s", "optimizer_s_per_weight", "rows")
    newest: dict[str, dict[str, Any]] = {}
    for result in sorted(files, key=lambda result: result["date"], reverse=True):
        newest.setdefault(result["device"], {key: result[key] for key in keys})
    return list(newest.values())


def _distance(row: dict[str, Any], rows: int, inputs: int, outputs: int) -> float:
    apart = (
        abs(math.log2(row["rows"] / rows)) / 2
        + abs(math.log2(row["inputs"] / inputs))
        + abs(math.log2(row["outputs"] / outputs))
    )
    return apart + 8 * (bool(row["outputs"] % UNALIGNED) != bool(outputs % UNALIGNED))


@functools.lru_cache(maxsize=1)
def _read(path: Path, changed: int) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


def write(results: Path) -> None:
    """Write SPEEDS from a folder of results."""
    SPEEDS.write_text("[\n" + ",\n".join(map(json.dumps, measured_speeds(results))) + "\n]\n")
