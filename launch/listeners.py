"""Listeners: TCP ports that processes of this host accept connections on, from Linux's /proc."""

import contextlib
import ipaddress
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

LISTEN = "0A"  # state in /proc/net/tcp


class Listener(NamedTuple):
    """A listening socket and its process."""

    address: str
    port: int
    pid: int
    command: str

    @property
    def is_local(self) -> bool:
        """Whether only processes of this host can connect."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)  # of an IPv6 socket that also takes IPv4
        return (mapped or address).is_loopback


def listeners(pids: Iterable[int] | None = None) -> list[Listener]:
    """Return the listening TCP sockets of processes.

    Args:
        pids: the processes; None: all whose files this user may see.
    """
    found = []
    for pid in _all_pids() if pids is None else pids:
        if inodes := set(_sockets(pid)):
            listening = _listening(pid)
            found += [Listener(*listening[inode], pid, _command(pid)) for inode in inodes & listening.keys()]
    return sorted(set(found))


def descendants(pid: int) -> list[int]:
    """Return a process, its children, their children, and so on."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            children += map(int, file.read_text().split())
    return [pid, *(each for child in children for each in descendants(child))]


def _all_pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))


def _sockets(pid: int) -> Iterator[str]:
    """Inodes of a process's sockets."""
    with contextlib.suppress(OSError):  # the process has ended, or is another user's
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if (target := os.readlink(entry)).startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _listening(pid: int) -> dict[str, tuple[str, int]]:
    """Address and port of listening sockets by inode. A process may be in another network namespace than this one."""
    found = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN:
                    host, _, port = fields[1].partition(":")
                    found[fields[9]] = _address(host), int(port, 16)
    return found


def _address(text: str) -> str:
    """Decode an address of /proc/net/tcp: hexadecimal words in the byte order of this machine."""
    words = [int(text[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
