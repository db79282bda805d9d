"""Who may import whom, proved by reading imports and by importing in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = ("units", "phase", "policy", "pages", "plan", "workspace", "kv_types", "config", "rope_settings")
SCRATCH = ("cpu/scratch", "cpu/attention_scratch", "cpu/step_scratch", "cpu/fast_types")
STANDARD = set(sys.stdlib_module_names)


def imported_modules(path: Path) -> set[str]:
    """Every module a file imports anywhere, type-checking blocks left out."""
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    skipped = {id(inner) for block in typing_only for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("name", PURE + SCRATCH)
def test_planning_imports_only_the_standard_library_and_its_siblings(name: str) -> None:
    for module in imported_modules(ROOT / "kvs_core" / f"{name}.py"):
        top = module.split(".")[0]
        assert top in STANDARD or top == "kvs_core", f"kvs_core/{name}.py imports {module}"


@pytest.mark.parametrize("path", sources("kvs_core"), ids=lambda path: path.name)
def test_the_core_imports_no_command_line_and_prints_nothing(path: Path) -> None:
    for module in imported_modules(path):
        assert module.split(".")[0] not in {"kvs_cli", "typer", "rich"}, f"{path} imports {module}"
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"], path


@pytest.mark.parametrize("path", sources("kvs_core"), ids=lambda path: path.name)
def test_only_opening_a_backend_reaches_the_cuda_package(path: Path) -> None:
    reaches = any(module.split(".")[0] == "cuda_kernels" for module in imported_modules(path))
    assert not reaches or path == ROOT / "kvs_core" / "backend.py"


@pytest.mark.parametrize("path", sources("kvs_cli"), ids=lambda path: path.name)
def test_rich_is_imported_by_the_renderer_only(path: Path) -> None:
    uses_rich = any(module.split(".")[0] == "rich" for module in imported_modules(path))
    assert not uses_rich or path.name == "render.py"


@pytest.mark.parametrize("path", sources("cuda_kernels"), ids=lambda path: path.name)
def test_kernels_never_see_configurations_or_the_command_line(path: Path) -> None:
    for module in imported_modules(path):
        assert module not in {"kvs_core.config", "kvs_core.validate"}
        assert module.split(".")[0] != "kvs_cli", f"{path} imports {module}"


def test_importing_the_product_loads_no_cuda_module_and_no_driver() -> None:
    modules = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for package in ("kvs_core", "kvs_cli")
        for path in sources(package)
        if path.name != "__main__.py"
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "roots = ('numba.cuda', 'cuda_kernels', 'cuda.', 'nvmath')\n"
        "banned = [name for name in sys.modules if name.startswith(roots)]\n"
        "libraries = [line for line in open('/proc/self/maps') if 'libcuda' in line]\n"
        "print(banned, libraries)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[] []"
