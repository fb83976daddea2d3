"""Sockets of ranks: the store's address, torchrun's store, messages between ranks."""

import ast
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ringspan.launch import listeners
from ringspan.trainer import network
from tests.trainer import jobs

ROOT = Path(__file__).resolve().parents[2]
OBJECT_COLLECTIVES = ("object_list", "gather_object", "scatter_object", "pickle", "torch.load", "allow_pickle=True")


def open_sockets(everywhere: bool, path: str) -> None:
    """Write this rank's listeners, after a run's first collectives; `everywhere` is the defect that the check finds."""
    import torch

    from ringspan.trainer.config import schema
    from ringspan.trainer.distributed import DistributedContext

    if everywhere:
        bind = network._bind
        network._bind = lambda address, port: bind("0.0.0.0", port)  # type: ignore[assignment]
    options = schema.Config()
    options.parallel.device, options.parallel.timeout = "cpu", 30.0
    distributed = DistributedContext(options)
    value = {"name": "α", "numbers": [1, 0.1, None], "rank": distributed.rank}
    assert distributed.broadcast(value) == value | {"rank": 0}
    gathered = distributed.gather(value | {"long": "x" * distributed.rank * 1000})
    assert [each["rank"] for each in gathered] == [0, 1] and len(gathered[1]["long"]) == 1000
    with pytest.raises(TypeError):
        distributed.gather(Path(path))
    store = network.store_client(timedelta(seconds=5))
    store.set(f"rank {distributed.rank}", "1")
    distributed.sum(torch.ones(1))
    found = listeners.listeners([os.getpid()])
    Path(path, str(distributed.rank)).write_text("\n".join(each.address for each in found))
    distributed.barrier()
    assert store.check(["rank 0", "rank 1"])
    distributed.close()


@pytest.mark.parametrize("everywhere", [False, True])
def test_ranks_listen_on_loopback_only(tmp_path: Path, everywhere: bool) -> None:
    assert jobs.run_ranks(2, open_sockets, everywhere, str(tmp_path)) == [0, 0]
    found = [set((tmp_path / rank).read_text().splitlines()) for rank in ("0", "1")]
    assert found == [{"127.0.0.1", "0.0.0.0"} if everywhere else {"127.0.0.1"}, {"127.0.0.1"}]


def test_a_second_group_of_a_process_takes_the_same_store() -> None:
    assert jobs.run_ranks(1, init_twice) == [0]


def init_twice() -> None:
    import torch.distributed as dist

    for _ in range(2):
        network.init_process_group("gloo", timedelta(seconds=20))
        assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("environment", "one_host"),
    [
        (dict(WORLD_SIZE="1", MASTER_ADDR="node1"), True),
        (dict(WORLD_SIZE="4", LOCAL_WORLD_SIZE="4", MASTER_ADDR="node1"), True),
        (dict(WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", MASTER_ADDR="node1"), False),
        (dict(WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", MASTER_ADDR="10.0.0.1"), False),
        (dict(WORLD_SIZE="4", MASTER_ADDR="127.0.0.1"), True),
        (dict(WORLD_SIZE="4", MASTER_ADDR="localhost"), True),
    ],
)
def test_jobs_of_one_host(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], one_host: bool) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert network.is_one_host() == one_host
    monkeypatch.setenv("MASTER_PORT", "29511")
    warning = network.agent_store_warning()
    assert "port 29511 of every interface, without a password" in warning
    assert ("`ringspan launch` opens no such port" in warning) == one_host


def test_an_interface_that_the_host_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,ib7")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=lo,ib7: this host has no interface ib7; it has .*lo"):
        network.check_interfaces()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    network.check_interfaces()


def test_a_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: rank 0 cannot listen there"):
            network._bind("127.0.0.1", port)


def test_nothing_unpickles_what_a_socket_or_a_file_delivers() -> None:
    """No call of torch's object collectives, and none of pickle, in the package."""
    for folder in ("kernels", "parallel", "trainer", "launch", "ringspan"):
        for path in (ROOT / folder).rglob("*.py"):
            names = set(called_names(ast.parse(path.read_text())))
            assert not [name for name in names if any(bad in name for bad in OBJECT_COLLECTIVES)], path


def called_names(tree: Any) -> list[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return [*(ast.unparse(call.func) for call in calls), *(name for name in imported if "pickle" in name)]
