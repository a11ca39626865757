"""Imports go one way, as the design says, and importing the package is cheap.

The tree is read, not run: an import inside a function counts as much as one at the top. Only
imports for the type checker alone (`if TYPE_CHECKING:`) may name what must not be loaded.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "attnquant"

# A module may import what stands in its own row or in a row above it.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "errors",
            "log",
            "whole_file",
            "settings",
            "projections",
            "decoder_shapes",
            "config_values",
            "vision_shapes",
            "drafter_shapes",
            "divergence",
        }
    ),
    frozenset({"checkpoint", "theta", "nvfp4", "demo", "memory", "memory_report"}),
    frozenset({"kernels"}),
    frozenset({"nn"}),
    frozenset({"gemma3", "gemma4", "qwen3"}),
    frozenset({"inspect", "preflight", "text", "report", "parity", "encoder", "cli"}),
    frozenset({"__init__", "__main__"}),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
MAY_IMPORT_MAX = frozenset({"kernels", "nn", "gemma3", "gemma4", "qwen3", "encoder", "cli"})
MAY_IMPORT_TORCH = frozenset({"parity"})
STRANGERS = frozenset({"gemma3", "gemma4", "qwen3"})

FILES = sorted(PACKAGE.rglob("*.py"))


def top_of(path: Path, package: Path) -> str:
    """The module or subpackage that a file belongs to: `nn`, `errors`, `__init__`."""
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported(tree: ast.AST, *, typing_too: bool) -> Iterator[str]:
    """Dotted names of what a tree imports; `from a import b` gives `a.b`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif not typing_too and isinstance(node, ast.If) and _is_type_checking(node.test):
            for branch in node.orelse:
                yield from imported(branch, typing_too=typing_too)
        else:
            yield from imported(node, typing_too=typing_too)


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def problems(path: Path, package: Path) -> list[str]:
    """What one file imports against the rules, one line each."""
    top = top_of(path, package)
    place = path.relative_to(package).as_posix()
    if top not in RANK:
        return [f"{place}: {top} has no row in LAYERS"]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for name in imported(tree, typing_too=True):
        parts = name.split(".")
        if parts[0] == "":
            found.append(f"{place}: relative import {name}")
        elif parts[0] == "attnquant" and len(parts) > 1 and parts[1] != "__version__":
            target = parts[1]
            if target not in RANK:
                found.append(f"{place}: {name} has no row in LAYERS")
            elif RANK[target] > RANK[top] or (top != target and {top, target} <= STRANGERS):
                found.append(f"{place}: {top} imports {target}")
    for name in imported(tree, typing_too=False):
        root = name.split(".")[0]
        allowed = {"torch": MAY_IMPORT_TORCH, "max": MAY_IMPORT_MAX}
        if root in allowed and top not in allowed[root]:
            found.append(f"{place}: {top} imports {root}")
    return found


def test_imports_go_one_way():
    assert [line for path in FILES for line in problems(path, PACKAGE)] == []


@pytest.mark.parametrize(
    ("place", "source", "expected"),
    [
        ("nn/mlp.py", "from attnquant.gemma3 import arch", "nn imports gemma3"),
        ("nn/mlp.py", "import attnquant.gemma3.arch", "nn imports gemma3"),
        ("nvfp4/a.py", "from attnquant import nn", "nvfp4 imports nn"),
        ("kernels/a.py", "from attnquant.nn import mlp", "kernels imports nn"),
        ("gemma3/a.py", "from attnquant.gemma4 import arch", "gemma3 imports gemma4"),
        ("gemma4/a.py", "def f():\n    import attnquant.gemma3", "gemma4 imports gemma3"),
        ("theta/a.py", "def f():\n    from max.graph import ops", "theta imports max"),
        ("demo/a.py", "import max", "demo imports max"),
        ("inspect.py", "try:\n    import max.driver\nexcept ImportError: pass", "imports max"),
        ("gemma3/a.py", "import torch", "gemma3 imports torch"),
        ("nn/a.py", "from .mlp import MLP", "relative import .mlp.MLP"),
        ("surprise.py", "", "surprise has no row"),
        ("errors.py", "import attnquant.surprise", "attnquant.surprise has no row"),
        ("nn/a.py", "import max.graph\nfrom attnquant.theta import bundle", None),
        ("theta/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n import max", None),
        ("checkpoint/a.py", "import attnquant\nfrom attnquant import __version__", None),
        ("gemma3/a.py", "import maximum, torchlike", None),
    ],
)
def test_the_checker_finds_what_it_should(
    tmp_path: Path, place: str, source: str, expected: str | None
):
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    found = problems(path, tmp_path)
    assert len(found) == (expected is not None), found
    if expected is not None:
        assert expected in found[0]


def test_there_are_no_import_cycles():
    """Within a layer too: of two modules at most one imports the other, whatever the way."""
    modules = {_module(path): path for path in FILES}
    reaches = {
        name: {
            target
            for wanted in imported(ast.parse(path.read_text(encoding="utf-8")), typing_too=True)
            if (target := _longest(wanted, modules)) is not None and target != name
        }
        for name, path in modules.items()
        if name != "attnquant"
    }
    reaches["attnquant"] = set()
    for name in modules:
        seen: set[str] = set()
        open_names = set(reaches[name])
        while open_names:
            seen |= open_names
            open_names = {far for near in open_names for far in reaches[near]} - seen
        assert name not in seen, f"{name} imports itself, through {sorted(reaches[name])}"


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _longest(name: str, modules: dict[str, Path]) -> str | None:
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def test_importing_attnquant_is_cheap():
    code = "import json, sys, attnquant; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        # Kernels that ran in this process set variables, below Python, that mislead another one.
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.split(".")[0] for name in json.loads(run.stdout)}
    assert "attnquant" in loaded
    assert not loaded & {"max", "numpy", "torch", "transformers", "ml_dtypes", "mojo"}
