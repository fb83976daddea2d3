"""The ring inside FSDP2: its time per layer in a training step, next to the share that `ringspan bench ring` measures.

    torchrun --nproc-per-node=2 -m tests.hf.fsdp_profile                  a 1B Llama, 32k tokens per GPU, step 5
    torchrun --nproc-per-node=2 -m tests.hf.fsdp_profile --small          a tiny one, on a CPU too

Both shares are of the same kernel alone, which the benchmark times in the same job. The profile shows how much of the
transfers' time lies below compute. The program ends with an error if the shares differ by more than two points on GPUs.
"""

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

from ringspan import Mesh
from ringspan.hf import attention, context_parallel, register, save_attention
from ringspan.parallel.bench.__main__ import measure
from ringspan.parallel.bench.baselines import BenchContext, Setting
from ringspan.parallel.bench.timeline import _spans

STEPS = 5
marks: list[Any] = []  # of the measured step, in pairs: before and after a forward or a backward of a ring


def mark() -> None:
    """Record the time at which the GPU gets here; on a CPU the time."""
    if torch.cuda.is_available():
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    else:
        marks.append(time.perf_counter() * 1000)


class MarkBackward(torch.autograd.Function):
    """Returns its inputs, and marks when their gradients pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        mark()
        return grads


def marked_attention(call: Any) -> Any:
    """Return `context_attention` with marks around its forward and its backward."""

    def marked(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        q, k, v = MarkBackward.apply(q, k, v)
        if torch._C._current_graph_task_id() == -1:  # the recomputation does not run the ring
            mark()
        out = call(q, k, v, *args, **options)
        if torch._C._current_graph_task_id() == -1:
            mark()
        return MarkBackward.apply(out)[0]

    return marked


def train(small: bool, setting: Setting, layers: int, device: torch.device) -> tuple[float, float]:
    """Return ms of a ring's forward and backward in a layer of the last step, and the share of transfers below compute."""
    register()
    width = setting.heads * setting.head_dim
    config = transformers.LlamaConfig(
        vocab_size=256 if small else 32_000, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=setting.heads, num_key_value_heads=setting.kv_heads, head_dim=setting.head_dim,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringspan").float().train()
    model.gradient_checkpointing_enable(dict(use_reentrant=False, context_fn=save_attention))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ring = context_parallel(Mesh(ring=dist.get_world_size()))
    attention.context_attention = marked_attention(attention.context_attention)
    ids = torch.randint(config.vocab_size, (1, setting.tokens * dist.get_world_size()), device=device)
    dist.broadcast(ids, 0)

    def step() -> None:
        marks.clear()
        with ring:
            batch = ring.shard(dict(input_ids=ids, labels=ids))
            loss = ring.loss(model(**batch).logits, batch["shift_labels"], gradients="mean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(STEPS - 1):
        step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        step()
    assert len(marks) == 4 * layers, f"{len(marks)} marks of {layers} layers"
    pairs = zip(marks[::2], marks[1::2], strict=True)
    total = sum(start.elapsed_time(end) if device.type == "cuda" else end - start for start, end in pairs)
    return total / layers, overlap(_spans(profiler, device.type == "cuda"))


def overlap(spans: list[tuple[str, float, float]]) -> float:
    """Share of the transfers' time during which something computes."""
    compute = sorted((start, end) for kind, start, end in spans if kind == "compute")
    covered = total = 0.0
    for kind, start, end in spans:
        if kind == "transfer":
            total, position = total + end - start, start
            for first, last in compute:
                covered += max(0.0, min(end, last) - max(position, first))
                position = max(position, min(end, last))
    return covered / total if total else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model")
    small = parser.parse_args().small
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    setting = Setting(256, 4, 2, 16) if small else Setting(32 * 1024, 32, 8, 64)
    layers = 2 if small else 16
    ms, covered = train(small, setting, layers, device)
    ranks = dist.get_world_size()
    context = BenchContext(device, torch.bfloat16, ranks, Mesh(ring=ranks), Mesh(ulysses=ranks), "auto")
    name = "ring-zigzag-copy" if cuda else "ring-zigzag-p2p"
    rows = {row["name"]: row for row in measure(setting, ["alone", name], context, 5, 400 if cuda else 20)}
    slowest = torch.tensor(ms, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    rate = 3.5 * setting.global_shape(ranks).flops() / ranks / float(slowest) / 1e9
    share, bench = rate / rows["alone"]["both_tflops"], rows[name]["both_share"]
    if dist.get_rank() == 0:
        print(f"{setting.name}, {layers} layers, {ranks} ranks, bf16, FSDP2, attention saved by checkpointing")
        print(f"ring in step {STEPS}: {float(slowest):.3f} ms per layer, {100 * share:.1f} % of the kernel alone")
        print(f"{name} in the benchmark: {rows[name]['both_ms']:.3f} ms, {100 * bench:.1f} %")
        print(f"transfers below compute in the profile: {100 * covered:.1f} %")
    dist.destroy_process_group()
    if cuda and not small and share < bench - 0.02:
        raise SystemExit("the ring is more than two points slower in the training step")


if __name__ == "__main__":
    main()
