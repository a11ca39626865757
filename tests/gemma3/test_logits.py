"""The graph that MAX runs against transformers' float32 logits, on tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from max.pipelines.lib.auto_model import AutoModel

from tests.golden.data import TinyGolden, fingerprint, load_tiny, relative_error
from tests.models import load_model
from tests.tiny.gemma3 import CASES

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=list(CASES))
def case(
    request: pytest.FixtureRequest, tiny_directory: Callable[[str], Path]
) -> Iterator[tuple[AutoModel, TinyGolden]]:
    directory, golden = tiny_directory(request.param), load_tiny(request.param)
    assert fingerprint(directory) == golden.fingerprint
    # One of them returns the logits of all positions, as `--enable-echo` asks for.
    with load_model(directory, enable_echo=request.param == "untied-sharded") as model:
        yield model, golden


def test_next_token_logits_equal_transformers(case: tuple[AutoModel, TinyGolden]) -> None:
    model, golden = case
    for prompt in golden.prompts:
        (logits,) = model.generate([prompt.tokens], max_new_tokens=1, output_logits=True).logits
        assert relative_error(logits[0], prompt.last) < TOLERANCE, len(prompt.tokens)


def test_a_batch_of_different_lengths_equals_its_members(
    case: tuple[AutoModel, TinyGolden],
) -> None:
    model, golden = case
    rows = [prompt.tokens for prompt in golden.prompts]
    batch = model.generate(rows, max_new_tokens=1, output_logits=True).logits
    for logits, prompt in zip(batch, golden.prompts, strict=True):
        assert relative_error(logits[0], prompt.last) < TOLERANCE, len(prompt.tokens)


def test_greedy_tokens_equal_transformers(case: tuple[AutoModel, TinyGolden]) -> None:
    model, golden = case
    prompts = [prompt for prompt in golden.prompts if prompt.greedy is not None]
    assert prompts
    for prompt in prompts:
        count = len(prompt.greedy)
        sequences = model.generate(
            [prompt.tokens], max_new_tokens=count, temperature=0, top_k=1, ignore_eos=True
        ).sequences
        assert sequences[0][-count:] == prompt.greedy, len(prompt.tokens)


def test_log_probabilities_are_those_of_the_logits(case: tuple[AutoModel, TinyGolden]) -> None:
    model, golden = case
    prompt = golden.prompts[-1]
    result = model.generate([prompt.tokens], max_new_tokens=1, output_logprobs=5, temperature=0)
    reference = prompt.last - np.logaddexp.reduce(prompt.last.astype(np.float64))
    top = result.log_probs[0].top_log_probabilities[0]
    for token, value in top.items():
        assert value == pytest.approx(reference[token], abs=1e-3)
    assert int(reference.argmax()) in top
