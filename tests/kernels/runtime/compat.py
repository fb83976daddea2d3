"""The Hopper kernels, compiled ahead of time by each supported Triton version. Needs no GPU; pip downloads the versions.

python -m tests.kernels.runtime.compat                   all versions (`make compat`)
python -m tests.kernels.runtime.compat 3.8 3.9

Each version is installed into a temporary folder that precedes the installed one on the path. The limits are those of the
tests (`ahead.problems`).
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.kernels.runtime.ahead import KERNEL_NAMES, problems

VERSIONS = ("3.6", "3.7", "3.8", "3.9")
GROUPS = ("hopper", "sm_90")
# A test limits the number of kernels. Fully visible blocks, gradient sums, the portable backward with softcap and some head
# dims in two chunks are compiled by the installed Triton only.
INSTALLED_ONLY = (
    *("d128-block", "sum_and_cast", "sm_90/d128-softcap/attention_backward", "sm_90/d96-causal"),
    *("d80-causal", "d112-causal", "d160-causal", "d96-ring", "d96-window", "d192-128-ring"),
    *("d128-visible/attention_forward", "d128-visible/attention_backward_dq"),
)
KERNELS = [name for name in KERNEL_NAMES if name.startswith(GROUPS) and not any(kernel in name for kernel in INSTALLED_ONLY)]
ROOT = Path(__file__).resolve().parents[3]


def install(version: str, folder: Path) -> str:
    """Install Triton without dependencies into a folder; return the error, or an empty string."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    process = subprocess.run([*command, "--target", folder, f"triton=={version}.*"], capture_output=True, text=True)
    return "" if process.returncode == 0 else f"pip could not install it: {last_line(process.stderr)}"


def compile_with(version: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return each kernel's resources with the Triton in this folder; if its process fails, an error for each."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(folder), environment.get("PYTHONPATH")]))
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache")}
    program = f"import triton; assert triton.__version__.startswith('{version}.'), triton.__version__"
    for command in (["-c", program], ["-m", "tests.kernels.runtime.ahead", *GROUPS]):
        process = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
        if process.returncode:
            return failed(last_line(process.stderr))
    return json.loads(process.stdout.splitlines()[-1])


def failed(reason: str) -> dict[str, dict[str, Any]]:
    return {name: {"error": reason} for name in KERNELS}


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1][:200]


def rows(version: str, results: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    """Return the table's lines for one version, and whether every kernel is within its limits."""
    lines, passed = [], True
    for name in KERNELS:
        kernel = results.get(name, {"error": "was not compiled"})
        problem = problems(name, kernel, version)
        shared, spills = (kernel.get(key, "-") for key in ("shared", "spills"))
        lines.append(f"{version:<9}{name:<48}{shared:>8}{spills:>8}  {problem or 'ok'}")
        passed &= not problem
    return lines, passed


def main(argv: list[str]) -> int:
    """Return 0, or 1 if a kernel exceeds a limit with some version."""
    if unknown := [version for version in argv if version not in VERSIONS]:
        raise SystemExit(f"{', '.join(unknown)}: the versions that we support are {', '.join(VERSIONS)}")
    print(f"{'triton':<9}{'kernel':<48}{'shared':>8}{'spills':>8}  bytes", flush=True)
    passed = True
    for version in argv or VERSIONS:
        with tempfile.TemporaryDirectory() as name:
            problem = install(version, Path(name))
            results = failed(problem) if problem else compile_with(version, Path(name))
        lines, version_passed = rows(version, results)
        print(*lines, sep="\n", flush=True)
        passed &= version_passed
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
