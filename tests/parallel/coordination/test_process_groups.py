"""Process groups: which ranks share a host, and that destroyed groups end their threads."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringspan.parallel.coordination import process_groups

ENDS_WITHOUT_GROUPS = """
import atexit
import os

def check_threads():
    names = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
    os.write(1, f"threads of Gloo: {sum('gloo' in name for name in names)}\\n".encode())

atexit.register(check_threads)  # before any import: the first handler runs last
import torch
import torch.distributed as dist
from ringspan import Mask, Mesh, context_attention, ring_attention

dist.init_process_group("gloo")
mesh = Mesh(ring=2)
layout = mesh.layout("zigzag", 64)
x = torch.randn(1, 32, 2, 16)
context_attention(x, x, x, Mask(causal=True), layout=layout, mesh=mesh)
ring_attention(x, x, x, Mask(causal=True), layout=layout)  # in the default group
check_threads()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_no_thread_of_gloo_is_left_when_python_exits(tmp_path: Path) -> None:
    """A reference of ours to a destroyed group would keep its threads, which can abort the process while Python exits."""
    script = tmp_path / "script.py"
    script.write_text(ENDS_WITHOUT_GROUPS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    counts = sorted(int(count) for count in re.findall(r"threads of Gloo: (\d+)", done.stdout))
    assert counts[:2] == [0, 0] and len(counts) == 4 and counts[2] > 0, done.stdout


@pytest.mark.parametrize("num_gpus, can_access, is_shared", [(2, True, True), (2, False, False), (1, True, False)])
def test_gpus_without_peer_access_share_no_host(
    num_gpus: int, can_access: bool, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a rank that sees one GPU only: it cannot know about others, and two such GPUs may both be number 0."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: can_access)
    hosts = []
    for rank in range(2):
        monkeypatch.setattr("os.getpid", lambda rank=rank: 100 + rank)
        hosts.append(process_groups._host_id(torch.device("cuda", rank % num_gpus)))
    assert (hosts[0] == hosts[1]) is is_shared
    assert process_groups._host_id(torch.device("cpu")) == process_groups._host_id(torch.device("cpu"))
