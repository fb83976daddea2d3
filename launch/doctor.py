"""What this machine is, and what stands in the way: `python -m launch.doctor`, or with --links to measure between GPUs.

Each finding is one line, with what to do about it. Exit code 0: everything that training needs is there.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {"torch": "2.11", "deepspeed": "0.19", "hydra-core": "1.3", "numpy": "1.26"}
OPTIONAL = ["triton", "wandb", "tensorboard", "tokenizers", "tiktoken"]
OURS = ["kernels", "parallel", "trainer", "launch", "conf"]
GIB = 2**30


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
        print(f"python -m launch.doctor: {unknown[0]}: there is only --links", file=sys.stderr)
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
    """NCCL's ring send between all GPUs at once, which is what ring attention does."""
    import torch

    num = torch.cuda.device_count() if _version("torch") else 0
    if num < 2:
        doctor.note(f"{num} GPU{'s' * (num != 1)}", "links are measured between two or more")
        return
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num}",
        "-m",
        "launch.doctor",
        "--links",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no answer"
        doctor.bad(
            f"NCCL between {num} GPUs does not work ({reason})", "NCCL_DEBUG=INFO python -m launch.doctor --links says more"
        )
    for text in done.stdout.splitlines():
        doctor.good(text)


def measure_links() -> None:
    """One rank of the measurement."""
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    for size in (4, 64, 256):
        out = torch.empty(size * 2**20, dtype=torch.uint8, device=device)
        back = torch.empty_like(out)

        def once(out: Any = out, back: Any = back) -> None:
            ops = [dist.P2POp(dist.isend, out, (rank + 1) % world), dist.P2POp(dist.irecv, back, (rank - 1) % world)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        for _ in range(3):
            once()
        torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(10):
            once()
        torch.cuda.synchronize()
        if rank == 0:
            speed = 10 * size * 2**20 / (time.perf_counter() - began) / 1e9
            print(f"ring send of {size} MiB, all {world} at once: {speed:.0f} GB/s")
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
