"""How long a start takes, quantizing and from what an earlier start kept, beside no quantizing.

Each figure is a process of its own, `python run_max.py generate` for two tokens, from its start to
its end, and its largest resident memory. MAX's compiled graphs are cached, which the first round
sees to. float32 loads the checkpoint as it is. "First" keeps nothing and finds nothing that was
kept; its scales are `mse`: what a profile costs besides, once, `bench.profile` measures. "Kept"
finds the packed weights of an earlier start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from attnquant.demo import checkpoint_directory
from bench.common import Run, Sample, alternate, ratio, show_ratio
from bench.decode import BASE, Figures, generate

PROMPT, TOKENS = "The capital of France is", 2
NVFP4 = {"ATTNQUANT_QUANT": "nvfp4", "ATTNQUANT_QUANT_SCALES": "mse"}
SIDES: dict[str, dict[str, str]] = {
    BASE: {},
    "NVFP4, first": NVFP4 | {"ATTNQUANT_CACHE_GB": "0"},
    "NVFP4, kept": NVFP4,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run = Run("start", __doc__)
    run.parser.add_argument("--rounds", type=int, default=5)
    options = run.parse(arguments)
    directory: Path = checkpoint_directory(options.model)
    starts: dict[str, Callable[[], Figures]] = {
        side: partial(generate, directory, PROMPT, TOKENS, variables)
        for side, variables in SIDES.items()
    }
    runs = alternate(starts, options.rounds)
    taken = {side: Sample.of([one.seconds for one in runs[side]]) for side in runs}
    peak = {side: Sample.of([one.peak for one in runs[side]]) for side in runs}
    rows: list[tuple[str, ...]] = [("", "seconds", f"/ {BASE}", "peak MB", f"/ {BASE}")]
    ratios = {
        side: [ratio(sample[side], sample[BASE]) for sample in (taken, peak)] for side in runs
    }
    for side in runs:
        shown = ["" if side == BASE else show_ratio(value) for value in ratios[side]]
        rows.append((side, taken[side].show(1), shown[0], peak[side].show(0), shown[1]))
    figures = {
        "seconds": taken,
        "peak_mb": peak,
        f"ratio_to_{BASE}": {
            side: dict(zip(("seconds", "peak"), ratios[side], strict=True)) for side in runs
        },
    }
    run.report(rows, figures)


if __name__ == "__main__":
    main()
