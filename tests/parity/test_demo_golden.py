"""The demo checkpoint's golden answers, made anew with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")
pytest.importorskip("gguf", reason="needs the demo checkpoint: pip install -e '.[demo]'")

from attnquant.demo import prepare_demo
from tests.golden import make_golden, reference
from tests.golden.data import (
    EVALUATION_TEXT,
    TEXTS,
    DemoPrompt,
    fingerprint,
    load_demo,
    relative_error,
)

SAME = 2e-5


@pytest.fixture(scope="module")
def demo() -> Path:
    return prepare_demo()


@pytest.fixture(scope="module")
def model(demo: Path) -> Any:
    return reference.load(demo)


@pytest.mark.parametrize("prompt", load_demo().prompts, ids=lambda prompt: prompt.name)
def test_golden_logits_are_what_transformers_says(prompt: DemoPrompt, model: Any) -> None:
    values = reference.logits(model, prompt.tokens)[0].astype(np.float64)
    assert relative_error(values[load_demo().vocab_ids], prompt.last) < SAME
    assert np.linalg.norm(values) == pytest.approx(prompt.norm, rel=SAME)
    assert np.logaddexp.reduce(values) == pytest.approx(prompt.logsumexp, rel=SAME)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", load_demo().prompts, ids=lambda prompt: prompt.name)
def test_golden_text_is_what_transformers_writes(prompt: DemoPrompt, model: Any) -> None:
    chosen, lead = reference.greedy(model, prompt.tokens, len(prompt.greedy))
    assert chosen == prompt.greedy
    assert lead > make_golden.SMALLEST_LEAD / 2


def test_golden_file_is_of_this_demo_and_of_these_texts(demo: Path) -> None:
    golden = load_demo()
    assert fingerprint(demo) == golden.fingerprint
    assert golden.evaluation_tokens == make_golden.encode(demo, EVALUATION_TEXT)
    for prompt in golden.prompts:
        assert prompt.tokens == make_golden.encode(demo, TEXTS / f"{prompt.name}.txt")
