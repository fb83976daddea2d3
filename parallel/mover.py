"""What every transport can do: show this rank's K/V, fetch a step's, and take gradients to whose rows they are of."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from . import progress
from .plan import Piece, Plan


@dataclass
class Transfer:
    """Something on its way. `wait` makes the current stream, or on the CPU the caller, wait until it is here."""

    finish: Callable[[], object]
    what: str
    seconds: float
    on_gpu: bool

    def wait(self) -> None:
        self.finish()
        if self.on_gpu:
            progress.expect(self.what, self.seconds)


class Mover:
    """How the blocks of one call move. This one is for a ring of one rank, where nothing does."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def publish(self, k: Tensor, v: Tensor) -> None:
        """Shows this rank's K/V to the others, packed."""
        raise NotImplementedError

    def fetch(self, index: int, into: Tensor) -> Transfer:
        """The K/V of a step, which others take from this rank at the same time."""
        raise NotImplementedError

    def part(self, which: int, rows: int, like: Tensor) -> Tensor:
        """Memory for gradients that go out, shaped as `like` but for its rows. `which` is 0 and 1 in turn: a part is free
        again when the next one has been given, and what came with its own has been waited for."""
        raise NotImplementedError

    def give(self, index: int, which: int, part: Tensor, into: Tensor) -> Transfer:
        """Gradients of others' rows go out of `part`; those of mine come into `into`, reader after reader."""
        raise NotImplementedError


def slots(pieces: list[Piece], buffer: Tensor) -> list[tuple[int, Tensor]]:
    """Each piece's place in a buffer that holds them one after another."""
    places, row = [], 0
    for piece in pieces:
        places.append((piece.rank, buffer[row : row + len(piece)]))
        row += len(piece)
    return places
