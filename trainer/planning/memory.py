"""Memory footprint of a training step on one rank, by term, computed without allocating it. Imports no torch.

The peak is the largest of a step's moments (the loss, the start and end of the backward, the optimizer's step), because some
terms exist only at some moments. P parameters, N ranks, n tokens per rank, b bytes per element:

    weights      b·P. ZeRO 3: b·P/N plus gathered weights. ZeRO 0 in bf16: fp32 weights plus bf16 copies during their use
    optimizer    fp32 weights and two moments: 12·P/N. ZeRO 0: two moments, 8·P. Muon keeps one moment of matrices
    gradients    fp32: 4·P for ZeRO 0 and 1, 4·P/N for 2 and 3, plus buckets. ZeRO 0, and 1 in fp32, free them after each step;
                 1 in bf16 keeps its 4·P and reduces in place. A tied head's is held until the embedding's exists
    kept         by the memory plan (trainer/memory/plan.py): inputs of b·n·dim, (out, lse) of b·n·heads·head_dim + 4·n·heads
    working set  of the layers that run their backward: see `working_set`

This is the memory of torch's allocator. `Machine.usable` is what a device leaves to it.
Offloaded terms are counted separately, in the host's memory, which its ranks share.
"""

import functools
import math
from dataclasses import dataclass, field

from ringspan.trainer.config.schema import Config
from ringspan.trainer.config.validate import compiles, mesh_of, uses_bf16
from ringspan.trainer.memory.plan import NONE, MemoryPlan
from ringspan.trainer.planning.flops import Parameters, head_dim, parameters
from ringspan.trainer.planning.ring_memory import ring_backward_buffers, symmetric_memory

GIB = 2**30
MAX_LIVE_PARAMETERS = 10**9  # DeepSpeed's stage3_max_live_parameters: gathered weights that it keeps
# Copies of constants in ringspan/kernels/loss.py (logits per chunk): importing it would import torch.
# tests/trainer/planning/test_memory.py compares them.
CUDA_CHUNK, CPU_CHUNK = 2**27, 2**22
SYMMETRIC = "ring's symmetric memory"  # K/V and gradients, with copy engines
FORWARD, LOSS, OPTIMIZER = "the last layer's forward", "the loss", "the optimizer's step"
BACKWARD_START, BACKWARD_END = "the start of the backward", "the end of the backward"
# Moments of each phase that a run measures.
PHASES = {"forward": (FORWARD, LOSS), "backward": (BACKWARD_START, BACKWARD_END), "step": (OPTIMIZER,)}


@dataclass
class Footprint:
    """Bytes on one rank by term, and the terms that exist at each moment."""

    terms: dict[str, float] = field(default_factory=dict)
    moments: dict[str, list[str]] = field(default_factory=dict)
    between_steps: list[str] = field(default_factory=list)
    offloaded: dict[str, float] = field(default_factory=dict)  # terms in the host's memory, during the whole run

    def at(self, moment: str) -> float:
        return sum(self.terms[name] for name in self.moments[moment])

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=self.at)

    @property
    def peak(self) -> float:
        return self.at(self.peak_moment)

    def phase(self, name: str) -> float:
        """Return the peak of a phase; that of "start" is what exists between steps."""
        if name == "start":
            return sum(self.terms[term] for term in self.between_steps)
        return max(self.at(moment) for moment in PHASES[name])

    @property
    def on_host(self) -> float:
        return sum(self.offloaded.values())


@dataclass
class TensorSizes:
    """Sizes of a rank's tensors, in bytes unless a comment says otherwise."""

    b: int  # bytes per element of activations
    n: int  # tokens of a micro-batch on this rank
    batch: int  # sequences of a micro-batch
    inputs: float  # a layer's input
    outs: float  # attention's out and lse
    heads: int  # query heads × head dim
    kv: int  # KV heads × head dim
    layer: float  # weights of a layer (a number)


