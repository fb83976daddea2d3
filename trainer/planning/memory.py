"""How much memory a step needs on a rank, by term, without making it. Imports no torch.

A step has moments, and what is there at each differs: layers' checkpoints go as gradients come, the logits of a chunk are gone
before the first layer goes backward. The peak is the largest moment. P parameters, N ranks, n tokens a rank, b bytes a number:

    weights      b·P; ZeRO 3: b·P/N and what is gathered at a time; ZeRO 0 in bf16: fp32, and bf16 copies while they are used
    optimizer    fp32 weights and two moments: 12·P/N (ZeRO 0: two moments, 8·P); muon keeps one moment of matrices
    gradients    fp32: 4·P for ZeRO 0 and 1, 4·P/N for 2 and 3, and buckets on their way. ZeRO 0, and 1 in fp32, begin anew each
                 step; 1 in bf16 keeps its 4·P for ever and reduces them where they are. A tied head's waits for the embedding's
    checkpoints  layers · b·n·dim of inputs; `attention` adds b·n·heads·head_dim + 4·n·heads of (out, lse)

This is torch's allocator. The driver, NCCL and fragmentation take more: RESERVE of the memory is left to them. What is
offloaded is counted by itself, in the memory of the host, which its ranks share.
"""

import math
import os
from dataclasses import dataclass, field, replace

from ringspan.trainer.config.schema import Config
from ringspan.trainer.config.validate import compiles, mesh_of, multiplies_bf16
from ringspan.trainer.planning.flops import head_dim, parameters

GIB = 2**30
RESERVE = 0.08
LIVE = 10**9  # DeepSpeed's stage3_max_live_parameters: gathered weights that it keeps at most
CUDA_CHUNK, CPU_CHUNK = 2**27, 2**22  # kernels.loss
PART_BYTES, SHORT = 2**28, 2**15  # parallel.transport


@dataclass
class Footprint:
    """Bytes on one rank by term, and which terms are there at a moment."""

    terms: dict[str, float] = field(default_factory=dict)
    moments: dict[str, list[str]] = field(default_factory=dict)
    offloaded: dict[str, float] = field(default_factory=dict)  # to the host's memory, for the whole run

    def at(self, moment: str) -> float:
        return sum(self.terms[name] for name in self.moments[moment])

    @property
    def highest(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=self.at)

    @property
    def peak(self) -> float:
        return self.at(self.highest)

    @property
    def on_host(self) -> float:
        return sum(self.offloaded.values())


