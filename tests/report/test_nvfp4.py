"""The report on NVFP4: the decoded weights' errors, bytes that add up, a page whole by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.cli import main
from attnquant.errors import CheckpointError, SettingsError
from attnquant.nvfp4.reference import encode
from attnquant.projections import ROLES
from attnquant.report.nvfp4 import QuantReport, measure
from attnquant.report.nvfp4_page import render_page, render_table
from tests.dequantized import dequantize
from tests.golden.data import TEXTS
from tests.report.test_report import Page
from tests.tiny.gemma3 import CASES

CASE = CASES["untied-sharded"]


@pytest.fixture(scope="module")
def report(tiny_directory: Callable[[str], Path]) -> QuantReport:
    return measure(tiny_directory(CASE.name), scales="mse")


def test_errors_are_those_of_the_decoded_weights(
    report: QuantReport, tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tiny_directory(CASE.name)
    dequantize(source, tmp_path / "decoded", encode=partial(encode, scales="mse"))
    decoded, original = Checkpoint.open(tmp_path / "decoded"), Checkpoint.open(source)
    assert len(report.errors) == 7 * CASE.layers
    for key, error in report.errors.items():
        name = f"model.{key.module}.weight"
        weight = original.array(name).astype(np.float64)
        own = np.linalg.norm(decoded.array(name) - weight) / np.linalg.norm(weight)
        assert error == pytest.approx(own, rel=1e-4)


def test_coverages_are_what_inspect_counts(report: QuantReport) -> None:
    sizes = [one.nbytes.total for one in report.covered]
    assert [one.name for one in report.covered] == ["bf16", "MLP", "attn", "all", "+ head"]
    assert sizes[0] > max(sizes[1:3]) > min(sizes[1:3]) > sizes[3] > sizes[4]
    assert sizes[0] - sizes[1] + sizes[0] - sizes[2] == sizes[0] - sizes[3]


def test_the_table_and_the_page(report: QuantReport) -> None:
    lines = render_table(report).splitlines()
    assert [line.split()[0] for line in lines[3:10]] == list(ROLES)
    text = render_page(report)
    page = Page(text)
    assert not page.open
    assert "script" not in page.seen and "link" not in page.seen and "url(" not in text
    assert "http" not in text
    assert page.seen.count("svg") == 2  # the map and the bars; without a text no answers
    assert page.seen.count("rect") == len(report.errors) + 4 * len(report.covered)
    hostile = render_page(dataclasses.replace(report, model="a<b>&'\"c"))
    assert not Page(hostile).open and "<b>" not in hostile


def test_what_is_ignored_is_left(tiny_directory: Callable[[str], Path]) -> None:
    found = measure(tiny_directory(CASE.name), scales="absmax", ignore=("self_attn",))
    assert {key.role for key in found.errors} == {"gate_proj", "up_proj", "down_proj"}
    assert [one.name for one in found.covered] == ["bf16", "all", "+ head"]
    assert render_page(found).count("<rect") == len(found.errors) + 4 * 3


def test_what_cannot_be_measured(
    tiny_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_directory(CASE.name)
    with pytest.raises(SettingsError, match="'x' matches no projection"):
        measure(directory, ignore=("x",))
    with pytest.raises(CheckpointError, match="expected a checkpoint's directory"):
        measure(tmp_path / "none")
    with pytest.raises(SettingsError, match="cannot be read"):
        measure(directory, text=tmp_path / "none.txt")
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(SettingsError, match="found 2 tokens, expected 3 or more"):
        measure(directory, text=tmp_path / "short.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="expected a file of UTF-8 text"):
        measure(directory, text=tmp_path / "binary")
    monkeypatch.setenv("ATTNQUANT_QUANT", "nvfp4")
    with pytest.raises(SettingsError, match="unset them"):
        measure(directory, text=tmp_path / "short.txt")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--quant nvfp4 --blocks 2", "--blocks: found --quant nvfp4, expected --quant none"),
        ("--text x", "--text: found --quant none, expected --quant nvfp4"),
    ],
)
def test_options_that_do_not_go_together(
    options: str,
    words: str,
    tiny_directory: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["report", str(tiny_directory(CASE.name)), *options.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("attnquant: ") and words in line


def test_the_command_measures_answers(
    tiny_directory: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, page = str(tiny_directory(CASE.name)), tmp_path / "report.html"
    text = TEXTS / "1-opening.txt"
    command = ["report", directory, "--quant", "nvfp4", "--scales", "mse", "--html", str(page)]
    assert main([*command, "--text", str(text)]) == 0
    rows = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()[12:]}
    kl = {name: float(rows[name][-5]) for name in ("nothing", "MLP only", "every projection")}
    assert kl["nothing"] == 0 < kl["MLP only"] < kl["every projection"]
    assert page.read_text(encoding="utf-8").count("<circle") == 4
