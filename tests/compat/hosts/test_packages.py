"""The recorded signatures, and the values of prepare, against the sources of flash_attn and ring_flash_attn.

The packages import kernels that exist on GPUs only, so functions are read from the files. This needs no import of them.
"""

import ast
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ringspan.compat import ring_flash_attn
from tests.compat.signatures import FLASH_ATTN, FLASH_OPTIONS, RING_FLASH_ATTN, RING_OPTIONS, recorded
from tests.compat.test_ring_flash_attn import PREPARED


def folder_of(package: str) -> Path:
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(next(iter(found.submodule_search_locations)))


def functions(folder: Path, files: str = "**/*.py") -> dict[str, ast.FunctionDef]:
    """All functions at the top level of some files of a package."""
    nodes = [node for path in folder.glob(files) for node in ast.parse(path.read_text()).body]
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def written_signature(node: ast.FunctionDef) -> str:
    for argument in (*node.args.args, *node.args.kwonlyargs):
        argument.annotation = None
    return f"({ast.unparse(node.args)})"


@pytest.mark.parametrize(
    ("package", "files", "tested", "signatures", "options"),
    [
        ("flash_attn", "flash_attn_interface.py", "2.8.3", FLASH_ATTN, FLASH_OPTIONS),
        ("ring_flash_attn", "**/*.py", "0.1.8", RING_FLASH_ATTN, RING_OPTIONS),
    ],
)
def test_recorded_signatures_are_those_of_the_package(
    package: str, files: str, tested: str, signatures: dict[str, str], options: str
) -> None:
    found, distribution = functions(folder_of(package), files), package.replace("_", "-")
    for name, expected in recorded(signatures, options).items():
        written = written_signature(found[name]) if name in found else "no such function"
        message = (
            f"{distribution}={version(distribution)}: {name}{written}, and ringspan.compat has that of {tested}: {expected}"
        )
        assert written == expected, message


def test_ring_flash_attn_has_no_other_public_function() -> None:
    text = (folder_of("ring_flash_attn") / "__init__.py").read_text()
    exported = {alias.name for node in ast.parse(text).body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert exported == set(ring_flash_attn.__all__) - {"install"}


def test_prepare_returns_the_values_of_the_package() -> None:
    """Its source runs here without the import of flash_attn, on the cases of the test of our function and random ones."""
    node = functions(folder_of("ring_flash_attn"))["llama3_flash_attn_prepare_cu_seqlens"]
    found: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([node], []), "ring_flash_attn", "exec"), found)
    generator = torch.Generator().manual_seed(0)
    cases = list(PREPARED)
    for _ in range(200):
        ranks = int(torch.randint(1, 6, (), generator=generator))
        lengths = torch.randint(0, 12, (7,), generator=generator)
        lengths[-1] += -int(lengths.sum()) % ranks + ranks
        boundaries = (0, *lengths.cumsum(0).tolist())
        rank = int(torch.randint(ranks, (), generator=generator))
        cases.append((boundaries, bool(torch.randint(2, (), generator=generator)), rank, ranks))
    for boundaries, *others in cases:
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
        results = [
            [x.tolist() if isinstance(x, torch.Tensor) else x for x in prepare(cu_seqlens, *others)]
            for prepare in (found[node.name], ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens)
        ]
        assert results[0] == results[1], (boundaries, *others)
