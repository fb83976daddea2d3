"""Memory footprint of a training step on one rank, by term, computed without allocating it. Imports no torch.

The peak is the largest of a step's moments (the loss, the start and end of the backward, the optimizer's step), because some
terms exist only at some moments. P parameters, N ranks, n tokens per rank, b bytes per element:

    weights      b·P. ZeRO 3: b·P/N plus gathered weights. ZeRO 0 in bf16: fp32 weights plus bf16 copies during their use
    optimizer    fp32 weights and two moments: 12·P/N. ZeRO 0: two moments, 8·P. Muon keeps one moment of matrices
    gradients    fp32: 4·P for ZeRO 0 and 1, 4·P/N for 2 and 3, plus buckets. ZeRO 0, and 1 in fp32, free them after each step;
                 1 in bf16 keeps its 4·P and reduces in place. A tied head's is held until the embedding's exists
    kept         by the memory plan (trainer/memory/plan.py): inputs of b·n·dim, (out, lse) of b·n·heads·head_dim + 4·n·heads
    working set  of the layers that run their backward: see `working_set`

This is the memory of torch's allocator. RESERVE of the device's memory is left to the driver, NCCL and fragmentation.
Offloaded terms are counted separately, in the host's memory, which its ranks share.
"""

import math
import os
from dataclasses import dataclass, field, replace

from ringspan.trainer.config.schema import Config
from ringspan.trainer.config.validate import compiles, mesh_of, uses_bf16
from ringspan.trainer.memory.plan import NONE, MemoryPlan
from ringspan.trainer.planning.flops import Parameters, head_dim, parameters

GIB = 2**30
RESERVE = 0.08
MAX_LIVE_PARAMETERS = 10**9  # DeepSpeed's stage3_max_live_parameters: gathered weights that it keeps
# Copies of constants in ringspan/kernels/loss.py (logits per chunk) and ringspan/parallel/transport/select.py (bytes above
# which a block's dK/dV are sent in parts; rows of a short shard): importing those modules would import torch.
# tests/trainer/planning/test_memory.py compares them.
CUDA_CHUNK, CPU_CHUNK = 2**27, 2**22
PART_BYTES, SHORT_SHARD = 2**28, 2**15
SYMMETRIC = "ring's symmetric memory"  # K/V and gradients, with copy engines
BACKWARD_START, BACKWARD_END = "the start of the backward", "the end of the backward"


@dataclass
class Footprint:
    """Bytes on one rank by term, and the terms that exist at each moment."""

    terms: dict[str, float] = field(default_factory=dict)
    moments: dict[str, list[str]] = field(default_factory=dict)
    offloaded: dict[str, float] = field(default_factory=dict)  # terms in the host's memory, during the whole run

    def at(self, moment: str) -> float:
        return sum(self.terms[name] for name in self.moments[moment])

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=self.at)

    @property
    def peak(self) -> float:
        return self.at(self.peak_moment)

    @property
    def on_host(self) -> float:
        return sum(self.offloaded.values())


@dataclass
class Shape:
    """Sizes of a rank's tensors, in bytes unless a comment says otherwise."""

    b: int  # bytes per element of activations
    n: int  # tokens of a micro-batch on this rank
    batch: int  # sequences of a micro-batch
    inputs: float  # a layer's input
    outs: float  # attention's out and lse
    heads: int  # query heads × head dim
    kv: int  # KV heads × head dim
    layer: float  # weights of a layer (a number)


