"""The site builds, needs nothing from elsewhere, has no dead link, and says what the code says."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from urllib.parse import unquote, urlencode, urlsplit

import pytest

from attnquant.settings import PREFIX, Settings
from bench.common import RESULTS
from bench.picture import PICTURE, draw
from tests.docs.site import DOCS, ROOT, Page, build, hooks

MARKDOWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs mkdocs: pip install -e '.[docs]'")
    return build(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_is_built(pages: dict[Path, Page]) -> None:
    names = {path.stem for path in pages}
    assert names == {path.stem for path in DOCS.glob("*.md")} | {"404"}


def test_no_link_is_dead(pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        if path.stem == "404":  # its links begin at the server's root
            continue
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme in {"http", "https", "mailto"}:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file() or (
                parts.fragment and unquote(parts.fragment) not in anchors | {"__comments"}
            ):
                dead.append(f"{path.name}: {link}")
    assert dead == []


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    outside = [
        f"{path.name}: {address}"
        for path, page in pages.items()
        for address in page.fetched
        if urlsplit(address).netloc
    ]
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        addresses = re.findall(r"(?:url\(\s*|@import\s+)['\"]?((?:https?:)?//[^'\")\s]+)", text)
        outside += [f"{path.name}: {address}" for address in addresses]
    assert outside == []


def test_configuration_lists_every_setting(site: Path, pages: dict[Path, Page]) -> None:
    path = site / "configuration.html"
    text = path.read_text(encoding="utf-8")
    for setting in fields(Settings):
        assert setting.name in pages[path].anchors
        assert f"<code>{PREFIX}{setting.name.upper()}</code>" in text
        assert f"<code>{setting.name}</code>" in text


def test_the_comparison_has_the_figures_of_the_results(pages: dict[Path, Page]) -> None:
    (page,) = (page for path, page in pages.items() if path.stem == "metrics")
    records = json.loads(page.scripts["comparison-data"])
    assert records == hooks().comparison()
    found = {(r["model"], r["coverage"], r["figure"]): r for r in records}
    assert len(found) == len(records)
    sizes = _result("bytes")["figures"]["bytes_per_token"]
    for model, coverages in sizes.items():
        for coverage, size in coverages.items():
            assert found[model, coverage, "bytes"]["value"] == size["total"]
    decode = _result("decode")
    rates = [r["value"] for r in records if r["figure"] == "rate"]
    medians = decode["figures"]["tokens_per_second"].values()
    assert rates == [sample["median"] for sample in medians]
    for record in records:
        assert record["device"] and record["command"].startswith("python -m bench.")


def test_the_page_shows_the_figures_of_the_results(site: Path) -> None:
    """Driven in a real browser, for the choice that the address names."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    choice = {
        "model": "Gemma 3 270M",
        "coverage": "every projection and the head",
        "peer": "MLP only",
    }
    address = f"file://{site}/metrics.html#{urlencode(choice)}"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", address]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    bars = re.findall(
        r'data-figure="(\w+)" data-coverage="([^"]+)" data-value="([^"]+)"', run.stdout
    )
    shown = {(figure, coverage): float(value) for figure, coverage, value in bars}
    wanted = {
        (r["figure"], r["coverage"]): pytest.approx(r["value"])
        for r in hooks().comparison()
        if r["model"] == choice["model"] and r["coverage"] in choice.values()
    }
    assert shown == wanted and len(shown) >= 3


def test_the_picture_is_drawn_from_the_results() -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw()


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: path.name)
def test_links_in_the_repository_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(path.read_text(encoding="utf-8")):
        parts = urlsplit(link)
        if parts.path and not parts.scheme:
            assert (path.parent / parts.path).exists(), link


def test_messages_that_are_explained_are_in_the_code() -> None:
    """A message's fixed parts, between its `…`, are literals of the code."""
    literals = [text for path in [*_sources(), ROOT / "run_max.py"] for text in _literals(path)]
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    before_max = text.partition("\n## MAX\n")[0]
    rows = re.findall(r"^\| (`.+?`) \|", before_max, re.MULTILINE)
    assert len(rows) > 20
    unknown = [
        f"{row}: {part}"
        for row in rows
        for part in re.split("…|` `|`", row)
        if part.strip() and not any(part.strip() in literal for literal in literals)
    ]
    assert unknown == []


def _sources() -> list[Path]:
    return sorted((ROOT / "attnquant").rglob("*.py"))


def _literals(path: Path) -> Iterator[str]:
    """String constants; pieces of an f-string one by one, and adjacent ones joined by Python."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
