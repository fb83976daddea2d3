"""Import rules: one direction between packages, no cycles, absolute imports of one namespace, rules between sub-folders."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["kernels", "parallel", "trainer", "launch"]  # each may import itself and the folders before it
PLUGINS = ("ringspan.hf", "ringspan.compat", "ringspan.integrations")  # import parallel and kernels; no folder imports them
BENCH_USERS = ("ringspan.trainer.reports.results", "ringspan.trainer.evaluation.command")  # report tools
BACKENDS = "ringspan.kernels.backends."
BACKEND_MAY_IMPORT = {"hopper": {"triton"}, "chunked": {"reference"}}
SHARED = {"block", "choose"}  # modules of backends that are no backend


class Import(NamedTuple):
    module: str
    line: int
    imported: str  # a module, or a package whose name is imported


def modules(root: Path) -> dict[str, Path]:
    """Every module of the four folders by its import name."""
    files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return {"ringspan." + ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p for p in files}


def imports(root: Path) -> Iterator[Import]:
    """All imports, also those inside functions and under TYPE_CHECKING."""
    known = modules(root)
    for module, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                yield from (Import(module, node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = "." * node.level + (node.module or "")
                for alias in node.names:
                    name = f"{source}.{alias.name}"
                    yield Import(module, node.lineno, name if name in known else source)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def folder_of(module: str) -> str:
    return module.split(".")[1] if module.startswith("ringspan.") else ""


def backend_of(module: str) -> str:
    name = module.removeprefix(BACKENDS).partition(".")[0] if module.startswith(BACKENDS) else ""
    return "" if name in SHARED else name


def problem(module: str, imported: str) -> str:
    """The rule that an import breaks, or nothing."""
    top = imported.partition(".")[0]
    if imported.startswith("."):
        return "is relative: write from ringspan.…"
    if top in (*FOLDERS, "conf"):
        return f"begins with {top}: write ringspan.{top}"
    if top == "tests":
        return "imports tests"
    if not imported.startswith("ringspan."):
        return ""
    own, target = folder_of(module), folder_of(imported)
    if target in FOLDERS and FOLDERS.index(target) > FOLDERS.index(own):
        return f"{own} may not import {target}"
    if any(is_within(imported, plugin) for plugin in PLUGINS):
        return "no folder imports what plugs into other libraries"
    bench = [f"ringspan.{folder}.bench" for folder in FOLDERS]
    if any(is_within(imported, b) for b in bench) and not any(is_within(module, b) for b in (*bench, *BENCH_USERS)):
        return "product code may not import benchmark code"
    own_backend, other = backend_of(module), backend_of(imported)
    if own_backend and other not in {"", own_backend} | BACKEND_MAY_IMPORT.get(own_backend, set()):
        return f"backend {own_backend} may not import backend {other}"
    if own == "parallel" and any(is_within(module, f"ringspan.parallel.{name}") for name in ("transport", "coordination")):
        above = ("ring", "ring_overlapped", "ring_attention", "context_attention", "gradient_return", "ulysses")
        if imported in [f"ringspan.parallel.{name}" for name in above]:
            return "transport and coordination may not import the ring"
    return ""


def broken_rules(root: Path) -> list[str]:
    return [f"{i.module}:{i.line} {i.imported}: {text}" for i in imports(root) if (text := problem(i.module, i.imported))]


def cycle(root: Path) -> list[str]:
    """The modules of one import cycle, or nothing."""
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


def test_import_rules_hold() -> None:
    assert broken_rules(ROOT) == []


def test_there_are_no_import_cycles() -> None:
    assert cycle(ROOT) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("parallel/ring.py", "import ringspan.trainer.model as model"),
        ("parallel/ring.py", "from ringspan.trainer import model"),
        ("parallel/ring.py", "def late():\n    from ringspan.trainer.model import GPT"),
        ("parallel/ring.py", "from .mesh import Mesh"),
        ("parallel/ring.py", "from . import mesh"),
        ("parallel/ring.py", "from kernels.mask import Mask"),
        ("parallel/ring.py", "import kernels"),
        ("parallel/ring.py", "from tests import test_imports"),
        ("parallel/ring.py", "from ringspan.kernels.bench.measure import slug"),
        ("parallel/ring.py", "from ringspan.compat import flash_attn"),
        ("parallel/transport/p2p.py", "from ringspan.parallel.ring import ring_forward"),
        ("parallel/coordination/progress.py", "from ringspan.parallel import gradient_return"),
        ("trainer/run.py", "from ringspan.parallel.bench import timeline"),
        ("kernels/backends/triton/forward.py", "from ringspan.kernels.backends.hopper import common"),
        ("kernels/backends/reference.py", "from ringspan.kernels.backends.chunked import Q_CHUNK"),
        ("kernels/backends/hopper/forward.py", "from ringspan.kernels.backends.chunked import Q_CHUNK"),
    ],
)
def test_a_forbidden_import_is_reported(tmp_path: Path, module: str, line: str) -> None:
    targets = ["parallel/gradient_return", "parallel/ring", "trainer/model", "kernels/backends/hopper/common"]
    plant(tmp_path, {f"{name}.py": "" for name in targets} | {module: line})
    assert len(broken_rules(tmp_path)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("parallel/ring.py", "from ringspan.kernels import mask"),
        ("parallel/ring.py", "import torch"),
        ("parallel/ring.py", "from ringspan import ROOT"),
        ("parallel/bench/__main__.py", "from ringspan.kernels.bench.measure import slug"),
        ("trainer/reports/results.py", "from ringspan.kernels.bench.measure import slug"),
        ("kernels/backends/hopper/forward.py", "from ringspan.kernels.backends.triton.common import position"),
        ("kernels/backends/chunked.py", "from ringspan.kernels.backends.reference import Tile"),
        ("kernels/backends/chunked.py", "from ringspan.kernels.backends.block import Block"),
    ],
)
def test_an_allowed_import_is_not_reported(tmp_path: Path, module: str, line: str) -> None:
    plant(tmp_path, {module: line, "kernels/mask.py": ""})
    assert broken_rules(tmp_path) == []


@pytest.mark.parametrize("line", ["from ringspan.kernels.a import thing", "from ringspan.kernels import a"])
def test_a_cycle_is_reported(tmp_path: Path, line: str) -> None:
    plant(tmp_path, {"kernels/a.py": "from ringspan.kernels.b import thing", "kernels/b.py": line})
    assert {"ringspan.kernels.a", "ringspan.kernels.b"} <= set(cycle(tmp_path))


def test_the_folders_have_no_init_at_their_top_level() -> None:
    """With one, `import kernels` in a checkout would find ours instead of Hugging Face's package."""
    assert [name for name in (*FOLDERS, "conf") if (ROOT / name / "__init__.py").exists()] == []


