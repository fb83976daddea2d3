"""What every transport can do: offer this rank's K/V, fetch a step's, and take gradients to whose rows they are of."""

import functools
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator

from torch import Tensor

from ringspan.parallel.coordination import progress
from ringspan.parallel.plan import Piece, Plan, Step
from ringspan.parallel.streams import Transfer
from ringspan.parallel.transport.buffers import Rows, by_rows, in_one_piece, new_rows


class Transport(ABC):
    """How the blocks of one call move."""

    needs_sms = True  # of a GPU, which transfers then have to wait for behind a kernel that takes all

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.offered: Rows = ()

    def publish_kv(self, k: Tensor, v: Tensor) -> None:
        """Makes this rank's K/V ready for the others."""
        self.offered = tuple(in_one_piece(by_rows(x)) for x in (k, v))

    def recv_buffer(self, slot: int, rows: int, k: Tensor, v: Tensor) -> Rows:
        """Memory that a step's K/V come into, once these were offered: `which` is 0 or 1, for one step or the next."""
        return new_rows(rows, k, v)

    @abstractmethod
    def fetch(self, index: int, slot: int, into: Rows) -> Transfer:
        """The K/V of a step come into the one or the other room; this rank's go to those who want them in that step."""

    def wait_sends(self) -> None:
        """All blocks were: the current stream waits until this rank's K/V, which are the caller's again, have gone out."""
        self.offered = ()

    def abort(self) -> None:
        """The call ends with an error, in the middle perhaps."""
        self.offered = ()

    @abstractmethod
    def send_buffer(self, slot: int, rows: int, like: Tensor) -> Tensor:
        """Memory for gradients that go out, shaped as `like` but for its rows. `which` is one and the other of two in
        turn. When one is asked for again it has been given; the other may still be being written."""

    @abstractmethod
    def return_gradients(self, index: int, slot: int, part: Tensor, into: Tensor) -> Transfer:
        """Gradients of others' rows go out of `part`; those of mine come into `into`, reader after reader."""


class SingleRankTransport(Transport):
    """A ring of one rank: nobody takes anything, and nothing comes."""

    def fetch(self, index: int, slot: int, into: Rows) -> Transfer:
        return lambda: None

    def send_buffer(self, slot: int, rows: int, like: Tensor) -> Tensor:
        return like.new_empty((rows, *like.shape[1:]))

    def return_gradients(self, index: int, slot: int, part: Tensor, into: Tensor) -> Transfer:
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


moved: Counter[str] = Counter()  # messages that came to this rank: blocks of K/V ("kv"), parts of gradients ("dkv")


def prefetched_steps(
    transport: Transport, k: Tensor, v: Tensor
) -> Iterator[tuple[int, Step, Tensor, Tensor, Callable[[], None]]]:
    """Offers this rank's K/V to the others, then each step with its keys and values. What the next two need travels by then.

    The last item is to be called once the current stream comes behind all that reads the keys, and before the step after next
    is asked for, whose keys come to where they are.
    """
    own, *others = transport.plan.steps
    mine = own.pieces[0].rows
    if not others:
        yield 0, own, k[:, mine], v[:, mine], lambda: None
        return

    transport.publish_kv(k, v)
    most = max(step.num_keys for step in others)
    rooms = [transport.recv_buffer(slot, most, k, v) for slot in range(min(2, len(others)))]
    on_the_way: deque[tuple[Rows, Transfer]] = deque()

    def fetch(index: int) -> None:
        if index <= len(others):
            slot = (index - 1) % 2
            progress.hop(index, len(others))
            k_rows, v_rows = (recv_buffer[: others[index - 1].num_keys] for recv_buffer in rooms[slot])
            on_the_way.append(((k_rows, v_rows), transport.fetch(index, slot, (k_rows, v_rows))))

    fetch(1)
    fetch(2)
    yield 0, own, k[:, mine], v[:, mine], lambda: None
    for index, step in enumerate(others, 1):
        progress.hop(index, len(others))
        (k_rows, v_rows), arrived = on_the_way.popleft()
        arrived()
        moved["kv"] += bool(step.pieces)
        # (nothing else than what is still to be fetched holds the rooms: behind the last step they are given back)
        more = index + 2 <= len(others)
        yield index, step, by_rows(k_rows), by_rows(v_rows), functools.partial(fetch, index + 2) if more else lambda: None
    transport.wait_sends()


# What a profiler calls it, in small letters. "dtod" is a copy into or out of another GPU's symmetric memory, and one within a
# GPU too: only inside the ring, which in 16 bits copies for no other reason, is it taken for a transfer.
TRANSFERS, WITHIN_RING = ("nccl", "c10d::", "gloo:", "memcpy ptop", "memcpy p2p"), "memcpy dtod"


def is_transfer(name: str, in_ring: bool) -> bool:
    """Whether what bears this name moves something between ranks."""
    name = name.lower()
    return any(word in name for word in TRANSFERS) or (in_ring and WITHIN_RING in name)
