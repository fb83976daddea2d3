"""Memory footprint of a training step on one rank, by term, computed without allocating it. Imports no torch.

The peak is the largest of a step's moments (the loss, the start and end of the backward, the optimizer's step), because some
terms exist only at some moments. P parameters, N ranks, n tokens per rank, b bytes per element:

    weights      b·P. ZeRO 3: b·P/N plus gathered weights. ZeRO 0 in bf16: fp32 weights plus bf16 copies during their use
    optimizer    fp32 weights and two moments: 12·P/N. ZeRO 0: two moments, 8·P. Muon keeps one moment of matrices
    gradients    fp32: 4·P for ZeRO 0 and 1, 4·P/N for 2 and 3, plus buckets. ZeRO 0, and 1 in fp32, free them after each step;
                 1 in bf16 keeps its 4·P and reduces in place. A tied head's is held until the embedding's exists
    checkpoints  layers · b·n·dim of inputs; `attention` adds b·n·heads·head_dim + 4·n·heads of (out, lse)

This is the memory of torch's allocator. RESERVE of the device's memory is left to the driver, NCCL and fragmentation.
Offloaded terms are counted separately, in the host's memory, which its ranks share.
"""

import math
import os
from dataclasses import dataclass, field, replace

from ringspan.trainer.config.schema import Config
from ringspan.trainer.config.validate import compiles, mesh_of, uses_bf16
from ringspan.trainer.planning.flops import head_dim, parameters

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


