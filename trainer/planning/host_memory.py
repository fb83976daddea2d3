"""Memory and cores of this host, within the limits of its container. Imports no torch."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def host_memory(root: Path = Path("/")) -> float:
    """Return the bytes of memory that this process's container may use, or those of the machine.

    Args:
        root: folder of proc and sys.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _container_limits(root))])


def available_host_memory(root: Path = Path("/")) -> float:
    """Return the bytes of host memory that are free: of the machine, and within the limits of this process's container."""
    free = [math.inf]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        free.append(1024.0 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    return min([*free, *(limit - used for limit, used in _container_limits(root))])


def _container_limits(root: Path) -> Iterator[tuple[float, float]]:
    """Memory limits and use of the process's control groups, versions 1 and 2, and of the groups around them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, usage = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = PurePosixPath(path.lstrip("/"))
        for part in dict.fromkeys((group, *group.parents)):  # in a container the path may be the host's, and only / exists
            folder = base / part
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                yield float(int((folder / limit).read_text())), _reclaimed(folder, float(int((folder / usage).read_text())))


def _reclaimed(folder: Path, used: float) -> float:
    """The use of a control group without its page cache, which the kernel frees when memory is needed."""
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return used - float(value)
    return used


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_per_rank() -> float:
    """Return this rank's share of the machine's memory, among the ranks that torchrun started on it."""
    return host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def free_host_memory_per_rank() -> float:
    """Return this rank's share of the host memory that is free, as seen before the ranks allocate theirs."""
    return min(host_memory_per_rank(), available_host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
