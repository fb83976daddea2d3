"""Doctor: checks this machine for training. `ringspan doctor`, or with --links to measure the links between its GPUs.

Each finding is one line: `ok`, `note` with a hint, or `BAD` with a remedy. The exit code is 1 if one is BAD, else 0. The doctor
needs none of the packages that it checks.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import ringspan
from ringspan import ROOT
from ringspan.launch import listeners
from ringspan.trainer.planning.host_memory import num_cores

REQUIRED = {"torch": "2.11", "triton": "3.6", "numpy": "1.26"}
OTHER_NAMES = {"triton": ("pytorch-triton", "pytorch-triton-rocm", "triton-rocm")}  # of wheels from PyTorch's index
TRAIN = {"deepspeed": "0.19", "hydra-core": "1.3", "wandb": "0"}  # the extra ringspan[train]
OPTIONAL = {  # package: how to install it
    "tensorboard": "pip install tensorboard",
    "tokenizers": 'pip install "ringspan[tokenizers]"',
    "tiktoken": 'pip install "ringspan[tokenizers]"',
}
TRAINING = ("ringspan", "torchrun", "torch.distributed", "wandb")  # in the commands whose ports the doctor lists
GIB = 2**30
KERNEL_FLOPS = 6e14  # FLOP/s of our kernels on Hopper
NVLINK = 1e11  # bytes per second: the least that an NVLink connection has
# A causal backward's block of n · n tokens needs 5 n² FLOPs per column of a query head. Per column of a KV head 12 n bytes are
# transferred: 4 of K and V, 8 of their gradients in fp32. (A forward needs 2 n² FLOPs and 4 n bytes.)
FLOPS_PER_BYTE = 5 / 12  # times n


class Doctor:
    """Prints findings and counts the problems among them."""

    def __init__(self) -> None:
        self.problems = 0

    def good(self, text: str) -> None:
        print(f"  ok    {text}")

    def note(self, text: str, remedy: str = "") -> None:
        print(f"  note  {text}" + (f": {remedy}" if remedy else ""))

    def bad(self, text: str, remedy: str) -> None:
        self.problems += 1
        print(f"  BAD   {text}: {remedy}")


def main(argv: list[str] | None = None) -> int:
    """Run all checks; return 0, or 1 if there are problems."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    if unknown := [text for text in argv if text != "--links"]:
        print(f"ringspan doctor: {unknown[0]}: not an option; the only one is --links", file=sys.stderr)
        return 2
    doctor = Doctor()
    checks = (
        ("versions", versions), ("installation", installation), ("machine", machine), ("GPUs", gpus), ("network", network),
    )  # fmt: skip
    for title, check in checks:
        print(title)
        check(doctor)
    if "--links" in argv:
        print("links")
        links(doctor)
    if doctor.problems:
        print(f"{doctor.problems} problem{'s' * (doctor.problems != 1)}")
    elif any(_version(name) is None for name in TRAIN):
        print('no problems; for training, pip install "ringspan[train]"')
    else:
        print("no problems; start with: ringspan launch experiment=laptop")
    return int(doctor.problems > 0)


def versions(doctor: Doctor) -> None:
    """Check the versions of all packages. The packages of extras may be missing, but not too old."""
    doctor.good(f"Python {platform.python_version()}")
    for name, minimum in (REQUIRED | TRAIN).items():
        version = _version(name)
        if version is not None and _number(version) < _number(minimum):
            doctor.bad(f"{name} {version}", f'too old; pip install "{name}>={minimum}"')
        elif version is not None:
            doctor.good(f"{name} {version}")
        elif name in REQUIRED:
            doctor.bad(f"{name} is not installed", f'pip install "{name}>={minimum}"')
        else:
            doctor.note(f"{name} is not installed", 'training needs it; pip install "ringspan[train]"')
    for name, remedy in OPTIONAL.items():
        version = _version(name)
        if version is not None:
            doctor.good(f"{name} {version}")
        else:
            doctor.note(f"{name} is not installed", f"optional; {remedy}")


def installation(doctor: Doctor) -> None:
    """Check that a rank that starts in the current folder imports the same `ringspan` as this process."""
    code = "import ringspan; print(ringspan.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    path = done.stdout.strip()
    if done.returncode or path in ("", "None"):
        doctor.bad("`import ringspan` fails in this folder", f"pip install ringspan, or change to {ROOT}")
    elif Path(path).resolve() != Path(ringspan.__file__).resolve():
        doctor.bad(
            f"`import ringspan` finds {path} in this folder, and the doctor is of {ringspan.__file__}",
            "ranks would import the former; uninstall one of them, or change to another folder",
        )
    else:
        doctor.good(f"ringspan {ringspan.__version__} in {ROOT}")


