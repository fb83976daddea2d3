"""Speeds of matmuls by shape, heads, elementwise kernels and the optimizer, as measured by `ringspan bench matmul`.

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
from ringspan.trainer.planning.machines import Machine

SPEEDS = Path(__file__).with_name("matmul_speeds.json")  # matmul-*.json of docs/results; `make tables` writes it
ALIGNED = 8  # vocabularies that this does not divide have slower kernels, and other vocabularies are no neighbours of theirs
# Reads and writes of a layer's elementwise kernels per token, in elements of dim and of mlp_dim, forward and backward: norms,
# residuals, rotary positions and activations, counted from layer.py. A third of them is in the forward.
PASSES_OF_DIM, PASSES_OF_MLP = 36, 9


@dataclass(frozen=True)
class DeviceSpeeds:
    """Measured speeds of one device."""

    name: str
    rows: list[dict[str, Any]]  # of linear layers
    heads: list[dict[str, Any]]
    elementwise: float  # bytes/s
    optimizer: float  # seconds per weight

    def layer_seconds(self, rows: int, inputs: int, outputs: int) -> tuple[float, float]:
        """Return seconds of a linear layer's forward, and of both of its gradients, at the nearest measured shape's speed."""

        def distance(row: dict[str, Any]) -> float:
            return abs(math.log2(row["rows"] / rows)) / 2 + _distance(row, inputs, outputs)

        near = min(self.rows, key=distance)
        flops = 2 * rows * inputs * outputs
        backward = sum(flops / (near[name] * 1e12) for name in ("input_gradient", "weight_gradient"))
        return flops / (near["forward"] * 1e12), backward

    def head_seconds(self, tokens: float, inputs: int, vocabulary: int) -> float:
        """Return seconds of the head and its cross-entropy, forward and backward, scaled from the nearest measured head."""

        def distance(row: dict[str, Any]) -> float:
            return _distance(row, inputs, vocabulary) + 8 * (bool(row["outputs"] % ALIGNED) != bool(vocabulary % ALIGNED))

        near = min(self.heads, key=distance)
        return tokens * near["s_per_token"] * inputs * vocabulary / (near["inputs"] * near["outputs"])

    def elementwise_seconds(self, model: Model, tokens: float, again: float) -> float:
        """Return seconds of the kernels of all layers that are neither matmul nor attention.

        Args:
            model: the resolved model.
            tokens: tokens of a rank's step.
            again: layers whose forward is computed again.
        """
        nbytes = 2 * (PASSES_OF_DIM * model.dim + PASSES_OF_MLP * model.mlp_dim)
        return tokens * (model.layers + again / 3) * nbytes / self.elementwise


def speeds_of(target: Machine) -> DeviceSpeeds | None:
    """Return the speeds of a machine's device; None if it has not been measured."""
    for result in read_rows(SPEEDS):
        if result["device"] in target.name or target.name in result["device"]:
            others = result["elementwise_bytes_per_s"], result["optimizer_s_per_weight"]
            return DeviceSpeeds(result["device"], result["rows"], result["heads"], *others)
    return None


def layers_of(model: Model) -> dict[str, list[tuple[int, int]]]:
    """Return (inputs, outputs) of the linear layers of `project`, of `finish` and of its last one `down`, of one layer."""
    width = head_dim(model)
    heads, kv_heads = model.heads * width, model.kv_heads * width
    gates = 2 if model.activation == "swiglu" else 1
    down = (model.mlp_dim, model.dim)
    finish = [(heads, model.dim), *[(model.dim, model.mlp_dim)] * gates, down]
    return dict(project=[(model.dim, heads), *[(model.dim, kv_heads)] * 2], finish=finish, down=[down])


def measured_speeds(results: Path) -> list[dict[str, Any]]:
    """Return the content of matmul-*.json in a folder of results, newest first, that of each device once."""
    files = [json.loads(path.read_text()) for path in sorted(results.glob("matmul-*.json"))]
    keys = ("device", "date", "elementwise_bytes_per_s", "optimizer_s_per_weight", "heads", "rows")
    newest: dict[str, dict[str, Any]] = {}
    for result in sorted(files, key=lambda result: result["date"], reverse=True):
        newest.setdefault(result["device"], {key: result[key] for key in keys})
    return list(newest.values())


def _distance(row: dict[str, Any], inputs: int, outputs: int) -> float:
    return abs(math.log2(row["inputs"] / inputs)) + abs(math.log2(row["outputs"] / outputs))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the content of a file of measured speeds, read again when it changes; nothing if it is absent."""
    return _read(path, path.stat().st_mtime_ns) if path.is_file() else []


@functools.lru_cache(maxsize=2)
def _read(path: Path, changed: int) -> list[dict[str, Any]]:
    return json.loads(path.read_text())
