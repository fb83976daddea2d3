"""Sockets of a run: torch's store, and the network interface of gloo and NCCL.

On one host every socket is on the loopback interface. On several hosts the store listens on MASTER_ADDR alone, and gloo and
NCCL on the interface that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name, or on the one that they choose. torchrun opens its
store on all interfaces before this code runs; a warning names what that exposes. docs/security.md has the whole list.
"""

import ipaddress
import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ringspan.trainer.monitoring import supervised

_store: dist.TCPStore | None = None  # of this process: its port cannot be bound again while the store lives
_num_groups = 0


def init_process_group(backend: str, timeout: timedelta, **options: Any) -> None:
    """Create the default process group of this rank.

    Args:
        backend: "gloo" or "nccl".
        timeout: limit of every wait.
        options: more options of torch's function.
    Raises:
        ValueError: the address, the port or the network interface cannot be used.
    """
    global _store, _num_groups
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if is_one_host():
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    check_interfaces()
    if uses_agent_store():
        if rank == 0:
            print(agent_store_warning(), file=sys.stderr, flush=True)
        dist.init_process_group(backend, timeout=timeout, **options)
        return
    if _store is None:
        _store = _open_store(rank, world, timeout)
    store = dist.PrefixStore(f"group {_num_groups}", _store)  # several groups in one process share the store
    _num_groups += 1
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, **options)


def check_interfaces() -> None:
    """Raise a ValueError if gloo is to use a network interface that this host does not have."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    known = [name for _, name in socket.if_nameindex()]
    if names and (missing := [name for name in names.split(",") if name not in known]):
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={names}: this host has no interface {', '.join(missing)}; it has {', '.join(known)}. "
            "Name one of these, or unset the variable"
        )


def store_client(timeout: timedelta) -> dist.TCPStore:
    """Return another connection to the job's store, for a thread: a call on a connection waits for the one before."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def is_one_host() -> bool:
    """Return whether all ranks of the job are on this host, as far as the environment says."""
    world = os.environ["WORLD_SIZE"]
    if world == "1" or os.environ.get("LOCAL_WORLD_SIZE") == world:
        return True
    address = os.environ["MASTER_ADDR"]
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def uses_agent_store() -> bool:
    """Return whether torchrun hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agent_store_warning() -> str:
    """Return what torchrun's store does not protect."""
    instead = "; on one host `ringspan launch` opens no such port" if is_one_host() else ""
    return (
        f"torchrun's store listens on port {os.environ['MASTER_PORT']} of every interface, without a password: any host that "
        f"reaches the port can end this job or run code as its user; let a firewall close it to other hosts{instead}"
    )


def _open_store(rank: int, world: int, timeout: timedelta) -> dist.TCPStore:
    """Connect to the job's store. Rank 0 hosts it on the supervisor's socket, or on one that is bound to MASTER_ADDR."""
    options: dict[str, Any] = {}
    if rank == 0:
        options["master_listen_fd"] = supervised.take_store_socket()
        if options["master_listen_fd"] < 0:
            options["master_listen_fd"] = _bind(os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", 0)))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, world, is_master=rank == 0, timeout=timeout, **options)


def _bind(address: str, port: int) -> int:
    """Return a socket bound to this address and port. Port 0 takes a free one. MASTER_PORT is set to it."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        server = socket.socket(family)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(target)
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR={address}, MASTER_PORT={port}: rank 0 cannot listen there: {error.strerror or error}; "
            "take an address of rank 0's host and a free port"
        ) from None
    os.environ["MASTER_PORT"] = str(server.getsockname()[1])
    return server.detach()
