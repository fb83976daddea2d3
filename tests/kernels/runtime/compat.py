"""The kernels for Hopper, compiled ahead of time by each Triton that we support. No GPU needed; pip fetches the versions.

python -m tests.kernels.compat                   what `make compat` runs: all versions
python -m tests.kernels.compat 3.8 3.9

Each version goes into a folder of its own that is thrown away afterwards, and stands before the installed one on the path.
The limits are those of the tests (`ahead.wrong`), which hold the installed version to them.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.kernels.runtime.ahead import NAMED, wrong

VERSIONS = ("3.6", "3.7", "3.8", "3.9")
GROUPS = ("hopper", "sm_90")
# At most forty, which the tests hold. The tests' own Triton alone compiles a block seen whole, small sums, and the portable
# backward with softcap.
OURS_ALONE = ("d128-block", "sum_and_cast", "sm_90/d128-softcap/attention_backward")
KERNELS = [name for name in NAMED if name.startswith(GROUPS) and not any(kernel in name for kernel in OURS_ALONE)]
ROOT = Path(__file__).resolve().parents[3]


def install(version: str, folder: Path) -> str:
    """Triton alone into a folder: what is wrong, or nothing."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--target", folder, f"triton=={version}.*"], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"pip could not install it: {last_line(done.stderr)}"


def compile_with(version: str, folder: Path) -> dict[str, dict[str, Any]]:
    """What each kernel takes with the Triton in this folder; every one an error if it does not get that far."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(folder), environment.get("PYTHONPATH")]))
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache")}
    program = f"import triton; assert triton.__version__.startswith('{version}.'), triton.__version__"
    for command in (["-c", program], ["-m", "tests.kernels.runtime.ahead", *GROUPS]):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            return failed(last_line(done.stderr))
    return json.loads(done.stdout.splitlines()[-1])


def failed(why: str) -> dict[str, dict[str, Any]]:
    return {name: {"error": why} for name in KERNELS}


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1][:200]


def rows(version: str, results: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    """The table's lines for one version, and whether all is well."""
    lines, well = [], True
    for name in KERNELS:
        kernel = results.get(name, {"error": "was not compiled"})
        problem = wrong(name, kernel, version)
        shared, spills = (kernel.get(key, "-") for key in ("shared", "spills"))
        lines.append(f"{version:<9}{name:<48}{shared:>8}{spills:>8}  {problem or 'ok'}")
        well &= not problem
    return lines, well


def main(argv: list[str]) -> int:
    """0, or 1 if a kernel is not what it should be with some version."""
    if unknown := [version for version in argv if version not in VERSIONS]:
        raise SystemExit(f"{', '.join(unknown)}: the versions that we support are {', '.join(VERSIONS)}")
    print(f"{'triton':<9}{'kernel':<48}{'shared':>8}{'spills':>8}  bytes", flush=True)
    well = True
    for version in argv or VERSIONS:
        with tempfile.TemporaryDirectory() as name:
            problem = install(version, Path(name))
            results = failed(problem) if problem else compile_with(version, Path(name))
        lines, fine = rows(version, results)
        print(*lines, sep="\n", flush=True)
        well &= fine
    return int(not well)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
