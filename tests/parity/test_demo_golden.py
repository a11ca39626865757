"""The demo checkpoint's golden answers, made anew with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")

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
def model(demo_directory: Path) -> Any:
    return reference.load(demo_directory)


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


def test_golden_file_is_of_this_demo_and_of_these_texts(demo_directory: Path) -> None:
    golden, encode = load_demo(), make_golden.encoder(demo_directory)
    assert fingerprint(demo_directory) == golden.fingerprint
    assert golden.evaluation_tokens == encode(EVALUATION_TEXT)
    for prompt in golden.prompts:
        assert prompt.tokens == encode(TEXTS / f"{prompt.name}.txt")
