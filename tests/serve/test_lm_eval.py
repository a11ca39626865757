"""The quality harness, end to end on the CPU: lm-eval scores the served demo on a small task."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.scores import Score, evaluate, scores
from tests.serve.server import serve

TASK = "attnquant_capitals"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task and the tokenizer are here; lm-eval would look for other tasks' models."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_scores_are_read_from_results() -> None:
    results = {
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": 0.1,
            "exact_match,flexible-extract": 0.25,
            "exact_match_stderr,flexible-extract": "N/A",
        }
    }
    one, two = scores(results)
    assert one == Score(task="gsm8k", metric="exact_match,strict-match", value=0.5, error=0.1)
    assert two.value == 0.25 and math.isnan(two.error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [{}, {"ATTNQUANT_QUANT": "nvfp4", "ATTNQUANT_QUANT_SCALES": "mse"}],
    ids=["float32", "nvfp4"],
)
def test_lm_eval_scores_the_served_demo(
    variables: dict[str, str], demo_directory: Path, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
    options = ("--model", "demo", "--max-length", "2048")
    with serve(tmp_path / "server.log", *options, **variables) as server:
        found = evaluate(
            server,
            served="demo",
            tokenizer=str(demo_directory),
            tasks=[TASK],
            folder=tmp_path / "scores",
            chat=False,
            concurrency=2,
        )
    (score,) = found
    print(f"\n{score.task} {score.metric}: {score.value:.3f} ± {score.error:.3f}")
    assert score.task == TASK
    # Half of eight capitals: a server that answered at random would have none.
    assert 0.5 <= score.value <= 1


@pytest.mark.slow
def test_what_lm_eval_cannot_do_is_an_error(
    demo_directory: Path, tmp_path: Path, tiny_directory: Callable[[str], Path]
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
    options = ("--model", str(tiny_directory("pattern2-scalar")), "--max-length", "2048")
    with serve(tmp_path / "server.log", *options) as server, pytest.raises(RuntimeError):
        evaluate(
            server,
            served="no such model",
            tokenizer=str(demo_directory),
            tasks=[TASK],
            folder=tmp_path / "scores",
            chat=False,
            concurrency=1,
        )
