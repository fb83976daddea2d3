"""Who has come to a meeting of all ranks. A collective that waits too long does not say for whom; this does.

Each rank writes down the number of the meeting that it has come to, in the job's store, before it waits there. When a wait ends
with an error, those who have not come are the ones whose number is lower.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import ProcessGroup

_meetings: Counter[str] = Counter()  # by the group's name


def announce_arrival(group: ProcessGroup) -> Callable[[], str]:
    """This rank has come to the group's next meeting. What is returned names, at any time later, those who have not."""
    name = group.group_name
    _meetings[name] += 1
    number, me, store = _meetings[name], dist.get_rank(), dist.distributed_c10d._get_default_store()
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != me]
    with suppress(RuntimeError):  # the meeting itself will tell of a store that is gone
        store.set(_key(name, me), str(number))

    def missing() -> str:
        try:
            late = [r for r in others if not store.check([_key(name, r)]) or int(store.get(_key(name, r))) < number]
        except RuntimeError:
            late = []
        return ranks(late or others)

    return missing


def ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _key(name: str, rank: int) -> str:
    return f"ringspan/{name}/{rank}"
