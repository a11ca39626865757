"""Scores of served models: gsm8k and MMLU-Pro by lm-eval, for each coverage, on a GPU.

`pytest tests/test_quality.py -v -m serve -s` prints the table. `tests/serve/test_lm_eval.py` runs
the same code on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from attnquant.nvfp4.report import align
from tests.serve.needs import served_model, skip_without
from tests.serve.scores import evaluate
from tests.serve.server import serve

NVFP4 = {"ATTNQUANT_QUANT": "nvfp4"}
COVERAGES = {
    "bf16": {},
    "MLP in NVFP4": NVFP4 | {"ATTNQUANT_QUANT_IGNORE": "self_attn"},
    "every projection in NVFP4": NVFP4,
}
TASKS = ["gsm8k", "mmlu_pro"]
CONCURRENCY = 64


@pytest.mark.serve
def test_scores_by_coverage(tmp_path: Path) -> None:
    model = served_model()
    skip_without(model, "lm_eval")
    rows = [("task, metric", *COVERAGES)]
    found = []
    for index, variables in enumerate(COVERAGES.values()):
        log = tmp_path / f"server-{index}.log"
        with serve(log, "--model", model, "--max-length", "8192", **variables) as server:
            found.append(
                evaluate(
                    server,
                    served=model,
                    tokenizer=model,
                    tasks=TASKS,
                    folder=tmp_path / f"scores-{index}",
                    chat=True,
                    concurrency=CONCURRENCY,
                )
            )
    for scores in zip(*found, strict=True):
        cells = (f"{score.value:.4f} ± {score.error:.4f}" for score in scores)
        rows.append((f"{scores[0].task}, {scores[0].metric}", *cells))
    print(f"\n{model}", *align(rows), sep="\n")
    assert {score.task for score in found[0]} >= set(TASKS)
