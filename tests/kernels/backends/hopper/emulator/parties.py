"""Parties that wait for each other, one at a time and in an order that a seed decides: what goes wrong does so again.

A party goes on until it has to wait, or is told to draw a new priority, which happens now and then; next comes whoever is
ready and has the highest. So over many seeds each is at times far behind the others (after probabilistic concurrency testing,
Burckhardt et al. 2010). What a machine does by itself, as a copy that is under way, is a party as well, and may be as late.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CHANGES = 1 / 12  # how often a party that could go on lets others go first, with a new priority of its own


class Stuck(AssertionError):
    """Nobody can go on."""


class _Stopped(BaseException):
    """Ends a party whose fellow has failed."""


@dataclass(eq=False)
class Party:
    name: str
    about: Any  # what its work is told of itself
    priority: float
    ready: Callable[[], bool]
    waits_for: str = ""
    act: Callable[[], None] | None = None  # of one that is done in a moment, and has no thread
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Parties:
    def __init__(self, seed: int, most_turns: int = 2_000_000) -> None:
        self.random = random.Random(seed)
        self.parties: list[Party] = []
        self.threads: list[threading.Thread] = []
        self.now: Party | None = None
        self.failure: BaseException | None = None
        self.over = threading.Event()
        self.turns_left = most_turns

    @property
    def about(self) -> Any:
        """What the party whose turn it is was told of itself."""
        assert self.now is not None
        return self.now.about

    def add(self, name: str, work: Callable[[], None], about: Any = None) -> None:
        party = self._joins(Party(name, about, self.random.random(), _always))
        self.threads.append(threading.Thread(target=self._live, args=(party, work), daemon=True))
        self.threads[-1].start()

    def later(self, name: str, act: Callable[[], None]) -> None:
        """To be done at any time from now on."""
        self._joins(Party(name, None, self.random.random(), _always, act=act))

    def run(self) -> None:
        """Until all are done, those included that join meanwhile."""
        self._try(self._next)
        self.over.wait()
        for thread in self.threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def wait(self, ready: Callable[[], bool], waits_for: str) -> None:
        party = self.now
        assert party is not None
        if self.random.random() < CHANGES:
            party.priority = self.random.random()
        elif ready():
            return
        party.ready, party.waits_for = ready, waits_for
        if self._next() is not party:
            self._wake_of(party)

    def pause(self) -> None:
        self.wait(_always, "nothing")

    def _joins(self, party: Party) -> Party:
        self.parties.append(party)
        return party

    def _live(self, party: Party, work: Callable[[], None]) -> None:
        def all_of_it() -> None:
            self._wake_of(party)
            work()
            self.parties.remove(party)
            self._next()

        self._try(all_of_it)

    def _try(self, do: Callable[[], Any]) -> None:
        try:
            do()
        except _Stopped:
            pass
        except BaseException as failure:
            self._fail(failure)

    def _wake_of(self, party: Party) -> None:
        party.turn.acquire()
        if self.failure is not None:
            raise _Stopped

    def _next(self) -> Party | None:
        """Whoever is next goes on; all that is only to be done is done at once."""
        before = self.now
        while self.parties:
            ready = [party for party in self.parties if party.ready()]
            self.turns_left -= 1
            if not ready or self.turns_left < 0:
                what = "all wait" if not ready else "no end in sight"
                waiting = "; ".join(f"{party.name} for {party.waits_for}" for party in self.parties)
                self._fail(Stuck(f"{what}: {waiting}"))
                raise _Stopped
            party = max(ready, key=lambda party: party.priority)
            if party.act is not None:
                self.parties.remove(party)
                party.act()
                continue
            self.now = party
            if party is not before:
                party.turn.release()
            return party
        self.over.set()
        return None

    def _fail(self, failure: BaseException) -> None:
        self.failure = self.failure or failure
        for party in self.parties:
            party.turn.release()
        self.over.set()


def _always() -> bool:
    return True
