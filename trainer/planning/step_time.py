"""Time of a training step by kind: matmuls, attention, other kernels, optimizer, communication. Imports no torch."""

import functools
import json
import math
from pathlib import Path
from typing import Any

from ringspan.trainer.config import validate
from ringspan.trainer.config.schema import Config
from ringspan.trainer.memory.plan import MemoryPlan
from ringspan.trainer.planning import matmul_speeds
from ringspan.trainer.planning.flops import head_dim, parameters, visible_pairs, window
from ringspan.trainer.planning.machines import MACHINES, Machine
from ringspan.trainer.planning.matmul_speeds import layers_of, read_rows, speeds_of
from ringspan.trainer.planning.memory import shape_of

SPEEDS = Path(__file__).with_name("attention_speeds.json")  # measured_speeds() of docs/results; `make tables` writes it
# Three shares measured in the profiled steps of docs/results/train-h200.json: 8B at 256k and 1B at 128k, on four H200.
LINK_EFFICIENCY = 0.075  # exposed communication: bytes of ZeRO per second and nominal speed of a link (0.071, 0.078)
OTHER = 0.22  # time of everything that is neither matmul nor attention, per time of matmuls (8B; 0.29 for 1B)
OPTIMIZER_BYTES, MEMORY_SPEED = 30, 2.5e12  # bytes per weight that the optimizer reads and writes; bytes/s of a GPU's memory
HOST_COPIES = 45e9  # bytes/s in each direction, with both in use (docs/results/memory-m0-h100.json)
# Assumed: seconds of launches and partly filled waves for a further chunk of rows, and for a further group of KV heads.
CHUNK_SECONDS, GROUP_SECONDS = 4e-4, 4e-4
SINGLE_HEAD = 0.03  # of attention: a ring overlaps the halves of a group's heads, which a group of one head does not have
SINGLE_HEAD_ROWS = 131072  # rows per rank at which SINGLE_HEAD was measured; attention grows faster than the transfers
SHAPE = ("head_dim", "length", "causal", "window", "documents")


def measured_speeds(results: Path) -> list[dict[str, Any]]:
    """Return forward and backward TFLOP/s of our kernels, newest file first.

    They are those of attention-*.json and memory-*.json in a folder. The planner reads them from SPEEDS, which the wheel ships;
    docs/results exists in a checkout only.
    """
    paths = sorted([*results.glob("attention-*.json"), *results.glob("memory-*.json")])
    files = [(path.name, json.loads(path.read_text())) for path in paths]
    rows = []
    for name, result in sorted(files, key=lambda file: file[1]["date"], reverse=True):
        shapes = {shape["name"]: shape for shape in result.get("shapes", [])}
        for row in result.get("rows", []):
            if row.get("ours") and row["status"] == "ok" and "backward_tflops" in row:
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
    rows = read_rows(SPEEDS)
    length = config.data.length
    # `auto` runs hopper where its kernels were measured, else triton
    hopper = {row["device"] for row in rows if row["kernel"] == "hopper"}
    for row in rows:
        known = next((m for m in MACHINES.values() if m.name in row["device"]), None)
        same = row["device"] in target.name or target.name in row["device"]
        if not row["causal"] or (not same and (known is None or not target.peak)):
            continue
        distance = 4 * abs(math.log2(row["head_dim"] / width)) + abs(math.log2(row["length"] / length)) / 4
        distance += 2 * (bool(row["window"]) != windowed) + row["documents"]
        # Another device with the same peak and kernels is nearer than the same one with another head_dim.
        distance += 0.6 * (not same) if known and known.peak == target.peak else 8 * (not same)
        distance += 4 * (row["kernel"] != ("hopper" if row["device"] in hopper else "triton"))
        factor = 1.0 if same else target.peak / known.peak  # type: ignore[union-attr]
        source = f"{row['shape']} in {row['file']}" + ("" if same else f", scaled from {row['device']} by the peaks")
        if best is None or distance < best[0]:
            best = distance, row["forward_tflops"] * factor * 1e12, row["backward_tflops"] * factor * 1e12, source
    if best is None:
        return target.matmuls / 2, target.matmuls / 2, "no measurement: half the speed of matmuls is assumed"
    return best[1], best[2], best[3]


