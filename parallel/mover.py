"""What every transport can do: offer this rank's K/V, fetch a step's, and take gradients to whose rows they are of."""

from abc import ABC, abstractmethod

from torch import Tensor

from .beside import Transfer
from .packed import Rows, by_rows, in_one_piece, new_rows
from .plan import Piece, Plan


class Mover(ABC):
    """How the blocks of one call move."""

    needs_sms = True  # of a GPU, which transfers then have to wait for behind a kernel that takes all

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.offered: Rows = ()

    def offer(self, k: Tensor, v: Tensor) -> None:
        """Makes this rank's K/V ready for the others."""
        self.offered = tuple(in_one_piece(by_rows(x)) for x in (k, v))

    def room(self, which: int, rows: int, k: Tensor, v: Tensor) -> Rows:
        """Memory that a step's K/V come into, once these were offered: `which` is 0 or 1, for one step or the next."""
        return new_rows(rows, k, v)

    @abstractmethod
    def fetch(self, index: int, which: int, into: Rows) -> Transfer:
        """The K/V of a step come into the one or the other room; this rank's go to those who want them in that step."""

    def used(self) -> None:
        """All blocks were: the current stream waits until this rank's K/V, which are the caller's again, have gone out."""
        self.offered = ()

    def give_up(self) -> None:
        """The call ends with an error, in the middle perhaps."""
        self.offered = ()

    @abstractmethod
    def part(self, which: int, rows: int, like: Tensor) -> Tensor:
        """Memory for gradients that go out, shaped as `like` but for its rows. `which` is one and the other of two in
        turn. When one is asked for again it has been given; the other may still be being written."""

    @abstractmethod
    def give(self, index: int, which: int, part: Tensor, into: Tensor) -> Transfer:
        """Gradients of others' rows go out of `part`; those of mine come into `into`, reader after reader."""


class Alone(Mover):
    """A ring of one rank: nobody takes anything, and nothing comes."""

    def fetch(self, index: int, which: int, into: Rows) -> Transfer:
        return lambda: None

    def part(self, which: int, rows: int, like: Tensor) -> Tensor:
        return like.new_empty((rows, *like.shape[1:]))

    def give(self, index: int, which: int, part: Tensor, into: Tensor) -> Transfer:
        return lambda: None


def slots(pieces: list[Piece], buffers: Rows) -> list[Rows]:
    """Each piece's place in buffers that hold them one after another."""
    if len(pieces) == 1:
        return [buffers]
    places, row = [], 0
    for piece in pieces:
        places.append(tuple(buffer[row : row + len(piece)] for buffer in buffers))
        row += len(piece)
    return places
