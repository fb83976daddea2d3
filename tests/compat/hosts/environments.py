"""`make hosts`: the tests of each host in an environment of its own, with the host's installed package.

Each environment is a venv in .venv/hosts, made once, with Ringspan's dependencies in the versions of constraints.txt and the
host. A host whose interface changed is one line with both versions. Needs a package index; no GPU.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".venv" / "hosts"
PINNED = ("torch", "triton", "numpy", "pytest")  # of constraints.txt; hosts choose the rest
BASE = ("torch", "triton", "numpy", "pytest", "setuptools", "wheel", "packaging", "psutil", "ninja")


class Host(NamedTuple):
    """Packages of an environment, and the tests that run in it."""

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()  # hosts that need a GPU's packages, or other versions of torch


HOSTS = {
    "flash-attn": Host((), ("tests/compat/hosts/test_packages.py",), ("flash-attn==2.8.3.post2", "ring-flash-attn==0.1.8")),
    "deepspeed": Host(
        ("deepspeed==0.19.8", "accelerate==1.15.0", "transformers==5.24.0"), ("tests/compat/test_ulysses_sp.py",)
    ),
    "olmo-core": Host(("ai2-olmo-core==3.0.0",), ("tests/compat/hosts/test_olmo_core.py",)),
    "torchtitan": Host(("torchtitan==0.3.0",), ("tests/compat/hosts/test_torchtitan.py",)),
    "axolotl": Host(
        ("transformers==5.24.0", "accelerate==1.15.0", "colorama"),
        ("tests/compat/hosts/test_axolotl.py",),
        ("axolotl==0.19.0",),
    ),
}
BUILD = dict(  # of flash-attn, whose Python files are all that the tests read; of DeepSpeed, which builds kernels on use
    FLASH_ATTENTION_SKIP_CUDA_BUILD="TRUE", FLASH_ATTENTION_FORCE_BUILD="TRUE", DS_BUILD_OPS="0"
)


def constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.partition("==")[0] in PINNED]


def prepare(name: str, host: Host) -> Path:
    """Make the environment if it does not exist, or was made from other lists; return its Python."""
    folder = FOLDER / name
    python, mark = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join([*constraints(), *BASE, *host.packages, *host.without_dependencies])
    if mark.exists() and mark.read_text() == wanted:
        return python
    print(f"{name}: installing into {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    (folder / "constraints.txt").write_text("\n".join(constraints()))
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", folder / "constraints.txt"]
    steps = [[*pip, *BASE], [*pip, *host.packages], [*pip, "--no-deps", "--no-build-isolation", *host.without_dependencies]]
    for step in steps:
        if not str(step[-1]).endswith("constraints.txt") and step[-1] != "--no-build-isolation":
            done = subprocess.run(step, env=os.environ | BUILD, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name}: pip failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    mark.write_text(wanted)
    return python


def run(name: str, host: Host) -> bool:
    """Run a host's tests, and print one line, or one for each failure."""
    python = prepare(name, host)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *host.tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    print(f"{name} ({', '.join([*host.packages, *host.without_dependencies])}): {last}", flush=True)
    if done.returncode or "skipped" in last or "passed" not in last:
        (FOLDER / f"{name}.log").write_text(done.stdout + done.stderr)
        for failure in re.split(r"^_+ test_.* _+$", done.stdout, flags=re.MULTILINE)[1:]:
            reason = re.search(r"^E +(.*)$", failure, re.MULTILINE)
            print(f"  {reason[1] if reason else failure.strip().splitlines()[-1]}")
        print(f"  the whole output is in {FOLDER / name}.log", flush=True)
        return False
    return True


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in HOSTS]
    if unknown:
        raise SystemExit(f"hosts={unknown}: choose of {', '.join(HOSTS)}")
    results = [run(name, HOSTS[name]) for name in names or HOSTS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
