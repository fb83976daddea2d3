"""The rules of the house that no single room can hold: imports point one way, every room says what it is for."""

import ast
import graphlib
import importlib.util
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ["kernels", "parallel", "trainer", "launch"]  # each may import itself and what stands before it
Import = tuple[str, int, str]  # importing module, line, imported module


def modules(root: Path) -> dict[str, Path]:
    """Every module of the four packages, by the name it is imported under."""
    files = [path for floor in FLOORS for path in sorted((root / floor).rglob("*.py"))]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports(root: Path) -> Iterator[Import]:
    """All imports, those inside functions and under TYPE_CHECKING too: a late circle is still a circle."""
    known = modules(root)
    for module, path in known.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                yield from ((module, node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                try:
                    source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                except ImportError:  # more dots than the module has parents: `from ..trainer import model`
                    source = node.module or ""
                for alias in node.names:
                    name = f"{source}.{alias.name}"
                    yield module, node.lineno, name if name in known else source


def wrong_imports(root: Path) -> list[str]:
    wrong = []
    for module, line, imported in imports(root):
        floor, target = module.partition(".")[0], imported.partition(".")[0]
        if target == "tests" or (target in FLOORS and FLOORS.index(target) > FLOORS.index(floor)):
            wrong.append(f"{module}:{line} imports {imported}")
    return wrong


def circle(root: Path) -> list[str]:
    """The modules of one circle of imports, or nothing."""
    known = modules(root)
    graph: dict[str, set[str]] = {module: set() for module in known}
    for module, _, imported in imports(root):
        if imported in known and imported != module:
            graph[module].add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_imports_point_one_way() -> None:
    assert wrong_imports(ROOT) == []


def test_imports_have_no_circles() -> None:
    assert circle(ROOT) == []


@pytest.mark.parametrize(
    "line",
    [
        "import trainer",
        "import trainer.model as model",
        "from trainer import model",
        "from trainer.model import GPT",
        "from ..trainer import model",
        "def late():\n    import trainer.model",
        "from tests import house",
    ],
)
def test_a_wrong_import_is_caught(tmp_path: Path, line: str) -> None:
    plant(tmp_path, {"parallel/__init__.py": "", "parallel/ring.py": line, "trainer/model.py": "import parallel.ring"})
    assert [found.partition(":")[0] for found in wrong_imports(tmp_path)] == ["parallel.ring"]


@pytest.mark.parametrize("line", ["import kernels.mask", "from kernels import mask", "from .mesh import Mesh", "import torch"])
def test_a_right_import_is_left_alone(tmp_path: Path, line: str) -> None:
    plant(tmp_path, {"kernels/__init__.py": "", "parallel/ring.py": line, "parallel/mesh.py": ""})
    assert wrong_imports(tmp_path) == []


@pytest.mark.parametrize("line", ["from .a import thing", "from . import a", "from kernels import thing"])
def test_a_circle_is_caught(tmp_path: Path, line: str) -> None:
    files = {"__init__": "from .a import thing", "a": "from .b import thing", "b": line}
    plant(tmp_path, {f"kernels/{name}.py": text for name, text in files.items()})
    assert {"kernels.a", "kernels.b"} <= set(circle(tmp_path))


def test_a_package_may_import_its_own_modules(tmp_path: Path) -> None:
    files = {"__init__": "from .a import thing", "a": "from . import b", "b": ""}
    plant(tmp_path, {f"kernels/{name}.py": text for name, text in files.items()})
    assert circle(tmp_path) == []


def test_every_package_says_what_belongs_in_it() -> None:
    folders = {path.parent for path in modules(ROOT).values()}
    assert {ROOT / floor for floor in FLOORS} <= folders
    for folder in sorted(folders):
        package = folder / "__init__.py"
        assert package.exists() and ast.get_docstring(ast.parse(package.read_text())), f"{package} needs a docstring"


def test_transformers_imports_beside_us(tmp_path: Path) -> None:
    """It looks for another distribution's `kernels`, finds ours, and goes by the version that ours is installed under.

    A distribution's record stands in for an installation, because here the packages are used from the folder itself.
    """
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    record = f"ringspan-{project['version']}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: ringspan\nVersion: {project['version']}\n"
    plant(tmp_path, {f"{record}/METADATA": metadata, f"{record}/top_level.txt": "\n".join(FLOORS)})
    program = "import transformers, kernels; transformers.LlamaForCausalLM; print(kernels.__file__)"
    # The record first, and -P keeps the folder itself from going before it: an old build may have left one there.
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "kernels" / "__init__.py"
