"""`make compat-hf`: Ringspan next to transformers and Hugging Face's `kernels`, from the checkout and from a wheel.

Each environment is a fresh venv with the dependencies of ringspan[train]. In it one process imports Hugging Face's `kernels`,
runs a tiny Llama of transformers and `ringspan.attention`; then `ringspan launch` trains two steps on two ranks, and a sweep
runs two jobs. Needs a package index and about ten minutes; no GPU.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = {
    "pinned": ["transformers==5.22.0", "kernels==0.17.2"],  # with this pair our former top-level `kernels` broke every model
    "newest": ["transformers", "kernels"],
}
PROGRAM = """
import sys
import kernels
import torch
import transformers

assert "site-packages" in kernels.__file__, kernels.__file__
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
model = transformers.LlamaForCausalLM(config)
logits = model(torch.randint(64, (1, 16))).logits
assert logits.shape == (1, 16, 64) and logits.isfinite().all()

import ringspan

q = torch.randn(1, 16, 4, 16)
out = ringspan.attention(q, q, q, mask=ringspan.Mask(causal=True))
assert torch.allclose(out[:, 0], q[:, 0], atol=1e-6)
names = {"kernels": kernels.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
print(", ".join(f"{name} {version}" for name, version in names.items()), "| ringspan from", ringspan.ROOT)
"""


def run(command: list[str], cwd: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"failed in {cwd}: {' '.join(command)[:200]}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["train"]]


def check(python: str, cwd: Path, runs: Path) -> None:
    """The program, a training run on two ranks, and a sweep of two jobs, started in `cwd`."""
    print(run([python, "-c", PROGRAM], cwd).strip())
    launch = [python, "-m", "ringspan", "launch"]
    options = ["--ranks=2", "experiment=laptop", "steps=2", "parallel.device=cpu", "evaluate.batches=1", f"runs={runs}"]
    for arguments in ([*options], ["--multirun", *options, "seed=1,2"]):
        text = run([*launch, *arguments], cwd)
        assert "step 2" in text or "2/2" in text, text
    folders = sorted(path.parent.name for path in runs.rglob("finished.json"))
    assert len(folders) == 3, folders
    print(f"  trained on two ranks, and a sweep of two jobs: {', '.join(folders)}")


def main(argv: list[str]) -> int:
    names = argv or list(ENVIRONMENTS)
    if unknown := set(names) - set(ENVIRONMENTS):
        raise SystemExit(f"there is no environment {', '.join(sorted(unknown))}; choose among {', '.join(ENVIRONMENTS)}")
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder)
        run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(ROOT)], temporary)
        (wheel,) = temporary.glob("ringspan-*.whl")
        for name in names:
            print(f"{name}: {' '.join(ENVIRONMENTS[name])}", flush=True)
            venv = temporary / name
            run([sys.executable, "-m", "venv", str(venv)], temporary)
            python = str(venv / "bin/python")
            constraints = temporary / "constraints.txt"  # ours, but for the packages that an environment chooses
            lines = (ROOT / "constraints.txt").read_text().splitlines()
            constraints.write_text("\n".join(line for line in lines if not line.startswith(("transformers", "tokenizers"))))
            pip = [python, "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
            run([*pip, *requirements(), *ENVIRONMENTS[name]], temporary, DS_BUILD_OPS="0")
            print(" from the checkout", flush=True)
            check(python, ROOT, temporary / f"runs-{name}-checkout")
            print(" from the wheel", flush=True)
            run([*pip, "--no-deps", str(wheel)], temporary)
            outside = temporary / f"outside-{name}"
            outside.mkdir()
            check(python, outside, temporary / f"runs-{name}-wheel")
            run(["rm", "-rf", str(venv)], temporary)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