def footprint(config: Config, world: int, gpu: bool = True) -> Footprint:
    """Compute a rank's footprint.

    Args:
        config: a valid config whose model is resolved: its vocabulary and max_positions are known.
        world: number of ranks.
        gpu: whether ranks run on GPUs.
    """
    model, engine = config.model, config.engine
    data, ring, ulysses = mesh_of(config, world)
    width, counts = head_dim(model), parameters(model)
    bf16 = uses_bf16(config, gpu)
    b = 2 if bf16 else 4
    n = config.data.micro_batch * -(-config.data.length // (ring * ulysses))
    P, shards = counts.total, world if engine.zero else 1
    layer = (counts.attention + counts.mlp) / model.layers

    result = Footprint()
    always = result.terms  # terms that exist at every moment
    if engine.zero == 0:
        always["weights"] = 4 * P + (2 * P if bf16 else 0)
    elif engine.zero < 3:
        always["weights"] = b * P
    else:
        gathered = min(P, MAX_LIVE_PARAMETERS, max(3 * layer, model.vocabulary * model.dim)) + engine.prefetch_mb * 2**20 / b
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

    heads, kv = model.heads * width, model.kv_heads * width
    inputs, attention = b * n * model.dim, b * n * heads + 4 * n * model.heads
    # In MLP widths: tensors that autograd saves (the compiler recomputes silu(gate)), and the most that exist during the
    # backward. swiglu: gate, up, their gradients, one incoming and one outgoing gradient; gelu: its input and the gradients
    # of its input and output.
    saved_widths, peak_widths = (3 if compiles(config, gpu) else 4, 6) if model.activation == "swiglu" else (2, 3)
    saved_mlp = b * n * (model.dim + saved_widths * model.mlp_dim)
    saved_attention = b * n * (2 * model.dim + heads + 2 * kv) + attention
    if engine.activations == "none":
        checkpoints = model.layers * (inputs + saved_attention + saved_mlp)
    else:
        checkpoints = inputs * (2 if engine.offload_activations and gpu else model.layers)
        checkpoints += model.layers * attention if engine.activations == "attention" else 0
    always["rotary angles, tokens"] = n * (4 * width + 8 * 4)
    kv_heads = math.lcm(model.kv_heads, ulysses) // ulysses  # of a ring's rank, whose rows are ulysses times as many
    doubling = config.parallel.layout != "striped"  # layouts whose steps may take several blocks
    ring_shape = config.data.micro_batch, n * ulysses, kv_heads, 2 * width, ring, b
    if ring > 1 and gpu:  # for copy engines, the transport within one host
        always[SYMMETRIC] = symmetric_memory(*ring_shape, doubling)

    base = list(always)
    always = result.terms = dict(always, checkpoints=checkpoints, gradients=gradients)
    micro_batches = config.data.batch // (config.data.micro_batch * data)
    if engine.zero > 1 or micro_batches > 1 or in_place:
        base.append("gradients")  # exist from the beginning, or since the previous micro-batch

    # Recomputed tensors, without the (out, lse) that are among the checkpoints.
    recomputes = 0 if engine.activations == "none" else 1
    recomputed = saved_attention - (attention if engine.activations == "attention" else 0)
    backward_mlp = recomputes * (recomputed + saved_mlp) + b * n * ((peak_widths - saved_widths) * model.mlp_dim + model.dim)
    backward_attention: float = recomputes * recomputed
    backward_attention += 4 * n * (heads + 2 * kv) + b * n * (2 * heads + 2 * kv + 2 * model.dim)
    if ring > 1:
        across_hosts = ring_backward_buffers(*ring_shape) - always.get(SYMMETRIC, 0)
        backward_attention += max(across_hosts, ring_backward_buffers(*ring_shape, gpu, doubling))
    if ulysses > 1:
        backward_attention += b * n * (2 * heads + 2 * kv)
    weight_gradients = b * layer if engine.zero else 0
    result.terms["a layer's backward"] = max(backward_mlp, backward_attention) + weight_gradients
    chunk = min(CUDA_CHUNK if gpu else CPU_CHUNK, n * model.vocabulary)
    table = model.vocabulary * model.dim
    result.terms["loss"] = chunk * (4 + (2 if bf16 else 0)) + 2 * inputs + table * (4 + b)
    result.terms["head's gradient"] = table * (b if engine.zero else 4)
    result.terms["optimizer's step"] = (
        0 if engine.zero == 0 or in_place else 4 * P / shards + (0 if engine.zero == 3 else b * P / shards)
    )
    # Autograd holds a tied head's gradient until the embedding's exists, at the end of the backward. If gradients are freed
    # after each step, the term "gradients" includes it then.
    tied = ["head's gradient"] * model.tied
    for moment, names in {
        "the loss": ["checkpoints", "loss"],
        BACKWARD_START: ["checkpoints", "a layer's backward", *(tied if "gradients" in base else ["head's gradient"])],
        BACKWARD_END: ["gradients", "a layer's backward", *(tied if "gradients" in base else [])],
        "the optimizer's step": ["gradients", "optimizer's step"],
    }.items():
        result.moments[moment] = list(dict.fromkeys([*base, *names]))
    if gpu:  # a CPU rank has one memory, which is counted above
        result.offloaded = _offloaded(config, inputs, P / shards, b, micro_batches > 1)
    return result


def _offloaded(config: Config, inputs: float, share: float, b: int, accumulates: bool) -> dict[str, float]:
    """Return a rank's bytes in host memory; `inputs` are bytes per layer, `share` is the rank's number of weights.

    DeepSpeed's offloaded optimizer: ZeRO 1 and 2 keep a copy of the weights that go back to the GPU, and sums of earlier
    micro-batches in the weights' dtype; ZeRO 3 has a second gradient buffer.
    """
    engine, sizes = config.engine, dict[str, float]()
    if engine.offload_activations:
        sizes["checkpoints"] = config.model.layers * pinned_size(inputs)
    if engine.offload_parameters:
        sizes["weights"] = pinned_size(b * share)
    if engine.offload_optimizer and engine.zero == 3:
        sizes["optimizer"], sizes["gradients"] = 12 * share, 2 * pinned_size(4 * share)
    elif engine.offload_optimizer:
        sizes["optimizer"] = 8 * share + pinned_size(4 * share) + pinned_size(b * share)
        sizes["gradients"] = pinned_size(4 * share) + b * share * accumulates
    return sizes


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


def memory_warning(config: Config, world: int, memory: float, gpu: bool = True) -> str:
    """Return a warning if a rank's planned memory exceeds its device's or host's memory, else ""."""
    need, host = footprint(config, world, gpu), host_memory_per_rank()
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
