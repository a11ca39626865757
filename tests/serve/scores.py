"""Scores of a served model by lm-eval (EleutherAI's harness), which asks the server as a client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.serve.server import ROOT, Server

TASKS = Path(__file__).parent / "tasks"


@dataclass(frozen=True, kw_only=True)
class Score:
    """A task's score.

    Attributes:
        task: its name.
        metric: `exact_match,strict-match`, ...
        value: from 0 to 1.
        error: its standard error; NaN where lm-eval gives none.
    """

    task: str
    metric: str
    value: float
    error: float


def evaluate(
    server: Server,
    *,
    served: str,
    tokenizer: str,
    tasks: Sequence[str],
    folder: Path,
    chat: bool,
    concurrency: int,
    limit: int | None = None,
) -> list[Score]:
    """Runs lm-eval against a live server.

    Args:
        server: that answers.
        served: the model's name in requests.
        tokenizer: a directory, or a Hugging Face id.
        tasks: lm-eval's, or those of `tests/serve/tasks`.
        folder: where lm-eval writes its results.
        chat: whether the model answers turns, at `/v1/chat/completions`, or continues text.
        concurrency: requests at once.
        limit: only so many examples of each task.

    Raises:
        RuntimeError: lm-eval failed.
    """
    endpoint = "chat/completions" if chat else "completions"
    settings = {
        "model": served,
        "base_url": f"{server.url}/{endpoint}",
        "tokenizer": tokenizer,
        "num_concurrent": concurrency,
        "tokenized_requests": False,
        "max_retries": 1,
    }
    command = [sys.executable, "-m", "lm_eval"]
    command += ["--model", "local-chat-completions" if chat else "local-completions"]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in settings.items())]
    command += ["--tasks", ",".join(tasks), "--include_path", str(TASKS)]
    command += ["--output_path", str(folder)]
    if chat:
        command.append("--apply_chat_template")
    if limit is not None:
        command += ["--limit", str(limit)]
    environ = {"OPENAI_API_KEY": "none", **os.environ}
    run = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    results = sorted(folder.rglob("results_*.json"))
    if run.returncode or not results:
        raise RuntimeError(f"lm_eval failed:\n{(run.stdout + run.stderr)[-3000:]}")
    return scores(json.loads(results[-1].read_text(encoding="utf-8"))["results"])


def scores(results: dict[str, dict[str, object]]) -> list[Score]:
    """Every metric of lm-eval's `results` object."""
    found = []
    for task, metrics in results.items():
        for metric, value in metrics.items():
            name, comma, filtered = metric.partition(",")
            if comma and not name.endswith("_stderr") and isinstance(value, (int, float)):
                error = metrics.get(f"{name}_stderr,{filtered}")
                error = float(error) if isinstance(error, (int, float)) else float("nan")
                found.append(Score(task=task, metric=metric, value=float(value), error=error))
    return found