def test_sub_packages_have_a_docstring() -> None:
    for folder in sorted({path.parent for path in modules(ROOT).values()} - {ROOT / name for name in FOLDERS}):
        package = folder / "__init__.py"
        assert package.exists() and ast.get_docstring(ast.parse(package.read_text())), f"{package} needs a docstring"


def test_class_names_are_defined_once() -> None:
    found: dict[str, list[str]] = {}
    for path in [*modules(ROOT).values(), *(ROOT / "ringspan").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_no_import_is_shadowed() -> None:
    """No function argument, local variable or loop variable has the name of something that the module imports from us."""
    shadowed = []
    for path in modules(ROOT).values():
        tree = ast.parse(path.read_text())
        names = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ringspan")
            for alias in node.names
        }
        for node in ast.walk(tree):
            bound = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
            bound = node.arg if isinstance(node, ast.arg) else bound
            if bound in names:
                shadowed.append(f"{path.relative_to(ROOT)}:{node.lineno} {bound}")  # type: ignore[attr-defined]
    assert shadowed == []


def test_package_folders_are_small() -> None:
    limits = {"trainer": 24, "tests/trainer": 24}
    folders = [path for name in (*FOLDERS, "ringspan", "tests") for path in [ROOT / name, *(ROOT / name).rglob("*")]]
    for folder in folders:
        if folder.is_dir() and "__pycache__" not in folder.parts and not folder.is_symlink():
            name = folder.relative_to(ROOT).as_posix()
            entries = [entry.name for entry in folder.iterdir() if entry.name != "__pycache__"]
            assert len(entries) <= limits.get(name, 16), f"{name} has {len(entries)} entries: {sorted(entries)}"


def test_modules_are_short() -> None:
    for path in [*modules(ROOT).values(), *(ROOT / "ringspan").glob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        lines, limit = len(path.read_text().splitlines()), 500 if (ROOT / "tests") in path.parents else 400
        assert lines <= limit, f"{path.relative_to(ROOT)} has {lines} lines, more than {limit}"