def shape_of(config: Config, world: int, gpu: bool) -> TensorSizes:
    model = config.model
    _, ring, ulysses = mesh_of(config, world)
    bf16, counts = uses_bf16(config, gpu), parameters(model)
    b = 2 if bf16 else 4
    n = config.data.micro_batch * -(-config.data.length // (ring * ulysses))
    heads, kv = model.heads * head_dim(model), model.kv_heads * head_dim(model)
    residual = 4 if config.engine.zero == 0 else b  # autocast keeps the residual stream in the weights' fp32
    return TensorSizes(
        b=b,
        n=n,
        batch=config.data.micro_batch,
        inputs=residual * n * model.dim,
        outs=b * n * heads + 4 * n * model.heads,
        heads=heads,
        kv=kv,
        layer=(counts.attention + counts.mlp) / model.layers,
    )


def footprint(config: Config, world: int, gpu: bool = True, plan: MemoryPlan = NONE) -> Footprint:
    """Compute a rank's footprint.

    Args:
        config: a valid config whose model is resolved: its vocabulary and max_positions are known.
        world: number of ranks.
        gpu: whether ranks run on GPUs.
        plan: what layers keep.
    """
    model, engine = config.model, config.engine
    data, ring, ulysses = mesh_of(config, world)
    width, counts, sizes = head_dim(model), parameters(model), shape_of(config, world, gpu)
    bf16, b, n = uses_bf16(config, gpu), sizes.b, sizes.n
    P, shards = counts.total, world if engine.zero else 1
    layer = sizes.layer

    result = Footprint()
    always = result.terms  # terms that exist at every moment
    if engine.zero == 0:
        always["weights"] = 4 * P + (2 * P if bf16 else 0)
    elif engine.zero < 3:
        always["weights"] = b * P
    else:
        # a segment's weights at a time, and those that are prefetched
        most = max((2 + max(plan.segment, 1)) * layer, model.vocabulary * model.dim)
        gathered = min(P, MAX_LIVE_PARAMETERS, most) + engine.prefetch_mb * 2**20 / b
        always["weights"] = (0 if engine.offload_parameters else b * P / shards) + b * min(gathered, P)
    moments = 8 if config.optim.kind == "adamw" else 8 - 4 * (counts.attention + counts.mlp) / P
    optimizer = moments * P / shards + (4 * P / shards if engine.zero else 0)
    always["optimizer"] = 0 if engine.offload_optimizer else optimizer
    gradients = 4 * P / (shards if engine.zero > 1 else 1)
    if engine.offload_optimizer and engine.zero > 1:
        gradients = 0
    in_place = engine.zero == 1 and bf16 and not engine.offload_optimizer  # DeepSpeed's BF16_Optimizer
    if engine.zero and not in_place:
        always["gradient buckets"] = engine.bucket_mb * 2**20 * (2 if engine.zero > 1 else 1)

    rotations = 2 if config.rope.layers == "full" else 1  # of layers with scaled frequencies, and of those without
    always["rotary angles, tokens"] = n * (4 * width * rotations + 8 * 4)
    kv_heads = math.lcm(model.kv_heads, ulysses) // ulysses  # of a ring's rank, whose rows are ulysses times as many
    several_blocks = config.parallel.layout != "striped"  # layouts whose steps may take several blocks
    group_heads = math.lcm(plan.heads, ulysses) // ulysses if plan.heads else kv_heads
    ring_shape = config.data.micro_batch, n * ulysses, group_heads, 2 * width, ring, b
    if ring > 1 and gpu:  # for copy engines, the transport within one host
        always[SYMMETRIC] = symmetric_memory(*ring_shape, several_blocks)

    saved = saved_by_autograd(config, sizes, gpu) if plan.keeps_everything else 0.0
    kept, on_host = kept_by_layers(plan, model.layers, sizes, saved)
    base = list(always)
    rotation = "rotary angles, tokens"
    result.between_steps = [name for name in base if name != rotation]
    always = result.terms = dict(always, **{"kept by layers": kept}, gradients=gradients)
    micro_batches = config.data.batch // (config.data.micro_batch * data)
    if engine.zero > 1 or micro_batches > 1 or in_place:
        result.between_steps += ["gradients"] * (engine.zero > 1 or in_place)
        base.append("gradients")  # exist from the beginning, or since the previous micro-batch

    ring_buffers = 0.0
    if ring > 1:
        across_hosts = ring_backward_buffers(*ring_shape) - always.get(SYMMETRIC, 0)
        ring_buffers = max(across_hosts, ring_backward_buffers(*ring_shape, gpu, several_blocks))
    result.terms["a layer's forward"] = forward_working_set(config, plan, sizes, ring, ulysses > 1, gpu)
    result.terms["a layer's backward"] = working_set(config, plan, sizes, counts, ring_buffers, ring, ulysses > 1, gpu)
    last_out = sizes.outs if plan.outs_on_host == plan.outs else 0.0
    last_input = sizes.inputs if plan.inputs_on_host == len(plan.segments(model.layers)) else 0.0
    result.terms["the last write to the host"] = last_out if plan.outs else last_input
    more, first = segment_tensors(plan, model.layers)
    result.terms["a segment's tensors"] = max((x * sizes.inputs + out * sizes.outs for x, out in more), default=0.0)
    result.terms["the first segment's tensors"] = first[0] * sizes.inputs + first[1] * sizes.outs
    others = plan.segment - 1 if plan.segment else 1  # layers whose gradients wait for the segment's end
    result.terms["weight gradients of a segment"] = b * layer * others if engine.zero else 0
    logits = min(CUDA_CHUNK if gpu else CPU_CHUNK, n * model.vocabulary)  # of a chunk of rows
    chunk = logits * (4 + (2 if bf16 else 0)) + 3 * b * model.dim * logits / model.vocabulary * gpu
    table = model.vocabulary * model.dim
    result.terms["loss"] = max(chunk, table * b) + (2 + _saved_by_norm(config, gpu)) * sizes.inputs + 18 * n + table * 4
    result.terms["head's gradient"] = table * (b if engine.zero else 4)
    result.terms["optimizer's step"] = (
        0 if engine.zero == 0 or in_place else 4 * P / shards + (0 if engine.zero == 3 else b * P / shards)
    )
    # Autograd holds a tied head's gradient until the embedding's exists, at the end of the backward. If gradients are freed
    # after each step, the term "gradients" includes it then.
    tied = ["head's gradient"] * model.tied
    layers = ["a layer's backward", "weight gradients of a segment"]
    for moment, names in {
        FORWARD: ["kept by layers", "a layer's forward"],
        LOSS: ["kept by layers", "loss", "the last write to the host"],
        BACKWARD_START: [
            "kept by layers",
            "a segment's tensors",
            *layers,
            *(tied if "gradients" in base else ["head's gradient"]),
        ],
        BACKWARD_END: ["gradients", "the first segment's tensors", *layers, *(tied if "gradients" in base else [])],
        OPTIMIZER: ["gradients", "optimizer's step"],
    }.items():
        result.moments[moment] = list(dict.fromkeys([*base, *names]))
    if gpu:  # a CPU rank has one memory, which is counted above
        result.offloaded = _offloaded(config, on_host, P / shards, b, micro_batches > 1)
    return result


def _offloaded(config: Config, kept: float, share: float, b: int, accumulates: bool) -> dict[str, float]:
    """Return a rank's bytes in host memory; `kept` are bytes kept by layers, `share` is the rank's number of weights.

    DeepSpeed's offloaded optimizer: ZeRO 1 and 2 keep a copy of the weights that go back to the GPU, and sums of earlier
    micro-batches in the weights' dtype; ZeRO 3 has a second gradient buffer.
    """
    engine, sizes = config.engine, dict[str, float]()
    if kept:
        sizes["kept by layers"] = kept
    if engine.offload_parameters:
        sizes["weights"] = pinned_size(b * share)
    if engine.offload_optimizer and engine.zero == 3:
        sizes["optimizer"], sizes["gradients"] = 12 * share, 2 * pinned_size(4 * share)
    elif engine.offload_optimizer:
        sizes["optimizer"] = 8 * share + pinned_size(4 * share) + pinned_size(b * share)
        sizes["gradients"] = pinned_size(4 * share) + b * share * accumulates
    return sizes


def saved_by_autograd(config: Config, sizes: TensorSizes, gpu: bool) -> float:
    """Return the bytes that autograd saves of a layer under the plan `none`."""
    # In MLP widths: tensors that autograd saves (the compiler recomputes silu(gate)).
    widths = (3 if compiles(config, gpu, streamed=False) else 4) if config.model.activation == "swiglu" else 2
    b, n, dim = sizes.b, sizes.n, config.model.dim
    attention = b * n * (2 * dim + sizes.heads + 2 * sizes.kv) + sizes.outs
    return sizes.inputs + attention + b * n * (dim + widths * config.model.mlp_dim)


def kept_by_layers(plan: MemoryPlan, layers: int, sizes: TensorSizes, saved: float) -> tuple[float, float]:
    """Return the bytes that layers keep between forward and backward, on the device and in host memory."""
    if plan.keeps_everything:
        return layers * saved, 0.0
    num_inputs = len(plan.segments(layers))
    device = sizes.inputs * (num_inputs - plan.inputs_on_host) + sizes.outs * (plan.outs - plan.outs_on_host)
    return device, sizes.inputs * plan.inputs_on_host + sizes.outs * plan.outs_on_host


@functools.cache
def segment_tensors(plan: MemoryPlan, layers: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Count the inputs and (out, lse) on the device while a segment runs its backward.

    At its start those of all its layers are on the device: kept, fetched or made again. At its end, besides those of its first
    layer, the tensors of the next segment are fetched from the host.

    Returns:
        (inputs, outs) at such moments, less the tensors that are on the device after the forward; the largest alone.
        (inputs, outs) of the first segment at its start.
    """
    if plan.keeps_everything:
        return [], (0, 0)
    segments = plan.segments(layers)
    kept = [
        (number >= plan.inputs_on_host, sum(plan.keeps_out(i, layers) and not plan.out_on_host(i, layers) for i in segment))
        for number, segment in enumerate(segments)
    ]
    remaining = [0, 0]
    moments = []
    for number in reversed(range(len(segments))):
        size, (own_x, own_outs) = len(segments[number]), kept[number]
        remaining[0] -= own_x
        remaining[1] -= own_outs
        moments.append((remaining[0] + size, remaining[1] + size))
        if number and not plan.late:
            fetched = sum(plan.out_on_host(i, layers) for i in segments[number - 1])
            moments.append((remaining[0] + 1 + (not kept[number - 1][0]), remaining[1] + 1 + fetched))
    largest = [m for m in set(moments) if not any(o != m and o[0] >= m[0] and o[1] >= m[1] for o in moments)]
    return largest, (len(segments[0]), len(segments[0]))


def chunk_rows(plan: MemoryPlan, sizes: TensorSizes) -> int:
    """Return the rows of a chunk, of all sequences."""
    return sizes.batch * plan.chunk_rows(sizes.n // sizes.batch)


def forward_working_set(config: Config, plan: MemoryPlan, sizes: TensorSizes, ring: int, exchanges: bool, gpu: bool) -> float:
    """Return the bytes that the forward of one layer needs in addition to the tensors that layers keep."""
    model, b, n = config.model, sizes.b, sizes.n
    if plan.keeps_everything:
        return 0.0  # less than its backward
    rows, h, k = chunk_rows(plan, sizes), *_group(config, plan, sizes)
    x_and_out = sizes.inputs * (plan.segment > 1 or plan.inputs_on_host == len(plan.segments(model.layers)))
    x_and_out += sizes.outs * (plan.outs_on_host == plan.outs)  # none is kept, or all are on the host
    x_and_out += sizes.outs * (plan.segment > 1 and bool(plan.outs_on_host))  # of the layer before, being written to the host
    carry = 4 * n * h if ring > 1 else 0
    attention = b * n * (h + 2 * k) * (2 if exchanges else 1) + carry + b * rows * (model.dim + h + 2 * k) * (rows < n)
    finish = sizes.inputs + b * rows * (mlp_widths(config, gpu)[0] * model.mlp_dim + 2 * model.dim)
    return x_and_out + max(attention, finish)


def mlp_widths(config: Config, gpu: bool) -> tuple[int, int]:
    """Return the tensors of the MLP's width at the peak of its forward without gradients, and of its backward.

    Compiled functions write into buffers that are free. tests/trainer/memory/test_gpu.py measures both.
    """
    forward, backward = (2, 4) if compiles(config, gpu, streamed=True) else (4, 6)
    return (forward, backward) if config.model.activation == "swiglu" else (forward // 2, backward // 2)


def _saved_by_norm(config: Config, gpu: bool) -> int:
    """Tensors of the input's size that autograd saves for a norm; torch fuses RMSNorm on GPUs only."""
    return 1 if gpu or config.model.norm == "layernorm" else 2


def _group(config: Config, plan: MemoryPlan, sizes: TensorSizes) -> tuple[float, float]:
    """Elements of the query heads and KV heads of a group, per token."""
    share = plan.heads / config.model.kv_heads if plan.heads else 1.0
    return sizes.heads * share, sizes.kv * share


def working_set(
    config: Config,
    plan: MemoryPlan,
    sizes: TensorSizes,
    counts: Parameters,
    ring_buffers: float,
    ring: int,
    exchanges: bool,
    gpu: bool,
) -> float:
    """Return the bytes that the backward of one layer needs in addition to x and (out, lse).

    R rows of a chunk, H and K elements of all query and KV heads per token, h and k those of a group:

        finish      dy, delta; of a chunk: the norm's input and output, MLP tensors and their gradients, a matrix's gradient
        attention   dy, delta, dk, dv; of a group: q, k, v, dq in fp32 and in the inputs' dtype
        project     dy, dk, dv; of a chunk: the norm's output, q, k, v and their gradients
    """
    model, b, n = config.model, sizes.b, sizes.n
    swiglu = model.activation == "swiglu"
    if plan.keeps_everything:
        saved_widths, peak_widths = (3 if compiles(config, gpu, streamed=False) else 4, 6) if swiglu else (2, 3)
        peak = b * n * ((peak_widths - saved_widths) * model.mlp_dim + model.dim)
        attention = 4 * n * (sizes.heads + 2 * sizes.kv) + b * n * (2 * sizes.heads + 2 * sizes.kv + 2 * model.dim)
        return max(peak, attention + ring_buffers + exchanges * b * n * (2 * sizes.heads + 2 * sizes.kv))
    rows, h, k = chunk_rows(plan, sizes), *_group(config, plan, sizes)
    whole = rows == n and h == sizes.heads  # project's graph lasts until its backward
    mlp = counts.mlp / model.layers
    finish_weights = mlp + model.dim * sizes.heads  # and o's
    project_weights = (counts.attention + counts.mlp) / model.layers - finish_weights
    chunks = -(-n // rows)
    sums = 4 if chunks > 2 else b * (chunks > 1)  # bytes of a weight's sum: the first chunk's gradients are not summed
    after_finish = finish_weights * (4 if chunks > 1 else b)
    delta = 4 * n * model.heads
    dims = 2 + _saved_by_norm(config, gpu)  # output and y, next to what the MLP's norm saves
    finish: float = delta + b * rows * (mlp_widths(config, gpu)[1] * model.mlp_dim + dims * model.dim)
    finish += sums * finish_weights + b * mlp / (3 if swiglu else 2)
    kv_gradients = b * n * 2 * sizes.kv
    fp32_dq = 4 * n * h if gpu or (ring > 1 and b < 4) else 0
    attention_peak: float = delta + kv_gradients + b * n * (h + 2 * k) + b * n * h + fp32_dq + b * n * model.dim * whole
    if ring > 1:
        attention_peak += ring_buffers + b * n * 2 * k
    attention_peak += exchanges * b * n * (2 * h + 4 * k) + after_finish
    norms = 2 if model.norm == "layernorm" else 3
    project: float = kv_gradients + b * rows * (norms * model.dim + 2 * (sizes.heads + 2 * sizes.kv))
    project += after_finish + (sums + b) * project_weights
    return sizes.inputs + max(finish, attention_peak, project)


def pinned_size(nbytes: float) -> float:
    """Return the bytes that torch allocates for pinned memory: the next power of two (CachingHostAllocator.h)."""
    return 2 ** math.ceil(math.log2(nbytes))