def footprint(config: Config, world: int, gpu: bool = True) -> Footprint:
    """Of a config whose model is resolved: its vocabulary and max_positions are known."""
    model, engine = config.model, config.engine
    data, ring, ulysses = mesh_of(config, world)
    width, counts = head_dim(model), parameters(model)
    bf16 = multiplies_bf16(config, gpu)
    b = 2 if bf16 else 4
    n = config.data.micro_batch * -(-config.data.length // (ring * ulysses))
    P, shards = counts.total, world if engine.zero else 1
    layer = (counts.attention + counts.mlp) / model.layers

    found = Footprint()
    always = found.terms  # whatever is there from here on is there at every moment
    if engine.zero == 0:
        always["weights"] = 4 * P + (2 * P if bf16 else 0)
    elif engine.zero < 3:
        always["weights"] = b * P
    else:
        gathered = min(P, LIVE, max(3 * layer, model.vocabulary * model.dim)) + engine.prefetch_mb * 2**20 / b
        always["weights"] = (0 if engine.offload_parameters else b * P / shards) + b * min(gathered, P)
    moments = 8 if config.optim.kind == "adamw" else 8 - 4 * (counts.attention + counts.mlp) / P
    kept = moments * P / shards + (4 * P / shards if engine.zero else 0)
    always["optimizer"] = 0 if engine.offload_optimizer else kept
    gradients = 4 * P / (shards if engine.zero > 1 else 1)
    if engine.offload_optimizer and engine.zero > 1:
        gradients = 0
    in_place = engine.zero == 1 and bf16 and not engine.offload_optimizer  # DeepSpeed's BF16_Optimizer
    if engine.zero and not in_place:
        always["gradient buckets"] = engine.bucket_mb * 2**20 * (2 if engine.zero > 1 else 1)

    heads, kv = model.heads * width, model.kv_heads * width
    inputs, attention = b * n * model.dim, b * n * heads + 4 * n * model.heads
    # In MLP widths: what autograd saves (the compiler makes silu(gate) again), and the most that its backward has at a time:
    # swiglu's gate, up, their gradients, and two that came in and went out; gelu's input, its gradient, and its output's.
    saved_widths, most_widths = (3 if compiles(config, gpu) else 4, 6) if model.activation == "swiglu" else (2, 3)
    saved_mlp = b * n * (model.dim + saved_widths * model.mlp_dim)
    saved_attention = b * n * (2 * model.dim + heads + 2 * kv) + attention
    if engine.activations == "none":
        checkpoints = model.layers * (inputs + saved_attention + saved_mlp)
    else:
        checkpoints = inputs * (2 if engine.offload_activations and gpu else model.layers)
        checkpoints += model.layers * attention if engine.activations == "attention" else 0
    always["rotary angles, tokens"] = n * (4 * width + 8 * 4)
    kv_heads = math.lcm(model.kv_heads, ulysses) // ulysses  # of the ring's longer rows
    doubling = config.parallel.layout != "striped"  # the layouts whose steps may take several blocks
    of_ring = config.data.micro_batch, n * ulysses, kv_heads, 2 * width, ring, b
    if ring > 1 and gpu:  # by copy engines, as on one host
        always["K, V and gradients shown to other ranks"] = shown(*of_ring, doubling)

    base = list(always)
    always = found.terms = dict(always, checkpoints=checkpoints, gradients=gradients)
    micro_batches = config.data.batch // (config.data.micro_batch * data)
    if engine.zero > 1 or micro_batches > 1 or in_place:
        base.append("gradients")  # there from the start, or since the micro-batch before

    # What runs again, less the (out, lse) that are among the checkpoints.
    again = 0 if engine.activations == "none" else 1
    recomputed = saved_attention - (attention if engine.activations == "attention" else 0)
    backward_mlp = again * (recomputed + saved_mlp) + b * n * ((most_widths - saved_widths) * model.mlp_dim + model.dim)
    backward_attention = again * recomputed + 4 * n * (heads + 2 * kv) + b * n * (2 * heads + 2 * kv + 2 * model.dim)
    if ring > 1:
        sent = on_their_way(*of_ring) - always.get("K, V and gradients shown to other ranks", 0)  # over several hosts
        backward_attention += max(sent, on_their_way(*of_ring, gpu, doubling))
    if ulysses > 1:
        backward_attention += b * n * (2 * heads + 2 * kv)
    weight_gradients = b * layer if engine.zero else 0
    found.terms["a layer's backward"] = max(backward_mlp, backward_attention) + weight_gradients
    chunk = min(CUDA_CHUNK if gpu else CPU_CHUNK, n * model.vocabulary)
    table = model.vocabulary * model.dim
    found.terms["loss"] = chunk * (4 + (2 if bf16 else 0)) + 2 * inputs + table * (4 + b)
    found.terms["head's gradient"] = table * (b if engine.zero else 4)
    found.terms["optimizer's step"] = (
        0 if engine.zero == 0 or in_place else 4 * P / shards + (0 if engine.zero == 3 else b * P / shards)
    )
    # Autograd holds a tied head's until the embedding's comes, at the end; among gradients that begin anew it has its place.
    waits = ["head's gradient"] * model.tied
    for moment, there in {
        "the loss": ["checkpoints", "loss"],
        "the first layer that goes backward": [
            "checkpoints",
            "a layer's backward",
            *(waits if "gradients" in base else ["head's gradient"]),
        ],
        "the last layer that goes backward": ["gradients", "a layer's backward", *(waits if "gradients" in base else [])],
        "the optimizer's step": ["gradients", "optimizer's step"],
    }.items():
        found.moments[moment] = list(dict.fromkeys([*base, *there]))
    if gpu:  # a CPU rank has one memory, which is counted above
        found.offloaded = offloaded(config, inputs, P / shards, b, micro_batches > 1)
    return found


def offloaded(config: Config, inputs: float, share: float, b: int, accumulates: bool) -> dict[str, float]:
    """What a rank has in its host's memory, with inputs of so many bytes a layer and its share of the weights.

    The optimizer's part is DeepSpeed's: ZeRO 1 and 2 keep a copy of the weights that go back to the GPU, and sums of earlier
    micro-batches in the weights' type; ZeRO 3 has a second buffer of gradients.
    """
    engine, found = config.engine, dict[str, float]()
    if engine.offload_activations:
        found["checkpoints"] = config.model.layers * pinned(inputs)
    if engine.offload_parameters:
        found["weights"] = pinned(b * share)
    if engine.offload_optimizer and engine.zero == 3:
        found["optimizer"], found["gradients"] = 12 * share, 2 * pinned(4 * share)
    elif engine.offload_optimizer:
        found["optimizer"] = 8 * share + pinned(4 * share) + pinned(b * share)
        found["gradients"] = pinned(4 * share) + b * share * accumulates
    return found


def pinned(nbytes: float) -> float:
    """What torch takes for so many bytes that a GPU can reach by itself: a power of two (CachingHostAllocator.h)."""
    return 2 ** math.ceil(math.log2(nbytes))


def fits(peak: float, memory: float) -> bool:
    return peak <= (1 - RESERVE) * memory


def memory_of_machine() -> float:
    """Bytes of this machine's own memory, which its ranks share for what is not on GPUs."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_of_a_rank() -> float:
    """Its part of that, among those that torchrun has started on this machine."""
    return memory_of_machine() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def too_much(config: Config, world: int, memory: float, gpu: bool = True) -> str:
    """A warning if a rank is planned to need more memory than it has; otherwise nothing."""
    found, host = footprint(config, world, gpu), host_of_a_rank()
    needs = []
    if not fits(found.peak, memory):
        needs.append(f"need {found.peak / GIB:.1f} GiB (at {found.highest}) and has {memory / GIB:.1f}")
    if not fits(found.on_host, host):
        needs.append(f"offload {found.on_host / GIB:.1f} GiB and has {host / GIB:.1f} of this machine's memory")
    if not needs:
        return ""
    return (
        f"memory: a rank is planned to {', and to '.join(needs)}, so it may run out. "
        "ringspan check with the same options says what would fit"
    )


def on_their_way(
    batch: int, rows: int, heads: int, width: int, ring: int, b: int, copied: bool = False, doubling: bool = False
) -> float:
    """What a ring's backward has beside its own K/V and gradients, if others' blocks are as large: `width` is K's and V's.

    `rows` counts those of all sequences of the batch. Messages go straight out of one sequence's K/V; several are copied first.
    Copy engines bring K/V to, and take gradients out of, memory that is always there, and `shown`.
    """
    numbers = rows * heads * width
    steps = _steps(ring, numbers, heads, rows // batch, copied and doubling)
    blocks = (0 if copied else min(2, len(steps))) + (batch > 1)  # in use and coming in, and what others take
    parts = _parts(numbers, heads, rows // batch)
    # dK/dV in fp32: two parts that come in, by messages also three that go out
    if not copied:
        sums = min(5, 2 * parts * len(steps)) / parts
    elif parts > 1:
        sums = 2 * max(steps) / parts
    else:
        sums = sum(sorted(steps)[-2:])
    # half of the own block, apart from what others add to it; with messages only at the end
    half = (heads - heads // 2) / heads if heads > 1 else 1 / 2
    apart = half if copied else 0
    return blocks * b * numbers + (sums + apart) * 4 * numbers


def shown(batch: int, rows: int, heads: int, width: int, ring: int, b: int, doubling: bool = False) -> float:
    """Two steps' K/V and two parts of dK/dV, in the memory that the GPUs of a host show each other."""
    numbers = rows * heads * width
    steps = _steps(ring, numbers, heads, rows // batch, doubling)
    parts = _parts(numbers, heads, rows // batch)
    return max(steps) * numbers * (min(2, len(steps)) * b + min(2, parts * len(steps)) * 4 / parts)


def _steps(ring: int, numbers: int, heads: int, rows: int, doubling: bool) -> list[int]:
    """How many blocks each step takes (parallel.transport.blocks_per_step)."""
    most = max(1, PART_BYTES * _parts(numbers, heads, rows) // (4 * numbers)) if doubling else 1
    steps, left = list[int](), ring - 1
    while left:
        steps.append(min(2 ** len(steps), left, most))
        left -= steps[-1]
    return steps


def _parts(numbers: int, heads: int, rows: int) -> int:
    """A block's dK/dV go in as many parts, and a larger step's in no more. `rows` are one sequence's."""
    return math.gcd(heads, 4) if 4 * numbers > PART_BYTES * (2 if rows <= SHORT else 1) else 1


def longest(config: Config, world: int, memory: float, gpu: bool = True, host: float = math.inf) -> int:
    """The longest sequence, in multiples of 1024 tokens, whose step fits; 0 if none does. `host`: what a rank may offload."""

    def holds(length: int) -> bool:
        model = config.model
        rows = length if model.positions == "learned" else 0
        at = replace(config, data=replace(config.data, length=length), model=replace(model, max_positions=rows))
        found = footprint(at, world, gpu)
        return fits(found.peak, memory) and fits(found.on_host, host)

    if not holds(1024):
        return 0
    low, high = 1, 2
    while high < 2**22 and holds(high * 1024):
        low, high = high, high * 2
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle * 1024) else (low, middle)
    return low * 1024