def shape_of(config: Config, world: int, gpu: bool) -> Shape:
    model = config.model
    _, ring, ulysses = mesh_of(config, world)
    bf16, counts = uses_bf16(config, gpu), parameters(model)
    b = 2 if bf16 else 4
    n = config.data.micro_batch * -(-config.data.length // (ring * ulysses))
    heads, kv = model.heads * head_dim(model), model.kv_heads * head_dim(model)
    residual = 4 if config.engine.zero == 0 else b  # autocast keeps the residual stream in the weights' fp32
    return Shape(
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
        gathered = min(P, MAX_LIVE_PARAMETERS, max((2 + max(plan.segment, 1)) * layer, model.vocabulary * model.dim)) + engine.prefetch_mb * 2**20 / b
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

    always["rotary angles, tokens"] = n * (4 * width + 8 * 4)
    kv_heads = math.lcm(model.kv_heads, ulysses) // ulysses  # of a ring's rank, whose rows are ulysses times as many
    doubling = config.parallel.layout != "striped"  # layouts whose steps may take several blocks
    group_heads = math.lcm(plan.heads, ulysses) // ulysses if plan.heads else kv_heads
    ring_shape = config.data.micro_batch, n * ulysses, group_heads, 2 * width, ring, b
    if ring > 1 and gpu:  # for copy engines, the transport within one host
        always[SYMMETRIC] = symmetric_memory(*ring_shape, doubling)

    kept, on_host = kept_by_layers(plan, model.layers, sizes, saved_by_autograd(config, sizes, gpu))
    base = list(always)
    always = result.terms = dict(always, **{"kept by layers": kept}, gradients=gradients)
    micro_batches = config.data.batch // (config.data.micro_batch * data)
    if engine.zero > 1 or micro_batches > 1 or in_place:
        base.append("gradients")  # exist from the beginning, or since the previous micro-batch

    ring_buffers = 0.0
    if ring > 1:
        across_hosts = ring_backward_buffers(*ring_shape) - always.get(SYMMETRIC, 0)
        ring_buffers = max(across_hosts, ring_backward_buffers(*ring_shape, gpu, doubling))
    backward = working_set(config, plan, sizes, counts, ring_buffers, ulysses > 1, gpu)
    result.terms["a layer's backward"] = backward
    result.terms["a segment's inputs"] = segment_temporaries(plan, model.layers, sizes)
    weight_gradients = b * layer * max(plan.segment, 1) if engine.zero else 0
    result.terms["weight gradients of a segment"] = weight_gradients
    chunk = min(CUDA_CHUNK if gpu else CPU_CHUNK, n * model.vocabulary)
    table = model.vocabulary * model.dim
    result.terms["loss"] = chunk * (4 + (2 if bf16 else 0)) + 2 * sizes.inputs + table * (4 + b)
    result.terms["head's gradient"] = table * (b if engine.zero else 4)
    result.terms["optimizer's step"] = (
        0 if engine.zero == 0 or in_place else 4 * P / shards + (0 if engine.zero == 3 else b * P / shards)
    )
    # Autograd holds a tied head's gradient until the embedding's exists, at the end of the backward. If gradients are freed
    # after each step, the term "gradients" includes it then.
    tied = ["head's gradient"] * model.tied
    layers = ["a layer's backward", "a segment's inputs", "weight gradients of a segment"]
    for moment, names in {
        "the loss": ["kept by layers", "loss"],
        BACKWARD_START: ["kept by layers", *layers, *(tied if "gradients" in base else ["head's gradient"])],
        BACKWARD_END: ["gradients", *layers, *(tied if "gradients" in base else [])],
        "the optimizer's step": ["gradients", "optimizer's step"],
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


def saved_by_autograd(config: Config, sizes: Shape, gpu: bool) -> float:
    """Return the bytes that autograd saves of a layer under the plan `none`."""
    # In MLP widths: tensors that autograd saves (the compiler recomputes silu(gate)).
    widths = (3 if compiles(config, gpu) else 4) if config.model.activation == "swiglu" else 2
    b, n, dim = sizes.b, sizes.n, config.model.dim
    attention = b * n * (2 * dim + sizes.heads + 2 * sizes.kv) + sizes.outs
    return sizes.inputs + attention + b * n * (dim + widths * config.model.mlp_dim)


def kept_by_layers(plan: MemoryPlan, layers: int, sizes: Shape, saved: float) -> tuple[float, float]:
    """Return the bytes that layers keep between forward and backward, on the device and in host memory."""
    if plan.keeps_everything:
        return layers * saved, 0.0
    num_inputs = len(plan.segments(layers))
    device = sizes.inputs * (num_inputs - plan.inputs_on_host) + sizes.outs * (plan.outs - plan.outs_on_host)
    return device, sizes.inputs * plan.inputs_on_host + sizes.outs * plan.outs_on_host


def segment_temporaries(plan: MemoryPlan, layers: int, sizes: Shape) -> float:
    """Return the bytes of inputs and (out, lse) of one segment that are made again or fetched for its backward.

    The largest over all segments, of what a segment adds to the tensors that are kept on the device until then.
    """
    if plan.keeps_everything:
        return 0.0
    segments = plan.segments(layers)
    total = kept_by_layers(plan, layers, sizes, 0.0)[0]
    most = 0.0
    remaining = total  # on the device when a segment's backward begins
    for number, segment in reversed(list(enumerate(segments))):
        fetched_input = number < plan.inputs_on_host
        own_outs = [layer for layer in segment if plan.keeps_out(layer, layers) and not plan.out_on_host(layer, layers)]
        added = sizes.inputs * (len(segment) - 1 + fetched_input) + sizes.outs * (len(segment) - len(own_outs))
        most = max(most, remaining + added - total)
        remaining -= sizes.inputs * (not fetched_input) + sizes.outs * len(own_outs)
    return max(most, 0.0)


def working_set(
    config: Config, plan: MemoryPlan, sizes: Shape, counts: Parameters, ring_buffers: float, exchanges: bool, gpu: bool
) -> float:
    """Return the bytes that the backward of one layer needs in addition to x and (out, lse).

    R rows of a chunk, H and K elements of all query and KV heads per token, h and k those of a group:

        finish      dy, delta; of a chunk: the norm's input and output, MLP tensors and their gradients, dout
        attention   dy, delta, dk, dv; of a group: q, k, v, dq in fp32 and in the inputs' dtype
        project     dy, dk, dv; of a chunk: the norm's output, q, k, v and their gradients
    """
    model, b, n = config.model, sizes.b, sizes.n
    rows = n if not plan.rows else min(n, sizes.batch * plan.rows)
    share = plan.heads / model.kv_heads if plan.heads else 1.0
    h, k = sizes.heads * share, sizes.kv * share
    swiglu = model.activation == "swiglu"
    saved_widths, peak_widths = (3 if compiles(config, gpu) else 4, 6) if swiglu else (2, 3)
    if plan.keeps_everything:
        mlp = b * n * ((peak_widths - saved_widths) * model.mlp_dim + model.dim)
        attention = 4 * n * (sizes.heads + 2 * sizes.kv) + b * n * (2 * sizes.heads + 2 * sizes.kv + 2 * model.dim)
        return max(mlp, attention + ring_buffers + exchanges * b * n * (2 * sizes.heads + 2 * sizes.kv))
    delta = 4 * n * model.heads
    weights = counts.attention / model.layers, counts.mlp / model.layers
    sums = 4 * sum(weights) if rows < n else 0  # fp32 sums of a layer's weight gradients
    finish = b * rows * (peak_widths * model.mlp_dim + 3 * model.dim + sizes.heads) + b * weights[1]
    kv_gradients = b * n * 2 * sizes.kv
    graph = b * n * (model.dim + 2 * sizes.heads + 2 * sizes.kv) if rows == n and share == 1 else 0
    attention = kv_gradients + b * n * (h + 2 * k) + 4 * n * h + b * n * h + ring_buffers + graph
    attention += exchanges * b * n * (2 * h + 2 * k)
    if share == 1 and not ring_buffers:
        attention += 0
    project = kv_gradients + b * rows * (2 * model.dim + 2 * (sizes.heads + 2 * sizes.kv)) + b * weights[0]
    return sizes.inputs + delta + sums + max(finish, attention, project)


def pinned_size(nbytes: float) -> float:
    """Return the bytes that torch allocates for pinned memory: the next power of two (CachingHostAllocator.h)."""
    return 2 ** math.ceil(math.log2(nbytes))


def fits(peak: float, memory: float) -> bool:
    """Return whether `peak` bytes leave RESERVE of the memory free."""
    return peak <= (1 - RESERVE) * memory


def host_memory() -> float:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_memory_per_rank() -> float:
    """Return this rank's share of the machine's memory, among the ranks that torchrun started on it."""
    return host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def memory_warning(config: Config, world: int, memory: float, gpu: bool = True, plan: MemoryPlan = NONE) -> str:
    """Return a warning if a rank's planned memory exceeds its device's or host's memory, else ""."""
    need, host = footprint(config, world, gpu, plan), host_memory_per_rank()
    problems = []
    if not fits(need.peak, memory):
        problems.append(f"need {need.peak / GIB:.1f} GiB (at {need.peak_moment}) and has {memory / GIB:.1f}")
    if not fits(need.on_host, host):
        problems.append(f"offload {need.on_host / GIB:.1f} GiB and has {host / GIB:.1f} of this machine's memory")
    if not problems:
        return ""
    return (
        f"memory: a rank is planned to {', and to '.join(problems)}, so it may run out of memory. "
        "`ringspan check` with the same options lists changes that fit"
    )


def ring_backward_buffers(
    batch: int, rows: int, heads: int, width: int, ring: int, b: int, copied: bool = False, doubling: bool = False
) -> float:
    """Return the bytes that a ring's backward allocates in addition to the local K/V and gradients, for blocks of equal size.

    p2p sends directly from the K/V of one sequence; for several sequences it copies them first. Copy engines use the
    buffers of `symmetric_memory`, which are not counted here.

    Args:
        batch: sequences.
        rows: rows of all sequences of the batch on one rank.
        heads: KV heads.
        width: head_dim of K plus that of V.
        ring: ranks of the ring.
        b: bytes per element of K and V.
        copied: copy engines move the blocks, not p2p.
        doubling: steps may take several blocks.
    """
    elements = rows * heads * width
    steps = _blocks_per_step(ring, elements, heads, rows // batch, copied and doubling)
    blocks = (0 if copied else min(2, len(steps))) + (batch > 1)  # receive buffers (double buffering), and a packed copy
    parts = _num_parts(elements, heads, rows // batch)
    # dK/dV in fp32: two incoming parts; p2p has three outgoing ones, too.
    if not copied:
        sums = min(5, 2 * parts * len(steps)) / parts
    elif parts > 1:
        sums = 2 * max(steps) / parts
    else:
        sums = sum(sorted(steps)[-2:])
    # Copy engines: half of the local block, kept apart from the remote gradients. With p2p it exists only at the end.
    half = (heads - heads // 2) / heads if heads > 1 else 1 / 2
    separate = half if copied else 0
    return blocks * b * elements + (sums + separate) * 4 * elements


def symmetric_memory(batch: int, rows: int, heads: int, width: int, ring: int, b: int, doubling: bool = False) -> float:
    """Return the bytes of symmetric memory of copy engines: K/V of two steps and two parts of dK/dV.

    The arguments are those of `ring_backward_buffers`.
    """
    elements = rows * heads * width
    steps = _blocks_per_step(ring, elements, heads, rows // batch, doubling)
    parts = _num_parts(elements, heads, rows // batch)
    return max(steps) * elements * (min(2, len(steps)) * b + min(2, parts * len(steps)) * 4 / parts)


def _blocks_per_step(ring: int, elements: int, heads: int, rows: int, doubling: bool) -> list[int]:
    """The blocks of each step, as in parallel/transport/select.py; `rows` of one sequence."""
    limit = max(1, PART_BYTES * _num_parts(elements, heads, rows) // (4 * elements)) if doubling else 1
    steps, left = list[int](), ring - 1
    while left:
        steps.append(min(2 ** len(steps), left, limit))
        left -= steps[-1]
    return steps


def _num_parts(elements: int, heads: int, rows: int) -> int:
    """The parts in which a block's dK/dV are sent, an upper bound for a larger step; `rows` of one sequence."""
    return math.gcd(heads, 4) if 4 * elements > PART_BYTES * (2 if rows <= SHORT_SHARD else 1) else 1


def longest_sequence(config: Config, world: int, memory: float, gpu: bool = True, host: float = math.inf) -> int:
    """Return the longest sequence in multiples of 1024 tokens whose step fits; 0 if none does.

    Args:
        config: the config; its data.length is replaced.
        world: number of ranks.
        memory: bytes of a rank's device.
        gpu: whether ranks run on GPUs.
        host: bytes of host memory per rank.
    """

    def length_fits(length: int) -> bool:
        model = config.model
        max_positions = length if model.positions == "learned" else 0
        changed = replace(config, data=replace(config.data, length=length), model=replace(model, max_positions=max_positions))
        need = footprint(changed, world, gpu)
        return fits(need.peak, memory) and fits(need.on_host, host)

    if not length_fits(1024):
        return 0
    low, high = 1, 2
    while high < 2**22 and length_fits(high * 1024):
        low, high = high, high * 2
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if length_fits(middle * 1024) else (low, middle)
    return low * 1024
