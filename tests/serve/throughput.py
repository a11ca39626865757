"""Throughput of live servers, as MAX's own benchmark client sees it: sides, sessions, statistics.

A server session is one process, from start to stop. Every side has several, and the sides take
turns, each round in another order, since a machine drifts. A session's figure is its output tokens
per second, after a run of the same requests that does not count. Device graph capture is pinned on
every side, so that no side has it by a default that another lacks.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

from attnquant.nvfp4.report import align
from bench.common import Sample, alternate
from tests.serve.server import MAX, RUN_MAX, Server, serve

Rates = dict[tuple[str, int], list[float]]
"""Output tokens per second of each session, by side and concurrency."""

CONFIDENCE, POWER = 0.95, 0.8


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of what is compared.

    Attributes:
        variables: `ATTNQUANT_*`.
        builtin: MAX's own architecture, without attnquant.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    builtin: bool = False


@dataclass(frozen=True, kw_only=True)
class Load:
    """What each session is asked.

    Attributes:
        model: as the server takes it.
        served: as requests name it.
        tokenizer: a directory, or a Hugging Face id.
        concurrencies: requests at once.
        requests: how many at each concurrency, over the concurrency.
        input_tokens: of a prompt, about.
        output_tokens: of an answer, exactly.
        capture: whether device graphs are captured; a CPU has none.
        options: of the server.
    """

    model: str
    served: str
    tokenizer: str
    concurrencies: Sequence[int] = (1, 64)
    requests: int = 8
    input_tokens: int = 550
    output_tokens: int = 128
    capture: bool = True
    options: Sequence[str] = ()


def measure(load: Load, sides: Mapping[str, Side], sessions: int, folder: Path) -> Rates:
    """Runs all sessions.

    Args:
        load: what each is asked.
        sides: by name.
        sessions: of each side.
        folder: where logs and the client's results go.
    """
    capture = "--device-graph-capture" if load.capture else "--no-device-graph-capture"
    options = ["--model", load.model, capture, "--no-enable-prefix-caching", *load.options]
    count = 0

    def session(side: Side) -> dict[int, float]:
        nonlocal count
        count += 1
        log = folder / f"server-{count}.log"
        command = MAX if side.builtin else RUN_MAX
        with serve(log, *options, command=command, **side.variables) as server:
            rates = {}
            for concurrency in load.concurrencies:
                for name in ("warm-up", "counted"):
                    result = folder / f"{count}-{concurrency}-{name}.json"
                    rates[concurrency] = _client(server, load, concurrency, result)
            return rates

    runs = {name: (lambda side=side: session(side)) for name, side in sides.items()}
    found = alternate(runs, sessions, warmups=0)
    return {
        (name, concurrency): [rates[concurrency] for rates in found[name]]
        for name in sides
        for concurrency in load.concurrencies
    }


def _client(server: Server, load: Load, concurrency: int, result: Path) -> float:
    """Output tokens per second of one run of `max benchmark`; it leaves a folder where it runs."""
    options = {
        "--model": load.served,
        "--tokenizer": load.tokenizer,
        "--base-url": server.url.removesuffix("/v1"),
        "--backend": "modular-chat",
        "--endpoint": "/v1/chat/completions",
        "--dataset-name": "sonnet",
        "--dataset-mode": "local",
        "--sonnet-input-len": load.input_tokens,
        "--sonnet-prefix-len": min(200, load.input_tokens // 2),
        "--max-output-len": load.output_tokens,
        "--num-prompts": load.requests * concurrency,
        "--max-concurrency": concurrency,
        "--seed": 1,
        "--skip-first-n-requests": 0,
        "--skip-last-n-requests": 0,
        "--result-filename": result,
    }
    switches = ["--no-collect-gpu-stats", "--no-collect-cpu-stats", "--no-collect-server-stats"]
    command = [*MAX, "benchmark", *(str(part) for pair in options.items() for part in pair)]
    # Kernels that ran in this process set variables, below Python, that mislead another one.
    environ = dict(os.environ)
    run = subprocess.run(
        command + switches,
        cwd=result.parent,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode or not result.is_file():
        raise RuntimeError(f"`max benchmark` failed:\n{(run.stdout + run.stderr)[-3000:]}")
    return output_rate(json.loads(result.read_text(encoding="utf-8")), load, concurrency)


def output_rate(result: Mapping[str, object], load: Load, concurrency: int) -> float:
    """Output tokens per second of a result file.

    Raises:
        ValueError: a request failed, or an answer was of another length: rates of such runs
            cannot be compared.
    """
    expected = load.requests * concurrency
    if result["completed"] != expected:
        raise ValueError(f"{result['completed']} of {expected} requests were answered")
    if result["total_output_tokens"] != expected * load.output_tokens:
        raise ValueError(
            f"found {result['total_output_tokens']} tokens in the answers, expected "
            f"{expected} x {load.output_tokens}"
        )
    return float(str(result["total_output_tokens"])) / float(str(result["duration"]))


def detectable(one: Sequence[float], other: Sequence[float]) -> float:
    """The smallest difference of means that sessions with this spread can be expected to show.

    Two sides' sessions, two-sided test at 5%, four times out of five: `(t(0.975) + t(0.8)) · s ·
    sqrt(1/n + 1/m)` with the pooled standard deviation s. NaN with fewer than two sessions.
    """
    n, m = len(one), len(other)
    if min(n, m) < 2:
        return float("nan")
    freedom = n + m - 2
    squares = (n - 1) * statistics.variance(one) + (m - 1) * statistics.variance(other)
    quantiles = t_quantile((1 + CONFIDENCE) / 2, freedom) + t_quantile(POWER, freedom)
    return quantiles * float((squares / freedom * (1 / n + 1 / m)) ** 0.5)


def t_quantile(p: float, freedom: int) -> float:
    """Student's t, by the expansion around the normal quantile: to 1% from 3 degrees on."""
    z, v = NormalDist().inv_cdf(p), freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def table(rates: Rates) -> list[str]:
    """A row for each concurrency and side; differences are from the first side."""
    rows = [("concurrency", "side", "tokens/s", "ratio", "detectable difference")]
    for concurrency in dict.fromkeys(concurrency for _, concurrency in rates):
        found = {name: values for (name, at), values in rates.items() if at == concurrency}
        base = next(iter(found.values()))
        for name, values in found.items():
            sample = Sample.of(values)
            cells = ("", "")
            if values is not base:
                least = detectable(base, values)
                median = statistics.median(base)
                cells = (f"{sample.median / median:.3f}", f"{least:.2f} ({least / median:.1%})")
            rows.append((str(concurrency), name, sample.show(2), *cells))
    return align(rows)
