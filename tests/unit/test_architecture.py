# SPDX-License-Identifier: Apache-2.0
"""The source keeps its shape: imports point one way, pure code stays pure, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvhandoff

ROOT = Path(kvhandoff.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

GROUND = {"", "errors", "ids"}
BELOW_RUNTIME = GROUND | {"config", "model", "plan", "protocol", "lifecycle"}
MAY_IMPORT: dict[str, set[str]] = {
    "": set(),
    "errors": {""},
    "ids": {""},
    "config": GROUND | {"plan"},  # settings name policies
    "model": GROUND,
    "plan": GROUND | {"model"},
    "protocol": GROUND | {"model"},
    "lifecycle": GROUND | {"model", "plan", "protocol"},
    "transport": BELOW_RUNTIME,
    "channel": BELOW_RUNTIME,
    "runtime": BELOW_RUNTIME | {"transport", "channel"},
    "vllm": BELOW_RUNTIME | {"transport", "channel", "runtime"},
    "cli": BELOW_RUNTIME | {"transport", "channel", "runtime", "vllm"},
}
"""What each top-level module or folder may import of this package, beside itself."""

PURE = {"model", "plan", "protocol", "lifecycle"}
IMPURE = {"time", "threading", "logging", "random", "socket", "torch", "zmq", "vllm", "mooncake"}
ONLY_IN = {
    "zmq": ("channel/",),
    "mooncake": ("transport/mooncake.py",),
    "vllm": ("vllm/", "cli/"),
    "torch": ("vllm/", "cli/"),
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def unit_of(path: Path) -> str:
    """The top-level module or folder that a file belongs to; "" is the package itself."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names of everything that a file imports, wherever in the file it does."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            for alias in node.names:  # `from kvhandoff import plan` names a module, too
                yield f"{node.module}.{alias.name}"


each_file = pytest.mark.parametrize("path", FILES, ids=name_of)


@each_file
def test_imports_point_downwards(path: Path) -> None:
    """A module imports only what its layer stands on."""
    unit = unit_of(path)
    assert unit in MAY_IMPORT, f"say in this test what {unit!r} may import"
    for imported in imports_of(path):
        package, _, rest = imported.partition(".")
        if package == "kvhandoff":
            target = rest.partition(".")[0]
            target = target if target in MAY_IMPORT else ""  # a name of kvhandoff/__init__.py
            assert target in MAY_IMPORT[unit] | {unit}, f"{name_of(path)} imports {imported}"


@each_file
def test_foreign_packages_have_one_place(path: Path) -> None:
    """ZMQ, Mooncake, vLLM and torch each are imported in one place only."""
    for imported in imports_of(path):
        allowed = ONLY_IN.get(imported.partition(".")[0])
        if allowed is not None:
            assert name_of(path).startswith(allowed), f"{name_of(path)} imports {imported}"


@pytest.mark.parametrize("path", [p for p in FILES if unit_of(p) in PURE], ids=name_of)
def test_pure_code_has_no_clock_thread_or_environment(path: Path) -> None:
    """What decides takes the time and the events as arguments."""
    roots = {imported.partition(".")[0] for imported in imports_of(path)}
    assert not roots & IMPURE
    attributes = {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
    names = {imported.rpartition(".")[2] for imported in imports_of(path)}
    assert not (attributes | names) & {"environ", "getenv"}


@each_file
def test_source_has_no_assert(path: Path) -> None:
    """``python -O`` removes assertions, so nothing may depend on one."""
    found = [node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]
    assert not found, f"{name_of(path)}: assert in lines {found}"


@each_file
def test_files_and_functions_are_small(path: Path) -> None:
    """A file is read in one sitting, a function on one screen."""
    assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_FILE_LINES
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length < MAX_FUNCTION_LINES, f"{name_of(path)}: {node.name} has {length} lines"


@each_file
def test_files_name_their_licence(path: Path) -> None:
    """Every file that is not empty begins with its SPDX line."""
    text = path.read_text(encoding="utf-8")
    assert not text or text.startswith("# SPDX-License-Identifier: Apache-2.0\n")


@pytest.mark.parametrize("module", ["kvhandoff", "kvhandoff.runtime.puller"])
def test_import_is_light(module: str) -> None:
    """Nobody needs vLLM, torch or a transfer engine to import the package or its runtimes."""
    code = (
        f"import sys, {module}; "
        "print([m for m in ('vllm', 'torch', 'mooncake') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
