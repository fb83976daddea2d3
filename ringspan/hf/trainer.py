"""`TrainerMixin`: transformers' Trainer on a ring. Its losses and weights are those of the Trainer on one rank.

class RingTrainer(TrainerMixin, Trainer): pass
trainer = RingTrainer(model, args, ring=context_parallel(Mesh(data=2, ring=4)), train_dataset=…)

batches       all ranks of a ring receive the same ones; the order is that of `mesh.data` ranks without a ring
loss          this rank's sum over all labels of the step, counted once per ring, times the ranks, which DDP divides by
evaluation    the loss of whole sequences, and whole logits, once per ring
checkpoints   as the Trainer writes them; a run resumes on its number of ranks
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.hf.context import RingContext, context_parallel

Base: Any = object
if TYPE_CHECKING:
    from transformers import Trainer

    Base = Trainer


class TrainerMixin(Base):
    """Mixin before transformers' Trainer, or a subclass of it, that trains on sharded sequences.

    Args:
        ring: The ring, from `context_parallel`. None: one ring of all ranks.
        args, kwargs: As the Trainer's. The model has attn_implementation="ringspan".

    Raises:
        ValueError: An option of the Trainer cannot be honoured under a ring. The message names it.
    """

    def __init__(self, *args: Any, ring: RingContext | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ring = context_parallel() if ring is None else ring
        self._whole_logits = True
        self._check_arguments()
        self.accelerator.gather = self._gather  # gather_for_metrics and counts of tokens call it
        self.accelerator.dataloader_config.dispatch_batches = False  # each rank reads its own batches

    def _check_arguments(self) -> None:
        args, model = self.args, self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        attention = model.config.get_text_config()._attn_implementation
        refused = {
            f"attn_implementation={attention!r}": attention != "ringspan",
            f"label_smoothing_factor={args.label_smoothing_factor}": args.label_smoothing_factor != 0,
            "compute_loss_func": self.compute_loss_func is not None,
            "use_liger_kernel=True": args.use_liger_kernel,
            "average_tokens_across_devices=False": not args.average_tokens_across_devices,
            "parallelism_config": args.parallelism_config is not None,
            f"n_gpu={args.n_gpu}": args.n_gpu > 1,
            f"train_sampling_strategy={args.train_sampling_strategy!r}": args.train_sampling_strategy == "batch_rebalance",
            "dispatch_batches=True": self.accelerator.dataloader_config.dispatch_batches is True,
            "a model whose forward takes no num_items_in_batch": not self.model_accepts_loss_kwargs,
        }
        if wrong := [name for name, is_wrong in refused.items() if is_wrong]:
            raise ValueError(
                f"{', '.join(wrong)} under a ring: the loss or the data would be wrong; attn_implementation='ringspan' and the "
                "Trainer's defaults work"
            )

    def get_cp_size(self) -> int:
        """Return the number of ranks that share a sequence; the Trainer counts samples with it."""
        return self.ring.mesh.context_size

    def floating_point_ops(self, inputs: Any) -> int:
        """Return this rank's part of a batch's operations."""
        return super().floating_point_ops(inputs) // self.ring.mesh.context_size

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """Return the loss of a batch: in training this rank's part, as the Trainer scales it; in evaluation the batch's."""
        batch = self.ring.shard(inputs)
        if "shift_labels" not in batch:
            raise ValueError(f"labels are missing in the batch, which has {sorted(inputs)}: a Trainer under a ring needs them")
        labels = batch["shift_labels"]
        with self.ring:
            if model.training:
                return super().compute_loss(model, batch | dict(labels=labels), return_outputs, num_items_in_batch, **kwargs)
            outputs = model(**batch)
            loss = self.ring.loss(outputs.logits, labels, over="ring")
            logits = self.ring.gather(outputs.logits, batch) if self._whole_logits else outputs.logits
        return (loss, dict(loss=loss, logits=logits)) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None) -> Any:
        """Evaluate a batch; whole logits are gathered only if metrics need them."""
        self._whole_logits = not prediction_loss_only
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader, mesh = super()._get_dataloader(*args, **kwargs), self.ring.mesh
        if mesh.context_size > 1:
            parts = [getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)]
            part = next((part for part in parts if hasattr(part, "num_processes") and hasattr(part, "process_index")), None)
            if part is None:
                raise ValueError(
                    f"data loader {type(loader).__name__}: batches cannot be equal on the ranks of a ring; map-style data works"
                )
            part.num_processes, part.process_index = mesh.data, mesh.data_rank
            if mesh.data == 1:
                part.even_batches = False  # a single rank does not fill its last batch
        return loader

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        count = super()._get_num_items_in_batch(*args, **kwargs)  # divides by get_cp_size, but `_gather` counts a ring once
        return None if count is None else count * self.get_cp_size()

    def _gather(self, tensors: Any) -> Any:
        """Concatenate tensors of the ranks that have different data, along the first dimension."""
        from accelerate.utils import recursively_apply

        return recursively_apply(self._gather_one, tensors, error_on_other_type=True)

    def _gather_one(self, x: Tensor) -> Tensor:
        x, mesh = (x[None] if x.ndim == 0 else x).contiguous(), self.ring.mesh
        if mesh.data == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(mesh.data)]
        dist.all_gather(parts, x, group=mesh.data_group)
        return torch.cat(parts)
