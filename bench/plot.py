"""Draws what was measured, for the docs: `python -m bench.plot` makes docs/images/*.svg and *.png.

It reads the JSON files of `bench.context`, `bench.decode` and `bench.kernel`, and draws those that
are there; each picture says on which device. It needs matplotlib: `pip install -e '.[plot]'`.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import RESULTS, ROOT

IMAGES = ROOT / "docs" / "images"
TITLE_COLUMNS = 130
Figures = Mapping[str, Any]


def context(axes: Sequence[Any], figures: Figures) -> None:
    """Milliseconds and megabytes of a decode step, against context and against batch."""
    points = figures["points"]
    sides = list(dict.fromkeys(point["side"] for point in points))
    least = {axis: min(point[axis] for point in points) for axis in ("context", "batch")}
    panels = [("context", "batch", "tokens of context"), ("batch", "context", "sequences")]
    for column, (varied, fixed, label) in enumerate(panels):
        for side in sides:
            chosen = [
                point for point in points if point["side"] == side and point[fixed] == least[fixed]
            ]
            x = [point[varied] for point in chosen]
            times = [1e3 * point["seconds"]["median"] for point in chosen]
            spreads = [1e3 * point["seconds"]["spread"] / 2 for point in chosen]
            axes[column].errorbar(x, times, spreads, marker="o", capsize=3, label=side)
            axes[column + 2].plot(x, [point["bytes"] / 1e6 for point in chosen], marker="o")
        for row, unit in ((0, "ms a step"), (2, "MB a step")):
            axes[column + row].set_xlabel(f"{label}, {fixed} {least[fixed]}")
            axes[column + row].set_ylabel(unit)
            axes[column + row].set_ylim(bottom=0)
    axes[0].set_ylim(top=1.25 * axes[0].get_ylim()[1])  # room for the legend
    axes[0].legend(frameon=False, loc="upper center", ncols=len(sides), fontsize="small")


def decode(axes: Sequence[Any], figures: Figures) -> None:
    """Tokens per second, time to the first token and peak memory of each side."""
    for axis, (name, label) in zip(
        axes,
        [
            ("tokens_per_second", "tokens per second"),
            ("first_token_ms", "first token, ms"),
            ("peak_mb", "peak memory, MB"),
        ],
        strict=True,
    ):
        sides = list(figures[name])[::-1]
        medians = [figures[name][side]["median"] for side in sides]
        spreads = [figures[name][side]["spread"] / 2 for side in sides]
        axis.barh(sides, medians, xerr=spreads, capsize=3, color="#1c6fb8")
        axis.set_xlabel(label)
    for axis in axes[1:]:
        axis.set_yticklabels([])


def kernel(axes: Sequence[Any], figures: Figures) -> None:
    """Milliseconds and GB/s of one projection against the vectors that it multiplies."""
    counts = [int(name.split()[0]) for name in figures if name.endswith(" vectors")]
    for side, size in figures["bytes"].items():
        samples = [figures[f"{count} vectors"]["seconds"][side] for count in counts]
        times = [sample["median"] for sample in samples]
        spreads = [1e3 * sample["spread"] / 2 for sample in samples]
        axes[0].errorbar(
            counts, [1e3 * time for time in times], spreads, marker="o", capsize=3, label=side
        )
        axes[1].plot(counts, [size / time / 1e9 for time in times], marker="o")
    axes[1].axhline(figures["memory_gb_per_second"]["median"], color="#5d6670", linestyle=":")
    axes[0].set_yscale("log")
    for axis, unit in zip(axes, ("ms", "GB/s of W; dotted: the memory's"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("vectors")
        axis.set_ylabel(unit)
    axes[0].legend(frameon=False)


PICTURES: dict[str, tuple[Callable[[Sequence[Any], Figures], None], tuple[int, int]]] = {
    "context": (context, (2, 2)),
    "decode": (decode, (1, 3)),
    "kernel": (kernel, (1, 2)),
}


def draw(content: Mapping[str, Any], name: str, target: Path) -> list[Path]:
    """Draws one measurement, as SVG and as PNG; returns the files.

    Args:
        content: of its JSON file.
        name: of the measurement.
        target: the directory.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text stays text, and two runs over the same figures give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name})
    picture, (rows, columns) = PICTURES[name]
    figure, axes = pyplot.subplots(rows, columns, figsize=(9, 3 * rows), layout="constrained")
    picture(list(axes.flat), content["figures"])
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    device = content["device"]
    title = f"{content['command']}: {device['cpu']}, {device['cores']} cores"
    figure.suptitle("\n".join(textwrap.wrap(title, TITLE_COLUMNS)), fontsize=9)
    target.mkdir(parents=True, exist_ok=True)
    files = [target / f"{name}.svg", target / f"{name}.png"]
    figure.savefig(files[0], metadata={"Date": None})
    figure.savefig(files[1], dpi=150)
    pyplot.close(figure)
    return files


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--images", type=Path, default=IMAGES)
    options = parser.parse_args(arguments)
    found = [name for name in PICTURES if (options.results / f"{name}.json").is_file()]
    if not found:
        parser.error(f"{options.results}: found no results of {', '.join(PICTURES)}")
    for name in found:
        text = (options.results / f"{name}.json").read_text(encoding="utf-8")
        for file in draw(json.loads(text), name, options.images):
            print(file)


if __name__ == "__main__":
    main()
