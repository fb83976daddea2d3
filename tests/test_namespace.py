"""The package `ringspan`: lazy typed names, the command, and what a wheel contains. test_readme.py starts every program."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import ringspan
from ringspan.__main__ import COMMANDS, NEEDS_TRAIN_EXTRA, main

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "parallel", "trainer", "launch")
REPORT = """
import json, runpy, sys
module, *arguments = sys.argv[1:]
sys.argv = [module, *arguments]
code = 0
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as stop:
    code = stop.code or 0
top_level = [name for name in sys.modules if name.partition(".")[0] in ("kernels", "parallel", "trainer", "launch")]
print("\\n" + json.dumps(dict(code=code, top_level=top_level, torch="torch" in sys.modules)))
"""


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def cpu_seconds(*command: str, cwd: Path = ROOT) -> float:
    """User and system time of a command, which other processes on the machine do not change much."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(*command, cwd=cwd)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_public_names_are_lazy_and_complete() -> None:
    program = "import sys, ringspan; assert 'torch' not in sys.modules; print(sorted(ringspan.__all__) == ringspan.__all__)"
    assert run(sys.executable, "-c", program).stdout.strip() == "True"
    assert list(ringspan._MODULES) == ringspan.__all__ and set(ringspan.__all__) <= set(dir(ringspan))
    for name in ringspan.__all__:
        assert getattr(ringspan, name).__module__ == ringspan._MODULES[name]
    with pytest.raises(AttributeError, match="no attribute 'attentoin'; public names: Layout"):
        ringspan.attentoin  # noqa: B018


def test_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ringspan.__version__"}
    assert f"## {ringspan.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_command_lists_and_dispatches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    listing = capsys.readouterr().out
    assert all(name in listing for name in COMMANDS)
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"ringspan {ringspan.__version__}\n"
    called: list[list[str]] = []
    import ringspan.launch.doctor as doctor

    monkeypatch.setattr(doctor, "main", lambda argv: called.append(argv) or 3)
    assert main(["doctor", "--links"]) == 3 and called == [["--links"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chek"], "no command 'chek'; did you mean `ringspan check`?"),
        (["bench", "rings"], "no command 'bench rings'; did you mean `ringspan bench ring`?"),
        (["nonsense"], "no command 'nonsense'"),
        (["bench"], "no command 'bench'"),
    ],
)
def test_an_unknown_command_names_the_nearest(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "bench kernels" in error


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for command in NEEDS_TRAIN_EXTRA:
        assert main([command, "steps=1"]) == 2
        assert 'pip install "ringspan[train]"' in capsys.readouterr().err


def test_a_base_environment_has_attention_and_the_ring(tmp_path: Path) -> None:
    """Folders of these names that raise stand for packages that are not installed."""
    for name in ("deepspeed", "hydra", "omegaconf", "wandb"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name}', name='{name}')")
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import torch; from ringspan import *\n"
        "q = torch.randn(1, 8, 2, 16); attention(q, q, q)\n"
        "ring_attention(q, q, q, layout=Layout('zigzag', length=8, ranks=1))\n"
        "assert 'torch._dynamo' not in sys.modules  # its import takes as long as torch's\n"
        "import ringspan.kernels.bench.__main__, ringspan.launch.doctor\n"
        "try: import ringspan.trainer.train\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    done = run(sys.executable, "-c", program, cwd=tmp_path)
    assert 'pip install "ringspan[train]"' in done.stdout, done.stderr


def test_commands_without_torch_answer_fast() -> None:
    python = sys.executable
    assert cpu_seconds(python, "-m", "ringspan", "--help") < 2
    plan = ["check", "experiment=llama_8b_1m", "hardware=h200", "hardware.gpus=4"]
    assert cpu_seconds(python, "-m", "ringspan", *plan) < 2
    report = run(python, "-c", REPORT, "ringspan", *plan).stdout.strip().splitlines()[-1]
    assert json.loads(report) == dict(code=0, top_level=[], torch=False)


def test_types_reach_users_and_checks_reach_the_folders(tmp_path: Path) -> None:
    """mypy follows the links: it reports an error planted in kernels/, and a user's `ringspan.attention` has a type."""
    for folder in ("ringspan", *FOLDERS):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "kernels/segments.py").open("a") as file:
        file.write("\nplanted: int = 'text'\n")
    (tmp_path / "user.py").write_text("import ringspan\n\nreveal_type(ringspan.attention)\nreveal_type(ringspan.Mesh)\n")
    mypy = [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache/namespace")]
    text = run(*mypy, "--config-file", "pyproject.toml", "-p", "ringspan.kernels", cwd=tmp_path).stdout
    assert "kernels/segments.py" in text and 'expression has type "str", variable has type "int"' in text, text
    text = run(*mypy, "--config-file=", "user.py", cwd=tmp_path).stdout
    revealed = re.findall(r"Revealed type is \"(.*)\"", text)
    assert len(revealed) == 2 and all("Tensor" in name or "Mesh" in name for name in revealed), text


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # builds leave files next to the sources
    files = run("git", "ls-files", "-z").stdout.split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    done = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("ringspan-*.whl")
    return path


def test_the_wheel_has_every_shipped_file_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    shipped = run("git", "ls-files", "ringspan", *FOLDERS, "conf").stdout.split()
    links = {f"ringspan/{name}" for name in (*FOLDERS, "conf")}
    expected = {name if name.startswith("ringspan/") else f"ringspan/{name}" for name in shipped if name not in links}
    expected = {name for name in expected if (ROOT / name).exists()}
    packed = {name for name in names if ".dist-info/" not in name}
    assert len(names) == len(set(names)) and packed == {name for name in expected if not name.endswith("conf/README.md")}


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_a_command_quietly(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | dict(PYTHONUNBUFFERED=unbuffered)
    command = [sys.executable, "-m", "ringspan", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_terminal_without_a_character_shows_its_code() -> None:
    code = "from ringspan import __main__; __main__.usage = lambda: '1 × 2'; __main__.main([])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | dict(PYTHONIOENCODING="ascii"), capture_output=True, text=True
    )
    assert done.stdout == "1 \\xd7 2\n", done.stderr


def test_the_planner_finds_measured_speeds_in_the_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); "
        "from ringspan.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    plan = ["check", "experiment=llama_8b_1m", "hardware=h200", "hardware.gpus=4"]
    done = run(sys.executable, "-I", "-c", program, *plan, cwd=tmp_path)
    assert re.search(r"in (attention|memory)-\S+\.json", done.stdout), done.stdout + done.stderr
