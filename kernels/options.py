"""`AttentionOptions`: the options of an attention call. The public functions validate them once; below them they are right."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan.kernels.backends.choose import choose_backend
from ringspan.kernels.validate import check_options, check_sinks


@dataclass
class AttentionOptions:
    """Options as the public functions take them. `attention` describes each."""

    scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    dropout: float = 0.0
    seed: int | Tensor | None = None
    deterministic: bool = False
    backend: str = "auto"

    def validated(self, q: Tensor, v: Tensor) -> "AttentionOptions":
        """Return the options with a scale and, for dropout, a seed on q's device: without one it is drawn by torch's generator.

        Raises:
            ValueError: An option is wrong, or the named backend cannot run these inputs.
        """
        check_options(q, self.scale, self.softcap, self.dropout, self.seed, self.deterministic, may_draw=True)
        if self.sinks is not None:
            check_sinks(q, self.sinks)
        scale, seed = q.shape[-1] ** -0.5 if self.scale is None else float(self.scale), self.seed
        choose_backend(self.backend, q, v, scale=scale, dropout=self.dropout)  # raises if the named backend cannot run
        if not self.dropout:
            seed = None
        elif seed is None:
            seed = torch.randint(2**63 - 1, (), device=q.device)
        elif isinstance(seed, int):
            seed = torch.full((), seed, dtype=torch.int64, device=q.device)
        factors = scale, float(self.softcap), self.sinks, float(self.dropout)
        return AttentionOptions(*factors, seed, self.deterministic, self.backend)
