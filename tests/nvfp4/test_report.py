"""The table that is printed after loading."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnquant.nvfp4.report import LoadReport, ProjectionRecord
from attnquant.projections import ProjectionKey


def record(layer: int, role: str, error: float | None, left: str | None = None) -> ProjectionRecord:
    key = ProjectionKey(layer=layer, role=role)  # type: ignore[arg-type]
    return ProjectionRecord(key=key, shape=(64, 32), relative_error=error, left=left)


REPORT = LoadReport(
    records=[
        record(0, "q_proj", 0.08),
        record(1, "q_proj", 0.1),
        record(0, "o_proj", None, "ignored"),
        record(1, "o_proj", None, "in = 100 is not a multiple of 16"),
        record(0, "down_proj", None),
        record(1, "down_proj", 0.06),
    ],
    before=61_394_690_680,
    after=19_295_021_280,
    scales="mse",
    seconds=12.34,
)


def test_summary() -> None:
    assert REPORT.mean_error == pytest.approx(0.08)
    worst = REPORT.worst
    assert worst is not None
    assert worst.key.module == "layers.1.self_attn.q_proj"


def test_render() -> None:
    assert REPORT.render().splitlines() == [
        "projection  nvfp4  left  mean error  worst error",
        "q_proj          2     0      0.0900       0.1000",
        "o_proj          0     2",
        "down_proj       2     0      0.0600       0.0600",
        "all             4     2      0.0800       0.1000",
        "left: 1 ignored",
        "left: 1 in = 100 is not a multiple of 16",
        "worst: layers.1.self_attn.q_proj 0.1000",
        "bytes per token: 61.395 GB before, 19.295 GB after (3.18x); scales: mse; 12.3 s",
    ]


def test_nothing_encoded() -> None:
    report = LoadReport(
        records=[record(0, "q_proj", None, "ignored")],
        before=10,
        after=10,
        scales="mse",
        seconds=0.0,
    )
    assert report.mean_error is None
    assert report.worst is None
    assert "worst:" not in report.render()


def test_a_packed_checkpoints_scales_are_its_own() -> None:
    """No setting chose them."""
    report = replace(REPORT, records=[record(0, "down_proj", None)])
    assert report.render().splitlines()[-1].endswith("scales: the checkpoint's; 12.3 s")
