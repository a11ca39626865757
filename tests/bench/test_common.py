"""Alternation, spread, what is refused, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.common import Run, Sample, alternate, device, environment, ratio, show_ratio


def test_a_sample_is_median_and_spread() -> None:
    sample = Sample.of([3.0, 1.0, 10.0])
    assert (sample.median, sample.spread, sample.values) == (3.0, 9.0, (3.0, 1.0, 10.0))
    assert sample.show(1) == "3.0 ± 4.5"


@pytest.mark.parametrize(
    ("over", "under", "expected"),
    [
        pytest.param([4, 4], [2, 2], 2.0, id="apart"),
        pytest.param([3.9, 4.1], [1.9, 2.1], 2.0, id="apart by more than both spreads"),
        pytest.param([3, 5], [2, 2.5], None, id="the numerator spreads wider"),
        pytest.param([4, 4], [2, 5], None, id="the denominator spreads wider"),
        pytest.param([3, 3], [3, 3], None, id="equal"),
        pytest.param([2, 4], [4, 6], None, id="apart by the spread exactly"),
    ],
)
def test_a_ratio_within_the_spread_is_refused(
    over: list[float], under: list[float], expected: float | None
) -> None:
    found = ratio(Sample.of(over), Sample.of(under))
    assert found == (None if expected is None else pytest.approx(expected))
    assert show_ratio(found) == ("within the spread" if expected is None else "2.00x")


def test_sides_take_turns_and_warm_ups_do_not_count() -> None:
    order: list[str] = []

    def side(name: str) -> int:
        order.append(name)
        return len(order)

    sides = {name: lambda name=name: side(name) for name in "abc"}
    results = alternate(sides, rounds=3, warmups=1)
    rounds = ["".join(order[start : start + 3]) for start in range(0, 12, 3)]
    assert rounds == ["cab", "abc", "bca", "cab"]
    assert results == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}


def test_the_environment_has_the_given_settings_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATTNQUANT_QUANT_SCALES", "absmax")
    monkeypatch.setenv("UNRELATED", "1")
    variables = environment(ATTNQUANT_QUANT="nvfp4")
    assert variables["ATTNQUANT_QUANT"] == "nvfp4" and variables["UNRELATED"] == "1"
    assert "ATTNQUANT_QUANT_SCALES" not in variables


def test_the_json_file_says_what_where_and_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "speed.json"
    run = Run("speed", "How fast it is.")
    run.parser.add_argument("--rounds", type=int)
    options = run.parse(["--rounds", "2", "--json", str(path)])
    assert options.rounds == 2
    run.report([("a", "b"), ("1", "2")], {"rate": Sample.of([1.0, 2.0])})
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["command"] == f"python -m bench.speed --rounds 2 --json {path}"
    assert content["figures"] == {"rate": {"median": 1.5, "spread": 1.0, "values": [1.0, 2.0]}}
    assert content["device"].items() >= device().items()
    assert content["versions"].keys() >= {"python", "modular", "numpy", "attnquant"}
    assert str(device()["cores"]) in capsys.readouterr().out


def test_the_device_has_a_cpu_and_cores() -> None:
    where = device()
    assert where["cpu"] and where["cores"] >= 1 and where["memory_gib"] > 0
