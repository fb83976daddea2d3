"""Ten steps with Axolotl's own sequence parallelism, which imports ring_flash_attn; every rank of a pool runs them.

The one changed import is that of ring_flash_attn: `ringspan.compat.ring_flash_attn.install()` before Axolotl's modules.
"""

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ringspan.compat import ring_flash_attn
from tests.compat.hf_jobs import packed_batch
from tests.hf.models import make_model

ring_flash_attn.install()

from axolotl.utils.ctx_managers.sequence_parallel import SequenceParallelContextManager  # noqa: E402
from axolotl.utils.schemas.enums import RingAttnFunc  # noqa: E402

STEPS, RATE = 10, 0.05


def train(model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    """Losses of ten steps of SGD over logits of the whole sequence."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = dict(input_ids=batch["input_ids"].clone(), position_ids=batch["position_ids"].clone())
        logits = model(**inputs, use_cache=False).logits
        loss = F.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], ignore_index=-100)
        loss.backward()
        if dist.is_initialized() and dist.get_world_size() > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)  # each rank has the part of its shard
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def compare(name: str) -> tuple[float, float]:
    """Largest relative difference of the losses, and of the final weights, to dense attention on one rank."""
    batch = packed_batch()
    with patch.object(dist, "is_initialized", lambda: False):
        reference = make_model(name, "oracle")
        expected = train(reference, batch)
    model = make_model(name, "flash_attention_2")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    options = dict(context_parallel_size=dist.get_world_size(), gradient_accumulation_steps=1, heads_k_stride=1)
    options |= dict(ring_attn_func=RingAttnFunc.VARLEN_LLAMA3, gather_outputs=True, device_mesh=mesh)
    with SequenceParallelContextManager([model], **options), patch.object(torch.cuda, "current_device", lambda: "cpu"):
        losses = train(model, batch)
    gaps = [float((p - q).abs().max()) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
    assert losses[-1] < losses[0] - 0.1
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)), max(gaps)
