"""The report on NVFP4 as a table of text, and as one HTML page."""

from __future__ import annotations

from dataclasses import asdict
from html import escape

from attnquant.nvfp4.accounting import format_bytes
from attnquant.nvfp4.report import align
from attnquant.projections import ProjectionKey
from attnquant.report.charts import bar_chart, heat_map, legend, line_chart
from attnquant.report.document import document, table
from attnquant.report.nvfp4 import Covered, QuantReport

Rows = list[tuple[str, ...]]


def render_table(report: QuantReport) -> str:
    """Errors by role, and bytes and answers by coverage."""
    return "\n".join(
        [
            f"{report.model}: {_facts(report)}",
            "",
            *align(_by_role(report)),
            "",
            *align(_by_coverage(report)),
        ]
    )


def render_page(report: QuantReport) -> str:
    """The page's text."""
    parts = list(asdict(report.covered[0].nbytes))
    bars = {one.name: list(map(float, asdict(one.nbytes).values())) for one in report.covered}
    sections = [
        f"<p>{escape(_facts(report))}</p>",
        "<h2>Error by layer and projection</h2><p>A row is a layer. Relative error, "
        f"|W - decoded| / |W|{_range(report)}; an empty cell is left as it is.</p>",
        f'<div class="map">{_heat_map(report)}</div>',
        table(_by_role(report)),
        "<h2>Bytes by part of the model</h2><p>What one decoded token reads, from nothing in NVFP4 "
        "to every projection and the output head.</p>",
        legend(parts),
        '<div class="wide">',
        bar_chart(
            bars,
            parts=parts,
            show=lambda count: format_bytes(round(count)),
            label="Bytes that a token reads, by part of the model, for each coverage",
        ),
        "</div>",
    ]
    if report.text is not None:
        sections += [
            "<h2>What it does to answers</h2><p>KL divergence from the unquantized model's "
            f"next-token distribution, over {report.positions} positions of {escape(report.text)}, "
            "against bytes. Each coverage's weights were decoded and run in float32.</p>",
            f'<div class="wide">{_answers(report)}</div>',
        ]
    sections += ["<h2>Coverage against bytes</h2>", table(_by_coverage(report))]
    return document(f"NVFP4 of {report.model}", *sections)


def _facts(report: QuantReport) -> str:
    shapes, before, after = report.shapes, report.covered[0], report.covered[-2]
    return (
        f"{shapes.architecture}, {len(shapes.layers)} layers; {len(report.errors)} of "
        f"{len(shapes.projections)} projections in NVFP4, scales: {report.scales}; bytes per "
        f"token: {format_bytes(before.nbytes.total)} in bfloat16, "
        f"{format_bytes(after.nbytes.total)} then"
    )


def _range(report: QuantReport) -> str:
    """What the colours stand for."""
    if not report.errors:
        return ""
    least, most = min(report.errors.values()), max(report.errors.values())
    return f", from {least:.4f}, the lightest, to {most:.4f}, the darkest"


def _heat_map(report: QuantReport) -> str:
    layers, found = range(len(report.shapes.layers)), list(report.errors.values())
    return heat_map(
        [
            [report.errors.get(ProjectionKey(layer=n, role=role)) for role in report.roles]
            for n in layers
        ],
        rows=[str(layer) for layer in layers],
        columns=[role.removesuffix("_proj") for role in report.roles],
        most=max(found, default=0.0),
        least=min(found, default=0.0),
        label="Relative error by layer and projection",
    )


def _answers(report: QuantReport) -> str:
    lines = {}
    for one in report.covered:
        if one.answers is not None:
            size = one.nbytes.total
            text = f"{one.what}: {format_bytes(size)}, KL {one.answers.kl:.4f}"
            lines[one.name] = [((size / 1e9, one.answers.kl), text)]
    return line_chart(
        lines,
        x_label="GB that a token reads",
        y_label="KL, nats",
        label="KL divergence against bytes, a point for each coverage",
    )


def _by_role(report: QuantReport) -> Rows:
    rows: Rows = [("projection", "nvfp4", "left", "mean error", "worst error", "worst layer")]
    for role in report.roles:
        found = {key.layer: e for key, e in report.errors.items() if key.role == role}
        all_of_it = sum(key.role == role for key in report.shapes.projections)
        figures = ("", "", "")
        if found:
            worst = max(found, key=found.__getitem__)
            mean = sum(found.values()) / len(found)
            figures = (f"{mean:.4f}", f"{found[worst]:.4f}", str(worst))
        rows.append((role, str(len(found)), str(all_of_it - len(found)), *figures))
    return rows


def _by_coverage(report: QuantReport) -> Rows:
    heads: tuple[str, ...] = ("in NVFP4", "bytes per token", "ratio")
    if report.text is not None:
        heads = (*heads, "KL, nats", "top-1", "perplexity")
    rows: Rows = [heads]
    whole = report.covered[0].nbytes.total
    for one in report.covered:
        size = one.nbytes.total
        cells = (one.what, format_bytes(size), f"{whole / size:.2f}x")
        rows.append((*cells, *_quality(one)) if report.text is not None else cells)
    return rows


def _quality(one: Covered) -> tuple[str, str, str]:
    if one.answers is None:
        return ("", "", "")
    a = one.answers
    return (f"{a.kl:.4f} ± {a.kl_error:.4f}", f"{a.top1:.3f}", f"{a.perplexity:.2f}")
