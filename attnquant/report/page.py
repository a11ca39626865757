"""The report as one HTML page that needs nothing else: no network, no script, no font."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from attnquant import __version__
from attnquant.nvfp4.accounting import format_bytes
from attnquant.projections import ProjectionKey
from attnquant.report.charts import heat_map, line_chart
from attnquant.report.measure import Point, Report
from attnquant.report.table import by_role

_STYLE = """
:root { color-scheme: light dark; --text: #1d2126; --quiet: #5d6670; --back: #ffffff;
  --rule: #dde1e6; --cold: #eef1f5; --hot: #a1260d; --line-0: #1c6fb8; --line-1: #b3540b;
  --line-2: #2d7d46; --line-3: #7a4ab5; --line-4: #97204f; --line-5: #5b6b00; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7eb; --quiet: #98a2ae; --back: #15181c;
  --rule: #333a42; --cold: #262c33; --hot: #ff8a65; --line-0: #6fb1ea; --line-1: #f0a05a;
  --line-2: #74c48c; --line-3: #b99aeb; --line-4: #ec86ab; --line-5: #bcc95a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 72rem; color: var(--text);
  background: var(--back); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.2; overflow-wrap: anywhere; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .25rem; }
p { margin: .25rem 0 1rem; max-width: 44rem; color: var(--quiet); }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .9rem; margin-bottom: .25rem; }
.wide { max-width: 32rem; }
.grid-of { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); }
svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--quiet); }
svg text.name { fill: var(--text); }
svg .grid { stroke: var(--rule); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .25rem .75rem; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
th { font-weight: 600; }
"""


def render_page(report: Report) -> str:
    """The page's text."""
    shapes = report.shapes
    facts = (
        f"{shapes.architecture}, {len(shapes.layers)} layers: "
        f"{format_bytes(report.projection_bytes)} of projections, "
        f"{format_bytes(report.other_bytes)} of other tensors. Errors are relative, "
        "|W - W_eff| / |W|; sizes are those of the bundles that an export writes."
    )
    body = "\n".join(
        [
            f"<h1>Theta bundles of {escape(report.model)}</h1><p>{escape(facts)}</p>",
            "<h2>Error against size</h2><p>All projections together. A line is a number of shared "
            "blocks, a point is a rank; 1.0 is the size of the weights as they are.</p>",
            f'<div class="wide">{_error_against_size(report)}</div>',
            "<h2>Error by role</h2><p>Against the rank of the correction.</p>",
            f'<div class="grid-of">{"".join(_by_role(report))}</div>',
            "<h2>Error by layer and role</h2><p>A row is a layer; the darkest is the largest error "
            "on this page.</p>",
            f'<div class="grid-of">{"".join(_by_layer(report))}</div>',
            "<h2>All figures</h2>",
            f'<div class="scroll">{_table(report)}</div>',
            f"<p>attnquant {__version__}</p>",
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Theta bundles of {escape(report.model)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _lines(report: Report) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = {}
    for point in report.points:
        lines.setdefault(f"{point.blocks} blocks", []).append(point)
    return lines


def _text(report: Report, point: Point, error: float) -> str:
    return (
        f"{point.blocks} blocks, rank {point.rank}: {format_bytes(point.nbytes)} "
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
        name = f"{point.blocks} blocks, rank {point.rank}"
        chart = heat_map(
            cells,
            rows=[str(layer) for layer in layers],
            columns=[role.removesuffix("_proj") for role in report.roles],
            most=most,
            label=f"Relative error by layer and role: {name}",
        )
        yield f"<figure><figcaption>{name}</figcaption>{chart}</figure>"


def _table(report: Report) -> str:
    heads, *rows = by_role(report)
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
