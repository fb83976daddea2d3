"""The weights that a run begins with: its newest whole checkpoint, else another run's, published weights, or a seed."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ringspan.trainer import run_messages
from ringspan.trainer.checkpoint import checkpoint, compatibility, load_model, run_folder
from ringspan.trainer.checkpoint.reader import Reader, verify
from ringspan.trainer.config.compose import Composed, ConfigError
from ringspan.trainer.config.schema import Model
from ringspan.trainer.data import fingerprint
from ringspan.trainer.distributed import DistributedContext
from ringspan.trainer.engine import Values
from ringspan.trainer.model import initial_values
from ringspan.trainer.monitoring import records


@dataclass
class Start:
    """A run's beginning."""

    values: Values  # reads the weights
    source: Reader | None = None  # the checkpoint that is continued, with moments and position
    accepted: dict[str, str] = field(default_factory=dict)  # options that differ from it, accepted by checkpoint.changed


class StartFinder:
    """Finds a run's start. All ranks call it together.

    Args:
        composed: config and overrides.
        folder: the run's folder.
        model: the run's model, with vocabulary and positions resolved.
        shapes: shape of each weight.
        data: this run's data, as `fingerprint.describe` returns it.
        distributed: this rank's place in the job.
    """

    def __init__(
        self,
        composed: Composed,
        folder: Path,
        model: Model,
        shapes: dict[str, torch.Size],
        data: fingerprint.Description,
        distributed: DistributedContext,
    ) -> None:
        self.composed, self.config, self.folder = composed, composed.config, folder
        self.model, self.shapes, self.data, self.distributed = model, shapes, data, distributed

    def find(self) -> Start:
        """Return the start.

        Raises:
            NoCheckpointError: checkpoints were saved, and none is whole.
            ConfigError: the start is of another model, has other options that matter, or contradicts another option.
        """
        if path := self._find_checkpoint():
            return self._open(path, self.config.optim.kind)
        if not (init_from := self.config.init_from):
            return Start(self._initial_values)
        own = self.distributed.broadcast(str(load_model.own_checkpoint(init_from) or ""))
        if not own:
            return Start(self.distributed.call_on_all_ranks(self._huggingface_values))
        if problems := verify(Path(own), self.distributed):
            raise ConfigError(f"init_from={init_from}: {own} is damaged: {'; '.join(problems)}; take another checkpoint")
        start = self._open(Path(own), optimizer="")
        if start.source and self.distributed.rank == 0:
            warning = compatibility.unscaled_positions(start.source.state.get("model"), self.config)
            print(*[f"init_from={init_from}: {warning}"] * bool(warning), sep="", end="\n" * bool(warning), flush=True)
        return Start(start.values, None, start.accepted)

    def _find_checkpoint(self) -> Path | None:
        """Return the checkpoint to resume from, if there is one: the run's newest, else the one of checkpoint.resume."""
        resume, distributed = self.config.checkpoint.resume, self.distributed
        if resume == "none":
            return None
        path, damaged = checkpoint.find_newest(self.folder / "checkpoints", distributed)
        if not path:
            self._require_none_lost(damaged)
        notes = [f"{text}; the previous one is used" for text in damaged]
        if resume != "auto":
            other = Path(resume).expanduser().resolve()
            if path and path != other:
                own = run_messages.short_path(path)
                notes.append(
                    f"checkpoint.resume={resume} is not used: {own} is this run's own; for another run choose a new name"
                )
            elif not path:
                self._validate_other(other)
                path = other
        if distributed.rank == 0:
            print(*notes, sep="\n", end="\n" * bool(notes), flush=True)
        return path

    def _require_none_lost(self, damaged: list[str]) -> None:
        """Raise an error if checkpoints were saved: a run that began anew would replace its curve and its weights."""
        finished = lost = 0
        if self.distributed.rank == 0:
            finished = run_folder.is_finished(self.folder)
            lost = records.last_saved(self.folder / "metrics.jsonl")
        finished, lost = self.distributed.broadcast([finished, lost])
        if damaged or lost:
            text = "\n".join(damaged) or f"step {lost} was saved, and there is no checkpoint: is a disk not mounted?"
            raise checkpoint.NoCheckpointError(run_messages.no_checkpoint(self.composed, self.folder, text))
        if finished:
            raise ConfigError(
                f"name={self.config.name}: that run is finished, and nothing is left to continue from or to report on "
                "(it has no checkpoint); choose another name, or take checkpoint.resume=none"
            )

    def _validate_other(self, path: Path) -> None:
        """Check that another run's checkpoint is undamaged and that init_from does not name other weights."""
        resume, init_from = self.config.checkpoint.resume, self.config.init_from
        if init_from:
            raise ConfigError(f"init_from={init_from}, checkpoint.resume={resume}: a run begins with one; leave out the other")
        if problems := verify(path, self.distributed):
            raise ConfigError(
                f"checkpoint.resume={resume}: {'; '.join(problems)}; a checkpoint is a folder runs/NAME/checkpoints/step-…"
            )

    def _open(self, path: Path, optimizer: str) -> Start:
        return self.distributed.call_on_all_ranks(partial(self._read, path, optimizer))

    def _read(self, path: Path, optimizer: str) -> Start:
        """Open a checkpoint of this model. With `optimizer`, its moments and sample numbers must be this run's too."""
        source = Reader(path)
        source.validate(self.shapes, optimizer)
        saved, changed = source.state.get("model"), self.config.checkpoint.changed
        current = compatibility.describe(self.config, self.model)
        found = compatibility.differences(saved if isinstance(saved, dict) else {}, current, weights_only=not optimizer)
        refused = [key for key in found if not compatibility.is_accepted(key, changed)]
        if refused:
            raise ValueError(
                f"{path} was made with other options than {', '.join(found[key] for key in refused)}: "
                f"take those, or accept the change with checkpoint.changed=[{','.join([*changed, *refused])}]"
            )
        if optimizer:
            hashes = saved.get("fingerprint", {}) if isinstance(saved, dict) else {}  # absent in older checkpoints
            if lines := fingerprint.require_unchanged(self.data, hashes, path.name, changed):
                found["contents of data.sources"] = "; ".join(lines)
        return Start(source.values, source, found)

    def _initial_values(self, name: str, key: str, start: int, stop: int) -> Tensor:
        return initial_values(name, self.shapes[name], self.model, self.config.seed, start, stop)

    def _huggingface_values(self) -> Values:
        """Return the reader of a folder of Hugging Face safetensors; check that every weight has the model's elements."""
        from ringspan.trainer.checkpoint import huggingface

        path, rope = Path(self.config.init_from).expanduser(), self.config.rope
        try:
            values = huggingface.weight_reader(path, self.model, rope)
            warning = huggingface.rope_difference(path, rope)
            sizes = {name: shape.numel() for name, shape in self.shapes.items()}
            wrong = [name for name, size in sizes.items() if len(values(name, "weight", size - 1, size + 1)) != 1]
        except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
            raise ValueError(f"init_from={str(path)!r} is damaged: {type(error).__name__}: {error}") from None
        if wrong:
            raise ValueError(f"init_from={str(path)!r} is damaged: {wrong[0]} has not the elements that config.json describes")
        if warning and self.distributed.rank == 0:
            print(warning, flush=True)
        return values
