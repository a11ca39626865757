"""What every measurement shares: alternation, spread, the device, the table and the JSON file.

A machine drifts while it is measured: other work comes and goes, clocks change. So the sides take
turns, round by round, each round in another order; a median stands for a side, and the distance
from its least to its largest value says how far to trust it. A ratio of two medians that lie closer
together than that distance is not printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from attnquant import __version__
from attnquant.nvfp4.report import align
from attnquant.settings import PREFIX

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
EVALUATION_TEXT = ROOT / "tests" / "golden" / "texts" / "evaluation.txt"
PACKAGES = ("modular", "numpy", "ml_dtypes")

# Load averages above this share of the cores are pointed out: a measurement had to share them.
QUIET_LOAD = 0.5

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One side's figure over the rounds.

    Attributes:
        median: of the rounds.
        spread: the largest less the least.
        values: every round, in order.
    """

    median: float
    spread: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """Summarizes the rounds.

        Raises:
            statistics.StatisticsError: there are none.
        """
        median = statistics.median(values)
        return cls(median=median, spread=max(values) - min(values), values=tuple(values))

    def show(self, digits: int) -> str:
        """`17.2 ± 0.4`: the median, and half the spread."""
        return f"{self.median:.{digits}f} ± {self.spread / 2:.{digits}f}"


def ratio(over: Sample, under: Sample) -> float | None:
    """Ratio of the medians; None where they differ by less than the larger spread."""
    if abs(over.median - under.median) <= max(over.spread, under.spread):
        return None
    return over.median / under.median


def show_ratio(value: float | None) -> str:
    """The ratio as a table has it."""
    return "within the spread" if value is None else f"{value:.2f}x"


def alternate(
    sides: Mapping[str, Callable[[], T]], rounds: int, warmups: int = 1
) -> dict[str, list[T]]:
    """Runs the sides in turn; each round starts with the next side.

    Args:
        sides: what to run, by name.
        rounds: how often each side runs and counts.
        warmups: how many rounds before them do not count.

    Returns:
        What each side returned, round by round.
    """
    names = list(sides)
    results: dict[str, list[T]] = {name: [] for name in names}
    for index in range(-warmups, rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            result = sides[name]()
            if index >= 0:
                results[name].append(result)
    return results


def seconds(run: Callable[[], object]) -> float:
    """Wall-clock seconds that a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def environment(**variables: str) -> dict[str, str]:
    """This process's environment with these `ATTNQUANT_*` variables, without any other."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return kept | variables


def device() -> dict[str, Any]:
    """CPU, cores that this process may use, and memory in GiB."""
    affinity = getattr(os, "sched_getaffinity", None)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_name(),
        "machine": platform.machine(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
    }


def _cpu_name() -> str:
    """With family and model number, since virtual machines hide the name behind them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.partition(":") for line in text.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    numbers = ", ".join(f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields)
    return f"{fields.get('model name', platform.machine())} ({numbers})"


class Run:
    """One measurement: its options, and what is printed and written about it.

    Args:
        name: of the command, `python -m bench.<name>`.
        description: the command's `--help`.
        models: whether it measures a model, which `--model` names.
    """

    def __init__(self, name: str, description: str | None, *, models: bool = True) -> None:
        self.name = name
        self.parser = argparse.ArgumentParser(
            prog=f"python -m bench.{name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if models:
            self.parser.add_argument("--model", default="demo", help="`demo`, or a directory")
        self.parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json")
        self._load_before = os.getloadavg()[0]

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parses the command line, and keeps it for the JSON file."""
        arguments = sys.argv[1:] if arguments is None else arguments
        self._command = shlex.join(["python", "-m", f"bench.{self.name}", *arguments])
        options = self.parser.parse_args(arguments)
        self._path: Path = options.json
        return options

    def report(self, rows: Sequence[Sequence[str]], figures: Mapping[str, Any]) -> None:
        """Prints the table, and writes the JSON file: figures, versions, device, command."""
        where = device()
        load = [round(self._load_before, 1), round(os.getloadavg()[0], 1)]
        print("\n".join(align(rows)))
        print(f"\n{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB")
        if load[0] > QUIET_LOAD * where["cores"]:
            print(f"Other work was running: load average {load[0]} at the start.")
        content = {
            "command": self._command,
            "date": time.strftime("%Y-%m-%d"),
            "device": where | {"load_average": load},
            "versions": {"attnquant": __version__, "python": platform.python_version()}
            | {package: version(package) for package in PACKAGES},
            "figures": figures,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=2, default=asdict, allow_nan=False)
        self._path.write_text(text + "\n", encoding="utf-8")
