"""The report: its sizes are an export's, its errors the bundles' own, its page whole by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.checkpoint.export_theta import export_theta
from attnquant.cli import main
from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import CheckpointError, SettingsError
from attnquant.nvfp4.reference import encode
from attnquant.report import Report, measure, render_page, render_table
from attnquant.report.measure import default_blocks
from attnquant.theta import decompose_decoder, effective_weight
from tests.configs import gemma4_31b
from tests.tiny.gemma3 import CASES

CASE = CASES["pattern2-scalar"]
VOID = {"meta", "line", "circle", "rect", "polyline"}


@pytest.fixture(scope="module")
def report(tiny_directory: Callable[[str], Path]) -> Report:
    return measure(tiny_directory(CASE.name), blocks=(2, 3, 1), ranks=(8, 0, 3))


def test_points_come_in_order(report: Report) -> None:
    found = [(point.blocks, point.rank) for point in report.points]
    assert found == [(blocks, rank) for blocks in (3, 2, 1) for rank in (0, 3, 8)]


def test_sizes_are_those_of_an_export(
    report: Report, tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    for index, point in enumerate(report.points[1::3]):  # rank 3, of every number of blocks
        target = tmp_path / str(index)
        written = export_theta(
            tiny_directory(CASE.name),
            target,
            blocks=point.blocks,
            rank=point.rank,
            encode=encode,
            recipe={},
        )
        assert point.nbytes + report.other_bytes == written.after
        tensors = Checkpoint.open(target).tensors.values()
        assert sum(info.nbytes for info in tensors) == written.after


def test_errors_are_those_of_the_rebuilt_weights(report: Report) -> None:
    tensors = CASE.tensors()
    shapes = DecoderShapes.from_config(CASE.config()).projections
    (point,) = (p for p in report.points if (p.blocks, p.rank) == (3, 8))
    wrong = total = 0.0
    for group in decompose_decoder(
        shapes, lambda key: tensors[f"model.{key.module}.weight"], blocks=3, rank=8
    ):
        for key, bundle in group.items():
            weight = tensors[f"model.{key.module}.weight"].astype(np.float64)
            square = ((effective_weight(bundle).astype(np.float64) - weight) ** 2).sum()
            own = np.sqrt(square / (weight**2).sum())
            assert point.of(key) == pytest.approx(own, rel=1e-4, abs=1e-12)
            wrong, total = wrong + square, total + (weight**2).sum()
    assert point.error == pytest.approx(np.sqrt(wrong / total), rel=1e-4)
    # The last layers share with none.
    assert point.of_layer(3) == point.of_layer(2) == 0 < point.of_layer(1)


def test_the_same_figures_every_time(report: Report, tiny_directory: Callable[[str], Path]) -> None:
    again = measure(tiny_directory(CASE.name), blocks=(3, 2, 1), ranks=(0, 3, 8))
    assert render_table(again) == render_table(report)
    assert render_page(again) == render_page(report)


def test_the_table_has_every_role_and_layer(report: Report) -> None:
    lines = render_table(report).splitlines()
    assert lines[0].endswith("of other tensors")
    head = lines[2].split()
    assert head == ["blocks", "rank", "size", "ratio", "error", *report.roles]
    assert sum(bool(re.match(r"\d+ ", line)) for line in lines) == 9 + CASE.layers


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "onclick", "onload"} & {name for name, _ in attributes}
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(report: Report) -> None:
    text = render_page(report)
    page = Page(text)
    assert not page.open
    assert "script" not in page.seen and "link" not in page.seen and "url(" not in text
    assert "http" not in text
    charts = 1 + len(report.roles) + len(report.points)
    assert page.seen.count("svg") == charts
    assert page.seen.count("rect") == len(report.points) * len(report.shapes.projections)
    assert page.seen.count("circle") == len(report.points) * (1 + len(report.roles))
    assert text.count("<tr>") == 1 + len(report.points)
    assert "width=device-width" in text


def test_a_model_s_name_cannot_break_the_page(report: Report) -> None:
    import dataclasses

    text = render_page(dataclasses.replace(report, model="a<b>&'\"c"))
    assert not Page(text).open
    assert "a&lt;b&gt;&amp;" in text and "<b>" not in text


def test_default_blocks() -> None:
    assert default_blocks(DecoderShapes.from_config(CASE.config())) == [2, 1]
    assert default_blocks(DecoderShapes.from_config(gemma4_31b())) == [30, 20, 10]


def test_what_cannot_be_measured(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    directory = tiny_directory(CASE.name)
    with pytest.raises(SettingsError, match="5 is not a whole number from 1 to 4"):
        measure(directory, blocks=(5,))
    with pytest.raises(CheckpointError, match="expected a checkpoint's directory"):
        measure(tmp_path / "none")
    export_theta(directory, tmp_path / "theta", blocks=2, encode=encode, recipe={})
    with pytest.raises(CheckpointError, match="found a theta bundle"):
        measure(tmp_path / "theta")


def test_the_command_prints_the_table_and_writes_the_page(
    report: Report,
    tiny_directory: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory, page = str(tiny_directory(CASE.name)), tmp_path / "report.html"
    command = ["report", directory, "--blocks", "3,2,1", "--ranks", "0,3,8", "--html", str(page)]
    assert main(command) == 0
    assert capsys.readouterr().out == render_table(report) + "\n"
    assert page.read_text(encoding="utf-8") == render_page(report)
    assert main([*command[:-1], str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written" in line
    with pytest.raises(SystemExit):
        main(["report", directory, "--blocks", "3,x"])
