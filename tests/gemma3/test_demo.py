"""The real Gemma 3 270M against transformers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from max.pipelines.lib.auto_model import AutoModel

from tests.golden.data import fingerprint, load_demo, relative_error
from tests.models import load_model

GOLDEN = load_demo()


@pytest.fixture(scope="module")
def model(demo_directory: Path) -> Iterator[AutoModel]:
    assert fingerprint(demo_directory) == GOLDEN.fingerprint
    with load_model(demo_directory, max_batch_size=1) as loaded:
        yield loaded


@pytest.mark.parametrize("prompt", GOLDEN.prompts, ids=lambda prompt: prompt.name)
def test_logits_and_greedy_tokens_equal_transformers(model: AutoModel, prompt) -> None:
    count = len(prompt.greedy)
    result = model.generate(
        [prompt.tokens],
        max_new_tokens=count,
        temperature=0,
        top_k=1,
        ignore_eos=True,
        output_logits=True,
    )
    logits = result.logits[0][0]
    assert relative_error(logits[GOLDEN.vocab_ids], prompt.last) < 1e-4
    assert np.linalg.norm(logits.astype(np.float64)) == pytest.approx(prompt.norm, rel=1e-4)
    log_sum = np.logaddexp.reduce(logits.astype(np.float64))
    assert log_sum == pytest.approx(prompt.logsumexp, abs=1e-3)
    assert result.sequences[0][-count:] == prompt.greedy
