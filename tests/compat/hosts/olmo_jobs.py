"""Steps of a small OLMo-core model on every rank of a pool."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from olmo_core.nn.attention import SlidingWindowAttentionConfig
from olmo_core.nn.attention.ring import RingAttentionLoadBalancerType, RingContextParallelStyle, UlyssesContextParallelStyle
from olmo_core.nn.transformer import TransformerConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringspan.integrations.olmo_core import use_ringspan
from tests.compat.hosts.jobs import DOCUMENTS, VOCABULARY, largest_difference, set_weights, step_results, tokens


def make_model(window: bool, rotary: bool = True) -> Any:
    sliding = dict(sliding_window=SlidingWindowAttentionConfig(pattern=[5, -1], force_full_attention_on_first_layer=False))
    config = TransformerConfig.llama_like(
        d_model=64, vocab_size=VOCABULARY, n_layers=2, n_heads=4, n_kv_heads=2, **(sliding if window else {})
    )
    if not rotary:
        config.block.sequence_mixer.rope = None
    model = config.build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"), max_seq_len=64)
    set_weights(model)
    return model


def run(model: Any, packed: bool) -> dict[str, Tensor]:
    ids, labels = tokens(1 if packed else 2)
    options: dict[str, Any] = {}
    if packed:
        options = dict(doc_lens=torch.tensor([DOCUMENTS]), max_doc_lens=[max(DOCUMENTS)])
    output = model(ids, labels=labels, loss_reduction="sum", **options)
    return step_results(model, output.loss)


def by_documents(rotary: bool) -> dict[str, Tensor]:
    """A step of packed documents, each of which OLMo-core's own attention computes alone."""
    model = make_model(False, rotary)
    ids, labels = tokens(1)
    pieces = zip(ids.split(DOCUMENTS, 1), labels.split(DOCUMENTS, 1), strict=True)
    return step_results(model, sum(model(i, labels=x, loss_reduction="sum").loss for i, x in pieces))


def one_rank(window: bool) -> float:
    """Difference of our backend to OLMo-core's torch backend, without context parallelism."""
    expected = run(make_model(window), False)
    model = make_model(window)
    assert use_ringspan(model) == 2
    return largest_difference(expected, run(model, False))


def context_parallel(style: str, packed: bool, window: bool) -> float:
    """Difference of a step on all ranks to OLMo-core's own attention on one."""
    # With zig_zag and documents OLMo-core 3.0.0 takes rotary angles from the shard's boundaries, which are not positions.
    rotary = not (style == "zig_zag" and packed)
    model = make_model(window, rotary)
    use_ringspan(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    options: dict[str, Any] = dict(uly=UlyssesContextParallelStyle())
    if style != "ulysses":
        options = dict(ring=RingContextParallelStyle(load_balancer=RingAttentionLoadBalancerType(style)))
    model.apply_cp(mesh, **options)
    results = run(model, packed)
    with patch.object(dist, "is_initialized", lambda: False):  # each rank computes the whole step, without sums over ranks
        expected = by_documents(rotary) if packed else run(make_model(window), False)
    return largest_difference(expected, results)
