"""The documentation site, built as CI builds it, and what its pages hold."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

# What a browser fetches by itself, rather than when a reader follows a link.
_FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
_NOT_FETCHED = {"canonical", "next", "prev", "edit"}


def hooks() -> ModuleType:
    """`docs/hooks.py`, which MkDocs loads by its path too."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(target: Path) -> Path:
    """Builds the site, warnings being errors.

    Raises:
        RuntimeError: the build failed; with its output.
    """
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    # Kernels that ran in this process set variables, below Python, that mislead another one.
    environ = dict(os.environ)
    run = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise RuntimeError(run.stdout + run.stderr)
    return target


class Page(HTMLParser):
    """A page's links, anchors, and what a browser fetches for it; and its scripts' text by id."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.scripts: dict[str, str] = {}
        self._script: str | None = None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        attribute = _FETCHED.get(tag)
        if attribute in values and not _NOT_FETCHED & set(values.get("rel", "").split()):
            self.fetched.append(values[attribute])
        if tag == "script":
            self._script = values.get("id", "")
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] += data
