"""The report as tables of text."""

from __future__ import annotations

from attnquant.nvfp4.accounting import format_bytes
from attnquant.nvfp4.report import align
from attnquant.report.measure import Report


def render_table(report: Report) -> str:
    """Size and error by blocks and rank, with each role's and then each layer's error."""
    shapes = report.shapes
    by_layer = [("layer", *(f"{point.blocks}/{point.rank}" for point in report.points))]
    for layer in range(len(shapes.layers)):
        by_layer.append((str(layer), *(f"{p.of_layer(layer):.4f}" for p in report.points)))
    return "\n".join(
        [
            f"{report.model}: {shapes.architecture}, {len(shapes.layers)} layers, "
            f"{format_bytes(report.projection_bytes)} of projections and "
            f"{format_bytes(report.other_bytes)} of other tensors",
            "",
            *align(by_role(report)),
            "",
            "error by layer, under blocks/rank",
            *align(by_layer),
        ]
    )


def by_role(report: Report) -> list[tuple[str, ...]]:
    """Heads, and a row for each number of blocks and rank."""
    rows: list[tuple[str, ...]] = [("blocks", "rank", "size", "ratio", "error", *report.roles)]
    for point in report.points:
        errors = [point.error, *map(point.of_role, report.roles)]
        rows.append(
            (
                str(point.blocks),
                str(point.rank),
                format_bytes(point.nbytes),
                f"{report.ratio(point):.3f}",
                *(f"{error:.4f}" for error in errors),
            )
        )
    return rows