def machine(doctor: Doctor) -> None:
    """Check cores, memory, disk space and the C++ compiler."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    doctor.good(f"{num_cores()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}")
    if platform.system() != "Linux":
        doctor.bad(platform.system(), "only Linux is tested")
    shm = Path("/dev/shm")
    if shm.exists() and shutil.disk_usage(shm).total < GIB:
        doctor.note("/dev/shm has less than 1 GiB", "NCCL needs more: docker run --shm-size=8g")
    free = shutil.disk_usage(Path.cwd()).free / GIB
    if free < 5:
        doctor.note(f"the disk of this folder has {free:.1f} GiB free", "a checkpoint takes 12 bytes per weight: set runs=…")
    if shutil.which("g++") is None and shutil.which("c++") is None:
        doctor.note("no C++ compiler", "only engine.offload_optimizer, and engine.compile=on on a CPU, need one")


def gpus(doctor: Doctor) -> None:
    """Check that torch can use the GPUs of this machine."""
    if _version("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        if any(Path("/dev").glob("nvidia[0-9]*")):
            doctor.bad("torch sees no GPU, but there is one", "install a torch for CUDA, or a newer driver")
        else:
            doctor.note("no GPU", "training runs as two gloo ranks on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        doctor.good(f"{index}: {gpu.name}, {gpu.total_memory / GIB:.0f} GiB, sm_{gpu.major}{gpu.minor}")
        free, total = torch.cuda.mem_get_info(index)
        if free < 0.9 * total:
            doctor.note(f"{index}: only {free / GIB:.0f} GiB are free", "nvidia-smi shows which process has the rest")
        if gpu.major < 8:
            doctor.bad(
                f"{index}: sm_{gpu.major}{gpu.minor}",
                "the kernels need sm_80 or newer; parallel.attention=chunked works",
            )
    doctor.good(f"torch for CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")


def network(doctor: Doctor) -> None:
    """List the ports that this user's training processes listen on, and those that other hosts can reach."""
    found = [each for each in listeners.listeners() if any(word in each.command for word in TRAINING)]
    for each in found:
        text = f"{each.address}:{each.port} of process {each.pid} ({each.command[:60]})"
        if each.is_local:
            doctor.good(text)
        else:
            doctor.note(f"{text} takes connections of other hosts", "docs/security.md says what they could do; use a firewall")
    if not found:
        doctor.good("no process of ringspan, torchrun or wandb listens")
    doctor.good("`ringspan launch` listens on the loopback interface only; torchrun's store on every interface")


def links(doctor: Doctor) -> None:
    """Measure the links: every GPU sends to the next one at the same time, as ring attention does."""
    num_gpus = _num_gpus()
    if num_gpus < 2:
        doctor.note(f"{num_gpus} GPU{'s' * (num_gpus != 1)}", "links are measured between two or more")
        return
    ranks = f"Supervisor([sys.executable, '-m', 'ringspan.launch.doctor', '--links'], {num_gpus}, os.environ)"
    code = f"import os, sys; from ringspan.launch.supervisor import Supervisor; sys.exit({ranks}.run().code)"
    command = [sys.executable, "-c", code]
    try:
        # With cwd=ROOT, the ranks import this installation of ringspan.
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1] if done.returncode else ""
        measurements = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    except subprocess.TimeoutExpired:
        reason, measurements = "no answer in 300 seconds", []
    if reason:
        doctor.bad(
            f"{num_gpus} GPUs do not reach each other ({reason})", "NCCL_DEBUG=INFO ringspan doctor --links shows details"
        )
    for result in measurements:
        if "error" in result:
            doctor.note(f"no {result['method']} ({result['error']})", "the ring's transport p2p needs none")
        else:
            speed = f"{result['speed'] / 1e9:.0f} GB/s of {result['mib']} MiB"
            doctor.good(f"{result['method']}: {speed}, all {num_gpus} GPUs concurrently")
    fastest = max((result["speed"] for result in measurements if "speed" in result), default=0.0)
    if fastest:
        tokens = KERNEL_FLOPS / FLOPS_PER_BYTE / fastest
        doctor.good(
            f"attention overlaps all transfers from about {tokens / 1024:.0f}k tokens per GPU, with GQA 4:1 from a quarter of "
            "that"
        )
        if fastest < NVLINK:
            doctor.note(
                "slower than NVLink",
                "nvidia-smi topo -m shows the connections; use that many tokens per GPU, or a smaller parallel.ring",
            )


def _num_gpus() -> int:
    if _version("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def measure_links() -> None:
    """Measure the links as one rank; the first rank prints a line of JSON for each measurement."""
    import torch
    import torch.distributed as dist

    from ringspan.parallel.transport.copy_engine import symmetric_buffers
    from ringspan.trainer.monitoring import supervised
    from ringspan.trainer.network import init_process_group

    supervised.watch()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    init_process_group("nccl", timedelta(minutes=4), device_id=device)
    group = dist.group.WORLD
    assert group is not None

    def send_recv(send: Any, recv: Any) -> None:
        ops = [dist.P2POp(dist.isend, send, (rank + 1) % world), dist.P2POp(dist.irecv, recv, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def copy(send: Any, recv: Any) -> None:
        memory = symmetric_buffers(group, device)
        memory.allocate("links", send.nbytes, device)
        memory.view("links", (rank + 1) % world, 0, send.shape, send.dtype).copy_(send)

    def report(**result: Any) -> None:
        if rank == 0:
            print(json.dumps(result), flush=True)

    for method, transfer in (("messages", send_recv), ("copy engines", copy)):
        for mib in (4, 64, 256):
            send = torch.empty(mib * 2**20, dtype=torch.uint8, device=device)
            recv = torch.empty_like(send)
            try:
                for _ in range(3):
                    transfer(send, recv)
            except RuntimeError as error:  # a property of the host, so all ranks raise it
                report(method=method, error=str(error).splitlines()[0])
                break
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(10):
                transfer(send, recv)
            torch.cuda.synchronize()
            report(method=method, mib=mib, speed=10 * send.nbytes / (time.perf_counter() - start))
    dist.destroy_process_group()


def _version(name: str) -> str | None:
    for package in (name, *OTHER_NAMES.get(name, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def _number(version: str) -> tuple[int, ...]:
    digits = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in digits)


if __name__ == "__main__":
    if "RANK" in os.environ and "--links" in sys.argv:
        measure_links()
    else:
        raise SystemExit(main())
