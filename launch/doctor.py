"""What this machine is, and what stands in the way: `ringspan doctor`, or with --links to measure between GPUs.

Each finding is one line, with what to do about it. Exit code 0: everything that training needs is there.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ringspan import ROOT

NEEDED = {"torch": "2.11", "deepspeed": "0.19", "hydra-core": "1.3", "numpy": "1.26"}
OPTIONAL = ["triton", "wandb", "tensorboard", "tokenizers", "tiktoken"]
OURS = ["kernels", "parallel", "trainer", "launch", "conf"]
GIB = 2**30
KERNEL, NVLINK = 6e14, 1e11  # FLOP/s of our kernels on Hopper, and bytes a second that NVLink has at least
# A causal backward's block of n · n tokens takes 5 n² FLOPs for each column of a query head, and for each of a KV head travel
# 12 n bytes: 4 of K and V, 8 of their gradients in fp32. (A forward has 2 n² and 4 n.)
FLOPS_A_BYTE = 5 / 12  # times n


class Doctor:
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
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    if unknown := [text for text in argv if text != "--links"]:
        print(f"ringspan doctor: {unknown[0]}: there is only --links", file=sys.stderr)
        return 2
    doctor = Doctor()
    for title, examine in (("versions", versions), ("names", names), ("machine", machine), ("GPUs", gpus)):
        print(title)
        examine(doctor)
    if "--links" in argv:
        print("links")
        links(doctor)
    print(
        f"{doctor.problems} problem{'s' * (doctor.problems != 1)}"
        if doctor.problems
        else "nothing stands in the way: make train"
    )
    return int(doctor.problems > 0)


def versions(doctor: Doctor) -> None:
    doctor.good(f"Python {platform.python_version()}")
    for name, least in NEEDED.items():
        found = _version(name)
        if found is None:
            doctor.bad(f"{name} is not installed", "make train installs it into .venv")
        elif _number(found) < _number(least):
            doctor.bad(f"{name} {found}", f"{least} or newer is needed")
        else:
            doctor.good(f"{name} {found}")
    for name in OPTIONAL:
        found = _version(name)
        doctor.good(f"{name} {found}") if found else doctor.note(f"{name} is not installed", f"optional; pip install {name}")


def names(doctor: Doctor) -> None:
    """Other packages use some of our names."""
    for name in OURS:
        spec = importlib.util.find_spec(name)
        places = [spec.origin] if spec and spec.origin else list(spec.submodule_search_locations or []) if spec else []
        if places and not str(places[0]).startswith(str(ROOT)):
            doctor.bad(f"`import {name}` finds {places[0]}", f"it hides ours; uninstall that package, or run from {ROOT}")
    doctor.good(f"{', '.join(OURS)} are ours")


def machine(doctor: Doctor) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    doctor.good(f"{cores} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}")
    if platform.system() != "Linux":
        doctor.bad(platform.system(), "only Linux is tested")
    shm = Path("/dev/shm")
    if shm.exists() and shutil.disk_usage(shm).total < GIB:
        doctor.note("/dev/shm has less than 1 GiB", "NCCL wants more: docker run --shm-size=8g")
    free = shutil.disk_usage(ROOT).free / GIB
    if free < 5:
        doctor.note(f"{free:.1f} GiB are free here", "a checkpoint takes 12 bytes a weight: set runs=…")
    if shutil.which("g++") is None and shutil.which("c++") is None:
        doctor.note(
            "no C++ compiler", "needed for engine.offload_optimizer and engine.compile=on on a CPU; the rest works without"
        )


def gpus(doctor: Doctor) -> None:
    if _version("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        seen = any(Path("/dev").glob("nvidia[0-9]*"))
        if seen:
            doctor.bad("torch sees no GPU, but there is one", "install a torch for CUDA, or a newer driver")
        else:
            doctor.note("no GPU", "two gloo ranks on the CPU stand in: make train")
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        doctor.good(f"{index}: {found.name}, {found.total_memory / GIB:.0f} GiB, sm_{found.major}{found.minor}")
        free, total = torch.cuda.mem_get_info(index)
        if free < 0.9 * total:
            doctor.note(f"{index}: only {free / GIB:.0f} GiB are free", "nvidia-smi shows who has the rest")
        if found.major < 8:
            doctor.bad(
                f"{index}: sm_{found.major}{found.minor}",
                "the kernels need sm_80 or newer; parallel.attention=chunked works",
            )
    doctor.good(f"torch for CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")


def links(doctor: Doctor) -> None:
    """From each GPU to the next, all at once, which is what ring attention does."""
    num = _num_gpus()
    if num < 2:
        doctor.note(f"{num} GPU{'s' * (num != 1)}", "links are measured between two or more")
        return
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}", "-m", "ringspan.launch.doctor", "--links"]
    try:
        done = subprocess.run([sys.executable, *run], cwd=ROOT, capture_output=True, text=True, timeout=300)
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1] if done.returncode else ""
        measured = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    except subprocess.TimeoutExpired:
        reason, measured = "no answer in 300 seconds", []
    if reason:
        doctor.bad(f"{num} GPUs do not reach each other ({reason})", "NCCL_DEBUG=INFO ringspan doctor --links says more")
    for found in measured:
        if "error" in found:
            doctor.note(f"no {found['way']} ({found['error']})", "parallel.transport=p2p needs none")
        else:
            doctor.good(f"{found['way']}: {found['speed'] / 1e9:.0f} GB/s of {found['mib']} MiB, all {num} GPUs at once")
    fastest = max((found["speed"] for found in measured if "speed" in found), default=0.0)
    if fastest:
        tokens = KERNEL / FLOPS_A_BYTE / fastest
        doctor.good(
            f"travel hides behind attention from some {tokens / 1024:.0f}k tokens a GPU on, with GQA 4:1 from a quarter"
        )
        if fastest < NVLINK:
            doctor.note(
                "slower than NVLink",
                "nvidia-smi topo -m shows what is between them; have as many tokens a GPU, or a smaller parallel.ring",
            )


def _num_gpus() -> int:
    if _version("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def measure_links() -> None:
    """One rank of the measurement. The first prints a line of JSON for each."""
    import torch
    import torch.distributed as dist

    from ringspan.parallel.transport.copy_engine import shown_by

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

    def messages(out: Any, back: Any) -> None:
        ops = [dist.P2POp(dist.isend, out, (rank + 1) % world), dist.P2POp(dist.irecv, back, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def copies(out: Any, back: Any) -> None:
        shown = shown_by(dist.group.WORLD, device)
        shown.make_room("links", out.nbytes, device)
        shown.rows("links", (rank + 1) % world, 0, out.shape, out.dtype).copy_(out)

    def tell(**found: Any) -> None:
        if rank == 0:
            print(json.dumps(found), flush=True)

    for way, once in (("messages", messages), ("copy engines", copies)):
        for mib in (4, 64, 256):
            out = torch.empty(mib * 2**20, dtype=torch.uint8, device=device)
            back = torch.empty_like(out)
            try:
                for _ in range(3):
                    once(out, back)
            except RuntimeError as error:  # on all ranks alike: it is about what this host has
                tell(way=way, error=str(error).splitlines()[0])
                break
            torch.cuda.synchronize()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(10):
                once(out, back)
            torch.cuda.synchronize()
            tell(way=way, mib=mib, speed=10 * out.nbytes / (time.perf_counter() - began))
    dist.destroy_process_group()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _number(version: str) -> tuple[int, ...]:
    digits = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in digits)


if __name__ == "__main__":
    if "RANK" in os.environ and "--links" in sys.argv:
        measure_links()
    else:
        raise SystemExit(main())
