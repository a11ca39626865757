"""The report on theta bundles as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from attnquant.nvfp4.accounting import format_bytes
from attnquant.projections import ProjectionKey
from attnquant.report.charts import heat_map, line_chart
from attnquant.report.document import document, table
from attnquant.report.measure import Point, Report
from attnquant.report.table import by_role


def render_page(report: Report) -> str:
    """The page's text."""
    shapes = report.shapes
    facts = (
        f"{shapes.architecture}, {len(shapes.layers)} layers: "
        f"{format_bytes(report.projection_bytes)} of projections, "
        f"{format_bytes(report.other_bytes)} of other tensors. Errors are relative, "
        "|W - W_eff| / |W|; sizes are those of the bundles that an export writes."
    )
    return document(
        f"Theta bundles of {report.model}",
        f"<p>{escape(facts)}</p>",
        "<h2>Error against size</h2><p>All projections together. A line is a number of shared "
        "blocks, a point is a rank; 1.0 is the size of the weights as they are.</p>",
        f'<div class="wide">{_error_against_size(report)}</div>',
        "<h2>Error by role</h2><p>Against the rank of the correction.</p>",
        f'<div class="grid-of">{"".join(_by_role(report))}</div>',
        "<h2>Error by layer and role</h2><p>A row is a layer; the darkest is the largest error "
        "on this page.</p>",
        f'<div class="grid-of">{"".join(_by_layer(report))}</div>',
        "<h2>All figures</h2>",
        table(by_role(report)),
    )


def _blocks(point: Point) -> str:
    return "1 block" if point.blocks == 1 else f"{point.blocks} blocks"


def _lines(report: Report) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = {}
    for point in report.points:
        lines.setdefault(_blocks(point), []).append(point)
    return lines


def _text(report: Report, point: Point, error: float) -> str:
    return (
        f"{_blocks(point)}, rank {point.rank}: {format_bytes(point.nbytes)} "
        f"({report.ratio(point):.3f}), error {error:.4f}"
    )


def _error_against_size(report: Report) -> str:
    return line_chart(
        {
            name: [((report.ratio(p), p.error), _text(report, p, p.error)) for p in points]
            for name, points in _lines(report).items()
        },
        x_label="size, of the weights'",
        y_label="relative error",
        label="Relative error against size, a line for each number of blocks",
    )


def _by_role(report: Report) -> Iterator[str]:
    for role in report.roles:
        chart = line_chart(
            {
                name: [
                    ((float(p.rank), p.of_role(role)), _text(report, p, p.of_role(role)))
                    for p in points
                ]
                for name, points in _lines(report).items()
            },
            x_label="rank",
            y_label="relative error",
            label=f"Relative error of {role} against rank",
        )
        yield f"<figure><figcaption>{role}</figcaption>{chart}</figure>"


def _by_layer(report: Report) -> Iterator[str]:
    layers = range(len(report.shapes.layers))
    most = max(point.of(key) for point in report.points for key in point.squares)
    for point in report.points:
        keys = [[ProjectionKey(layer=n, role=role) for role in report.roles] for n in layers]
        cells = [[point.of(key) if key in point.squares else None for key in row] for row in keys]
        name = f"{_blocks(point)}, rank {point.rank}"
        chart = heat_map(
            cells,
            rows=[str(layer) for layer in layers],
            columns=[role.removesuffix("_proj") for role in report.roles],
            most=most,
            label=f"Relative error by layer and role: {name}",
        )
        yield f"<figure><figcaption>{name}</figcaption>{chart}</figure>"
