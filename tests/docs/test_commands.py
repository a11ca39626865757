"""Every command that README and quickstart print is one that its own program accepts, and works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import pytest

import run_max
from attnquant.cli import make_parser
from tests.docs.commands import Block, blocks
from tests.docs.site import DOCS, ROOT
from tests.test_packaging import read_toml

FILES = [ROOT / "README.md", DOCS / "index.md"]
BLOCKS = [block for path in FILES for block in blocks(path)]
SECONDS = 3600

IDS = [f"{block.file}-{index}" for index, block in enumerate(BLOCKS)]


def max_command(name: str) -> click.Command:
    """MAX's own subcommand."""
    (point,) = entry_points(group="console_scripts", name="max")
    group = point.load()
    command = group.get_command(click.Context(group), name)
    assert command is not None, f"MAX has no {name}"
    return command


def accept(words: list[str]) -> None:
    """Has a command's own parser read it.

    Raises:
        ValueError: no such program, subcommand, option, value or file.
    """
    words = words[2:] if words[:2] == ["pixi", "run"] else words
    program, *rest = words
    if program == "python" and rest[0] == "run_max.py":
        program, rest = "max", run_max.with_defaults(rest[1:], has_accelerator=True)
    if program == "max":
        try:
            context = max_command(rest[0]).make_context(rest[0], rest[1:])
        except click.ClickException as error:
            raise ValueError(f"{' '.join(words)}: {error.format_message()}") from error
        if context.args:
            raise ValueError(f"{' '.join(words)}: MAX does not know {context.args}")
    elif words[:3] == ["python", "-m", "attnquant"]:
        try:
            make_parser().parse_args(words[3:])
        except SystemExit as error:
            raise ValueError(" ".join(words)) from error
    elif words[:2] == ["pip", "install"]:
        extras = read_toml("pyproject.toml")["project"]["optional-dependencies"]
        for extra in re.findall(r"\[(\w+)]", words[-1]):
            if extra not in extras:
                raise ValueError(f"{' '.join(words)}: there is no extra {extra}")
    elif words == ["mkdocs", "serve"]:
        assert (ROOT / "mkdocs.yml").is_file()
    elif program == "curl":
        json.loads(words[words.index("-d") + 1])
    elif program == "pytest":
        for word in rest:
            if word.startswith("tests") and not (ROOT / word).exists():
                raise ValueError(f"{' '.join(words)}: there is no {word}")
    else:
        raise ValueError(f"{' '.join(words)}: no program that this test knows")


def test_there_are_blocks() -> None:
    assert len([block for block in BLOCKS if block.note is None]) >= 6
    assert any(block.note for block in BLOCKS) and any(block.output for block in BLOCKS)


# MAX 26.7 declares some options twice, and recent versions of click say so.
@pytest.mark.filterwarnings("ignore:The parameter --")
@pytest.mark.parametrize("block", BLOCKS, ids=IDS)
def test_commands_are_accepted(block: Block) -> None:
    run = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, check=False)
    assert run.returncode == 0, run.stderr
    for words in block.commands():
        accept(words)


@pytest.mark.filterwarnings("ignore:The parameter --")
@pytest.mark.parametrize(
    "command",
    [
        "python run_max.py serve --model x --prot 3100",
        "python run_max.py serve --model x --max-length many",
        "python run_max.py srve --model x",
        "max generate --model x --promt y",
        "python -m attnquant inspect x --memroy 8GB",
        "pip install -e '.[dmeo]'",
        "curl http://localhost -d '{'",
        "pytest tests/nothing.py",
        "rm x",
    ],
)
def test_a_wrong_command_is_not_accepted(command: str) -> None:
    (words,) = Block(file="", text=command, output=None, note=None).commands()
    with pytest.raises((ValueError, AssertionError)):
        accept(words)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_commands_do_what_is_printed(path: Path, tmp_path: Path) -> None:
    """In a new virtual environment and a fresh copy of the repository, exactly as printed."""
    clone, environment = tmp_path / "clone", tmp_path / "environment"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, files.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    environ: dict[str, Any] = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ATTNQUANT_", "MODULAR_", "PYTHON", "PYTEST"))
    }
    # pytest-xdist puts its own packages into PYTHONPATH, where ensurepip would find a pip already.
    subprocess.run([sys.executable, "-m", "venv", str(environment)], env=environ, check=True)
    environ["PATH"] = f"{environment / 'bin'}{os.pathsep}{environ['PATH']}"
    environ["VIRTUAL_ENV"] = str(environment)
    ran = 0
    for block in blocks(path):
        if block.note is not None:
            continue
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=clone,
            env=environ,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert run.returncode == 0, f"{block.text}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
        if block.output is not None:
            assert block.output.strip() in run.stdout
        print(f"\n{block.text}{run.stdout[-1500:]}", file=sys.stderr)
        ran += 1
    assert ran
