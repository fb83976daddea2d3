"""Compile a launch for a chip that this machine does not have; read registers, spills and shared memory from the binary."""

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


def select_target(chip_name: str) -> None:
    """Make Triton compile for a chip, "sm_90", "gfx942", …, in this process."""
    amd = chip_name.startswith("gfx")
    target = GPUTarget("hip", chip_name, 64) if amd else GPUTarget("cuda", int(chip_name.removeprefix("sm_")), 32)
    triton.runtime.driver.set_active(_FakeDriver(target))


@dataclass
class Compiled:
    """Resources of one compiled kernel, read from its binary."""

    shared: int  # bytes of shared memory
    registers: int  # per thread
    spills: int  # bytes per thread (NVIDIA: stack; AMD: registers spilled)
    warpgroup: bool  # whether it uses Hopper's warpgroup matmul (wgmma)
    log: str  # messages of the assembler
    ptx: str  # empty on AMD
    sass: str = ""  # of warp-specialised kernels only


def compile_ahead(launch: Launch, chip_name: str) -> Compiled:
    """Compile a launch for "sm_90", "gfx942", …, with the same types and divisibility as the launch itself. Needs no GPU."""
    amd = chip_name.startswith("gfx")
    select_target(chip_name)
    try:
        kernel = launch.compile(*launch.make_arguments())
    finally:
        if torch.cuda.is_available():
            triton.runtime.driver.reset_active()
    if amd:
        text = kernel.asm["amdgcn"]
        registers, spills = (_number(rf"\.{key}:\s+(\d+)", text) for key in ("vgpr_count", "vgpr_spill_count"))
        return Compiled(kernel.metadata.shared, registers, spills, False, "", "")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

        def dump(section: str) -> str:
            return subprocess.run([tool, f"--dump-{section}", file.name], capture_output=True, text=True, check=True).stdout

        usage, ptx = dump("resource-usage"), kernel.asm["ptx"]
        log, sass = (_assemble(ptx), dump("sass")) if "setmaxnreg" in ptx else ("", "")
    registers, stack, local = (_number(rf"{key}:(\d+)", usage) for key in ("REG", "STACK", "LOCAL"))
    return Compiled(kernel.metadata.shared, registers, stack + local, "wgmma" in ptx, log, ptx, sass)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, f"pattern={pattern!r}: not in the compiler's output"
    return int(match[1])


def _assemble(ptx: str) -> str:
    """Return ptxas's messages for a warp-specialised kernel, for example that it serialised the matmuls."""
    from triton.backends.nvidia.compiler import get_ptxas  # a local import, because AMD builds of Triton may lack it

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", file.name, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


class _FakeDriver:
    """Stand-in for the driver of a GPU that this machine does not have."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        return self.target  # any hashable value: the key of Triton's per-device caches

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0
