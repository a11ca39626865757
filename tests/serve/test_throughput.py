"""The throughput harness: its statistics, and end to end on the CPU with MAX's own client."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import pytest

from tests.serve.throughput import (
    Load,
    Side,
    detectable,
    measure,
    output_rate,
    t_quantile,
    table,
)

LOAD = Load(model="x", served="x", tokenizer="x", requests=2, output_tokens=10)


@pytest.mark.parametrize(
    ("p", "freedom", "expected"),
    [(0.975, 4, 2.7764), (0.8, 4, 0.9410), (0.975, 8, 2.3060), (0.975, 100, 1.9840)],
)
def test_t_quantiles_are_the_tables(p: float, freedom: int, expected: float) -> None:
    assert t_quantile(p, freedom) == pytest.approx(expected, rel=0.01)


def test_the_detectable_difference_is_detected_four_times_of_five() -> None:
    """Simulated: two sides that differ by just that much, five sessions each, Welch's own t."""
    generator = random.Random(1)
    sessions, found, tries = 5, 0, 2000
    least = (t_quantile(0.975, 8) + t_quantile(0.8, 8)) * (2 / sessions) ** 0.5
    for _ in range(tries):
        one = [generator.gauss(100, 1) for _ in range(sessions)]
        two = [generator.gauss(100 + least, 1) for _ in range(sessions)]
        pooled = (statistics.variance(one) + statistics.variance(two)) / 2
        t = (statistics.mean(two) - statistics.mean(one)) / (pooled * 2 / sessions) ** 0.5
        found += t > t_quantile(0.975, 8)
    assert found / tries == pytest.approx(0.8, abs=0.04)
    assert detectable([1, 2, 3], [4, 5, 6]) == pytest.approx(
        (t_quantile(0.975, 4) + t_quantile(0.8, 4)) * (2 / 3) ** 0.5
    )
    assert math.isnan(detectable([1], [2]))


def test_a_run_with_failures_is_no_figure() -> None:
    result = {"completed": 4, "total_output_tokens": 40, "duration": 2.0}
    assert output_rate(result, LOAD, 2) == 20
    with pytest.raises(ValueError, match="3 of 4 requests"):
        output_rate(result | {"completed": 3}, LOAD, 2)
    with pytest.raises(ValueError, match="found 39 tokens in the answers, expected 4 x 10"):
        output_rate(result | {"total_output_tokens": 39}, LOAD, 2)


def test_the_table_has_spread_and_detectable_difference() -> None:
    rates = {("a", 1): [10.0, 11.0, 12.0], ("b", 1): [20.0, 22.0, 24.0]}
    head, one, two = (line.split() for line in table(rates))
    assert head[:3] == ["concurrency", "side", "tokens/s"]
    assert one == ["1", "a", "11.00", "±", "1.00"]
    assert two[:6] == ["1", "b", "22.00", "±", "2.00", "2.000"]
    assert float(two[6]) == pytest.approx(detectable(*rates.values()), abs=0.01)


@pytest.mark.slow
def test_live_servers_are_measured_on_the_cpu(demo_directory: Path, tmp_path: Path) -> None:
    load = Load(
        model="demo",
        served="demo",
        tokenizer=str(demo_directory),
        concurrencies=(1, 4),
        requests=2,
        input_tokens=96,
        output_tokens=16,
        capture=False,
        options=("--max-length", "2048"),
    )
    sides = {
        "float32": Side(),
        "NVFP4": Side(variables={"ATTNQUANT_QUANT": "nvfp4", "ATTNQUANT_QUANT_SCALES": "mse"}),
    }
    rates = measure(load, sides, 2, tmp_path)
    print("", *table(rates), sep="\n")
    assert set(rates) == {(side, concurrency) for side in sides for concurrency in (1, 4)}
    assert all(len(values) == 2 and min(values) > 0 for values in rates.values())
