"""Compile a launch for a chip that this machine does not have, and read registers, spills and shared memory from the binary."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from ringspan.kernels.runtime.launch import Launch


@dataclass
class Compiled:
    """What one kernel takes of a chip, read from its binary."""

    shared: int  # bytes of shared memory
    registers: int  # per thread
    spills: int  # bytes per thread (NVIDIA: stack; AMD: registers spilled)
    warpgroup: bool  # Hopper's warpgroup products
    log: str  # what the assembler said
    ptx: str  # nothing on AMD
    sass: str = ""  # of warp-specialised kernels


def compile_ahead(launch: "Launch", chip_name: str) -> Compiled:
    """Compile a launch for a chip that need not be here, exactly as the launch would: same types, same divisibility."""
    amd = chip_name.startswith("gfx")
    target = GPUTarget("hip", chip_name, 64) if amd else GPUTarget("cuda", int(chip_name.removeprefix("sm_")), 32)
    triton.runtime.driver.set_active(_Absent(target))
    try:
        programs, arguments = launch.worked_out()
        kernel = launch.kernel.warmup(**arguments, grid=(programs,))
    finally:
        if torch.cuda.is_available():
            triton.runtime.driver.reset_active()
    if amd:
        text = kernel.asm["amdgcn"]
        number = {key: int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in ("vgpr_count", "vgpr_spill_count")}
        return Compiled(kernel.metadata.shared, number["vgpr_count"], number["vgpr_spill_count"], False, "", "")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

        def dump(what: str) -> str:
            return subprocess.run([tool, f"--dump-{what}", file.name], capture_output=True, text=True, check=True).stdout

        usage, ptx = dump("resource-usage"), kernel.asm["ptx"]
        log, sass = (_assemble(ptx), dump("sass")) if "setmaxnreg" in ptx else ("", "")
    number = {key: int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL")}
    spills = number["STACK"] + number["LOCAL"]
    return Compiled(kernel.metadata.shared, number["REG"], spills, "wgmma" in ptx, log, ptx, sass)


def _assemble(ptx: str) -> str:
    """What the assembler has to say of a warp-specialised kernel: that it had to put products one after another, for one."""
    from triton.backends.nvidia.compiler import get_ptxas  # only here: builds for AMD can lack it

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", file.name, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


class _Absent:
    """Stands where Triton expects the driver of a GPU, and knows only which one it would be."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        return self.target  # Triton's caches are kept per device

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0
