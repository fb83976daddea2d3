"""The oracle: dense attention in the input dtype, with transformers' own mask matrices and no code of ours."""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask


def dense_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, softcap=None, s_aux=None, **options: Any
) -> tuple[Tensor, None]:
    documents = (options["position_ids"].diff(prepend=options["position_ids"][:, :1]) != 1).cumsum(-1)
    mask = mask & (documents[:, None, :, None] == documents[:, None, None])  # gpt-oss asks for no mask of documents
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -float("inf"))
    sinks = torch.zeros_like(scores[..., :0]) if s_aux is None else s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., : scores.shape[-1]]
    weights = torch.where(mask, weights, 0)  # a row without visible keys is NaN
    return (weights @ v).transpose(1, 2), None


def dense_mask(**arguments: Any) -> Tensor:
    return sdpa_mask(**arguments | dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False))


AttentionInterface.register("oracle", dense_attention)
AttentionMaskInterface.register("oracle", dense_mask)
