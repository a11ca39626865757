"""Charts as inline SVG: colours are the page's CSS variables, sizes follow the page's width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

_WIDTH, _HEIGHT = 360, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 64, 22, 38
_TICKS = 5

XY = tuple[float, float]


def line_chart(
    lines: Mapping[str, Sequence[tuple[XY, str]]], *, x_label: str, y_label: str, label: str
) -> str:
    """Lines of points, each labelled at its end; a point's text shows when it is pointed at.

    Args:
        lines: by label; each point is `(x, y)` and its text.
        x_label: below the axis.
        y_label: above the axis.
        label: what the chart shows, for who cannot see it.
    """
    points = [point for line in lines.values() for point, _ in line]
    x_ticks, y_ticks = (_ticks([point[axis] for point in points]) for axis in (0, 1))

    def place(point: XY) -> XY:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * _part(point[0], x_ticks)
        return x, _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * _part(point[1], y_ticks)

    parts = []
    for tick in y_ticks:
        _, y = place((x_ticks[0], tick))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x, _ = place((tick, y_ticks[0]))
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:g}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>'
    )
    ends = _apart([place(line[-1][0])[1] for line in lines.values()])
    for index, (name, line) in enumerate(lines.items()):
        colour = f"var(--line-{index % 6})"
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(point) for point, _ in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point, text in line:
            x, y = place(point)
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
                f"<title>{escape(text)}</title></circle>"
            )
        x, _ = place(line[-1][0])
        parts.append(
            f'<text class="name" x="{x + 8:.1f}" y="{ends[index] + 4:.1f}">{escape(name)}</text>'
        )
    return _svg(_WIDTH, _HEIGHT, label, f'<text x="4" y="9">{escape(y_label)}</text>', *parts)


def heat_map(
    cells: Sequence[Sequence[float | None]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    most: float,
    least: float = 0.0,
    label: str,
) -> str:
    """A cell for each row and column, the darker the larger; None is left empty.

    Args:
        cells: row by row.
        rows: what the rows are.
        columns: what the columns are.
        most: the value of the darkest colour.
        least: the value of the lightest colour.
        label: what the map shows, for who cannot see it.
    """
    side, height, left, top = 34, 14, 30, 46
    parts = []
    for index, name in enumerate(columns):
        x = left + side * (index + 0.5)
        parts.append(
            f'<text transform="translate({x + 4} {top - 6}) rotate(-50)">{escape(name)}</text>'
        )
    for row, (name, values) in enumerate(zip(rows, cells, strict=True)):
        y = top + height * row
        parts.append(f'<text x="{left - 6}" y="{y + 11}" text-anchor="end">{escape(name)}</text>')
        for column, value in enumerate(values):
            if value is None:
                continue
            part = (value - least) / (most - least) if most > least else 0.0
            shade = round(100 * min(1.0, max(0.0, part)))
            fill = f"color-mix(in srgb, var(--hot) {shade}%, var(--cold))"
            parts.append(
                f'<rect x="{left + side * column}" y="{y}" width="{side - 2}" '
                f'height="{height - 2}" style="fill:{fill}"><title>layer {escape(name)}, '
                f"{escape(columns[column])}: {value:.4f}</title></rect>"
            )
    width = left + side * len(columns) + 36
    return _svg(width, top + height * len(rows) + 4, label, *parts)


def bar_chart(
    bars: Mapping[str, Sequence[float]],
    *,
    parts: Sequence[str],
    show: Callable[[float], str],
    label: str,
) -> str:
    """A bar for each label, made of parts that lie one after the other, and its sum at its end.

    Args:
        bars: by label, from above; each as many values as there are parts.
        parts: what they are; a part's text shows when it is pointed at.
        show: a value as text.
        label: what the chart shows, for who cannot see it.
    """
    left, height, gap = 52, 20, 10
    whole = max(map(sum, bars.values())) or 1.0
    scale = (_WIDTH - left - _RIGHT - 4) / whole
    drawn = []
    for row, (name, values) in enumerate(bars.items()):
        x, y = float(left), row * (height + gap)
        drawn.append(f'<text class="name" x="{left - 6}" y="{y + 14}" text-anchor="end">')
        drawn.append(f"{escape(name)}</text>")
        for index, (part, value) in enumerate(zip(parts, values, strict=True)):
            width = value * scale
            drawn.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" '
                f'fill="var(--line-{index % 6})"><title>{escape(name)}, {escape(part)}: '
                f"{escape(show(value))}</title></rect>"
            )
            x += width
        drawn.append(f'<text x="{x + 6:.2f}" y="{y + 14}">{escape(show(sum(values)))}</text>')
    return _svg(_WIDTH, len(bars) * (height + gap), label, *drawn)


def legend(parts: Sequence[str]) -> str:
    """What the colours of a bar chart stand for, as HTML."""
    return (
        '<p class="legend">'
        + "".join(
            f'<span><i style="background:var(--line-{index % 6})"></i>{escape(part)}</span>'
            for index, part in enumerate(parts)
        )
        + "</p>"
    )


def _svg(width: float, height: float, label: str, *parts: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers, evenly apart, from 0 or below the values to beyond them."""
    top = max(*values, 0.0) or 1.0
    rough = top / _TICKS
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    return [round(step * index, 12) for index in range(ceil(top / step - 1e-9) + 1)]


def _part(value: float, ticks: Sequence[float]) -> float:
    return (value - ticks[0]) / (ticks[-1] - ticks[0])


def _apart(heights: Sequence[float], least: float = 12) -> list[float]:
    """The same heights, moved so that no two labels lie on each other."""
    moved = list(heights)
    order = sorted(range(len(heights)), key=heights.__getitem__)
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + least)
    return moved