class StepTimer:
    """The time of a step under any memory plan.

    Documents are as long as the sequence. Not counted: Ulysses' exchange of heads, and the host's optimizer.

    Args:
        config: a valid config whose model is resolved.
        world: number of ranks.
        target: the machine.
    """

    def __init__(self, config: Config, world: int, target: Machine) -> None:
        model, engine, data = config.model, config.engine, config.data
        self.config, self.world, self.target, self.model = config, world, target, model
        self.forward, self.backward, _ = attention_speed(config, target)
        counts = parameters(model)
        self.data, ring, ulysses = validate.mesh_of(config, world)
        self.ring = ring
        tokens = data.batch * data.length
        self.tokens = tokens / world
        width = head_dim(model)
        heads, kv_heads = model.heads * width, model.kv_heads * width
        self.project = model.dim * (heads + 2 * kv_heads)  # weights of one layer
        self.finish = (counts.matmuls - model.vocabulary * model.dim) / model.layers - self.project
        self.speeds = speeds_of(target)
        self._cached_matmuls = functools.cache(self._matmuls_by_shape)  # of few shapes, for hundreds of plans
        lengths = [data.length] * data.batch
        per_pair = 4 * model.heads * width
        pairs = {size: visible_pairs(lengths, size) for size in {window(model, layer) for layer in range(model.layers)}}
        self.attention = [per_pair * pairs[window(model, layer)] / world for layer in range(model.layers)]  # forward FLOPs
        self.num = data.batch // (data.micro_batch * self.data)  # micro-batches
        self.rows = data.length // (ring * ulysses)
        self.sizes = shape_of(config, world, target.gpu)
        bytes_per_weight = {0: 2 * 4, 1: 4 + self.sizes.b, 2: 4 * self.num + self.sizes.b, 3: (2 * self.sizes.b + 4) * self.num}
        nbytes = bytes_per_weight[engine.zero] * counts.total * (world - 1) / world
        self.communication = nbytes / (LINK_EFFICIENCY * target.link)
        shards = world if engine.zero else 1
        on_gpu = target.gpu and not engine.offload_optimizer
        per_weight = self.speeds.optimizer if self.speeds else OPTIMIZER_BYTES / MEMORY_SPEED
        self.optimizer = per_weight * counts.total / shards * on_gpu

    def __call__(self, plan: MemoryPlan) -> dict[str, float]:
        """Return the seconds by kind."""
        layers = self.model.layers
        grouped = bool(plan.heads) and plan.heads < self.model.kv_heads
        chunks = -(-self.rows // plan.rows) if plan.rows else 1
        projects, finishes, skipped, again = 0, 0, 0, 0.0  # forwards that the backward computes again, without last matmuls
        if not plan.keeps_everything:
            # The backward computes both functions once more, finish without its last matmul; project a second time where
            # heads or rows are split, again for attention without a kept out; finish again for each layer that leads to
            # another one of its segment.
            projects = layers * (1 + (grouped or chunks > 1)) + layers - plan.outs
            finishes = layers + layers - len(plan.segments(layers))
            skipped = layers
            again = sum(self.attention[: layers - plan.outs])
        project, finish, down = (self._matmuls(name, plan) for name in ("project", "finish", "down"))
        matmuls = layers * (sum(project) + sum(finish)) + projects * project[0] + finishes * finish[0] - skipped * down[0]
        attention = (sum(self.attention) + again) / self.forward + 2.5 * sum(self.attention) / self.backward
        if self.ring > 1 and plan.heads == 1 and self.model.kv_heads > 1:
            attention *= 1 + SINGLE_HEAD * min(1.0, SINGLE_HEAD_ROWS / self.rows)
        if self.speeds:
            head = self.speeds.head_seconds(self.tokens, self.model.dim, self.model.vocabulary)
            other = self.speeds.elementwise_seconds(self.model, self.tokens, (projects + finishes) / 2)
            times = {"matmuls of layers": matmuls, "head and loss": head, "attention": attention, "other kernels": other}
        else:
            matmuls += 6 * self.model.vocabulary * self.model.dim * self.tokens / self.target.matmuls
            times = {"matmuls": matmuls, "attention": attention, "other kernels": OTHER * matmuls}
        times["optimizer"] = self.optimizer
        if not plan.keeps_everything and self.target.gpu:
            groups = self.model.kv_heads // plan.heads if grouped else 1
            passes = 3 + (layers - plan.outs) / layers
            launches = CHUNK_SECONDS * (chunks - 1) * passes + GROUP_SECONDS * (groups - 1) * passes
            times["further chunks and groups"] = launches * layers * self.num
        times["exposed communication"] = self.communication
        if plan.inputs_on_host or plan.outs_on_host:
            times["exposed copies to the host"] = self._copies(plan)
        return times

    def _matmuls(self, name: str, plan: MemoryPlan) -> tuple[float, float]:
        """Seconds of a step's matmuls of `project`, `finish` or its last one `down` in one layer, in forward and backward."""
        if self.speeds is not None:
            return self._cached_matmuls(name, max(1, plan.chunk_rows(self.rows) * self.config.data.micro_batch))
        weights = dict(project=self.project, finish=self.finish, down=self.model.mlp_dim * self.model.dim)[name]
        forward = 2 * weights * self.tokens / self.target.matmuls
        return forward, 2 * forward

    def _matmuls_by_shape(self, name: str, rows: int) -> tuple[float, float]:
        """As `_matmuls`, from measured speeds of layers with so many rows at a time."""
        assert self.speeds is not None
        pairs = [self.speeds.layer_seconds(rows, inputs, outputs) for inputs, outputs in layers_of(self.model)[name]]
        times = self.tokens / rows
        return times * sum(forward for forward, _ in pairs), times * sum(backward for _, backward in pairs)

    def _copies(self, plan: MemoryPlan) -> float:
        """Seconds of copies that are longer than the layer that they overlap with."""
        layers, exposed = self.model.layers, 0.0
        first = {segment[0] for segment in plan.segments(layers)[: plan.inputs_on_host]}
        weights = sum(self._matmuls(name, plan)[0] for name in ("project", "finish")) / self.num
        for layer in range(layers):
            nbytes = self.sizes.inputs * (layer in first) + self.sizes.outs * plan.out_on_host(layer, layers)
            forward = weights + self.attention[layer] / self.forward / self.num
            backward = 2 * weights + 2.5 * self.attention[layer] / self.backward / self.num
            copy = nbytes / HOST_COPIES
            exposed += max(0.0, copy - forward) + (copy if plan.late else max(0.0, copy - backward))
        return exposed * self.num


def step_time(config: Config, world: int, target: Machine, plan: MemoryPlan) -> dict[str, float]:
    """Return the seconds of a step by kind.

    Args:
        config: a valid config whose model is resolved.
        world: number of ranks.
        target: the machine.
        plan: what layers keep.
    """
    return StepTimer(config, world, target)(plan)


if __name__ == "__main__":  # `make tables`
    results = Path("docs/results")
    for path, rows in ((SPEEDS, measured_speeds(results)), (matmul_speeds.SPEEDS, matmul_speeds.measured_speeds(results))):
        path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
