"""What the measurements on served models need, and whether it is there."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

MODEL_VARIABLE = "BENCH_MODEL"
MODEL = "google/gemma-3-1b-it"


def served_model() -> str:
    """The model to serve: a directory or a Hugging Face id, which `BENCH_MODEL` may name."""
    return os.environ.get(MODEL_VARIABLE, MODEL)


def missing(model: str, *modules: str) -> list[str]:
    """What is missing to serve a model on a GPU and to measure it with these modules."""
    from huggingface_hub import get_token, try_to_load_from_cache
    from max.driver import accelerator_count

    found = []
    if accelerator_count() == 0:
        found.append("a GPU")
    is_local = Path(model).is_dir() or isinstance(try_to_load_from_cache(model, "config.json"), str)
    if not is_local and get_token() is None:
        found.append(f"a Hugging Face token with access to {model} (HF_TOKEN)")
    found += [f"the Python module {name}" for name in modules if find_spec(name) is None]
    return found


def skip_without(model: str, *modules: str) -> None:
    """Skips a test, and says in one line what is missing."""
    if found := missing(model, *modules):
        pytest.skip(
            f"missing: {', '.join(found)}; the same code runs on a CPU: pytest -m slow tests/serve"
        )
