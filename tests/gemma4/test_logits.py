"""The float32 graphs that MAX runs against transformers' float64 logits, on tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.gemma4.pipeline import Pipeline
from tests.gemma4.requests import context
from tests.golden.data import TinyGolden, fingerprint, load_tiny, relative_error
from tests.tiny.gemma4 import CASES, FRAMES, IMAGE, IMAGES, VIDEO, video

# Relative, of the logits' norm.
TOLERANCE = 2e-5
# Of a log-probability. Transformers itself, in float32, is up to 7.9e-5 away from float64 here.
LARGEST_DIFFERENCE = 1e-4
# The one with a vision tower.
VISION = "gemma4-shared-values"


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    return wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)


def assert_equal(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert relative_error(found, expected) < TOLERANCE
    difference = np.abs(log_probabilities(found) - log_probabilities(expected))
    assert difference.max() < LARGEST_DIFFERENCE


# A graph takes minutes to compile. The other two cases share one.
PARAMETERS = [
    pytest.param(name, marks=pytest.mark.slow if name == "gemma4-own-values" else ())
    for name in CASES
]


@pytest.fixture(scope="module", params=PARAMETERS)
def case(
    request: pytest.FixtureRequest, tiny_directory: Callable[[str], Path]
) -> Iterator[tuple[Pipeline, TinyGolden]]:
    directory, golden = tiny_directory(request.param), load_tiny(request.param)
    assert fingerprint(directory) == golden.fingerprint
    yield Pipeline(directory), golden


def test_next_token_log_probabilities_equal_transformers(case: tuple[Pipeline, TinyGolden]) -> None:
    pipeline, golden = case
    for prompt in golden.prompts:
        assert_equal(pipeline.logits([prompt.tokens])[0], prompt.last)


def test_a_batch_of_different_lengths_equals_its_members(case: tuple[Pipeline, TinyGolden]) -> None:
    pipeline, golden = case
    batch = pipeline.logits([prompt.tokens for prompt in golden.prompts])
    for logits, prompt in zip(batch, golden.prompts, strict=True):
        assert_equal(logits, prompt.last)


def test_greedy_tokens_equal_transformers(case: tuple[Pipeline, TinyGolden]) -> None:
    pipeline, golden = case
    prompts = [prompt for prompt in golden.prompts if prompt.greedy is not None]
    assert prompts
    for prompt in prompts:
        found = pipeline.greedy(pipeline.context(prompt.tokens), len(prompt.greedy))
        assert found == prompt.greedy, len(prompt.tokens)


def test_images_are_seen_as_transformers_sees_them(case: tuple[Pipeline, TinyGolden]) -> None:
    pipeline, golden = case
    if golden.image is None:
        pytest.skip("this checkpoint has no vision tower")
    prompt = golden.image
    context = pipeline.context(prompt.tokens, IMAGES)
    assert_equal(pipeline.step([context]).next_token_logits.to_numpy()[0], prompt.last)
    pipeline.release([context])
    # Another request's text beside it, and the encoder's cache, change nothing.
    text = golden.prompts[2]
    contexts = [pipeline.context(text.tokens), pipeline.context(prompt.tokens, IMAGES)]
    rows = pipeline.step(contexts).next_token_logits.to_numpy()
    assert_equal(rows[0], text.last)
    assert_equal(rows[1], prompt.last)
    pipeline.release(contexts)
    # Other images at the same places are other logits.
    swapped = pipeline.context(prompt.tokens, IMAGES[::-1])
    others = pipeline.step([swapped]).next_token_logits.to_numpy()[0]
    assert relative_error(others, prompt.last) > 1e-2
    pipeline.release([swapped])


def test_a_video_is_seen_as_its_frames_as_images(
    case: tuple[Pipeline, TinyGolden], tiny_directory: Callable[[str], Path]
) -> None:
    """Which the test above holds to transformers'."""
    pipeline, golden = case
    if golden.image is None:
        pytest.skip("this checkpoint has no vision tower")
    tiny = CASES[VISION]
    found = pipeline.claim(context(tiny_directory(tiny.name), videos=[video()]))
    image, place = tiny.token(IMAGE), tiny.token(VIDEO)
    prompt = [image if token == place else token for token in found.tokens.all.tolist()]
    same = pipeline.context(prompt, FRAMES)
    other = pipeline.context(prompt, FRAMES[::-1])
    rows = pipeline.step([found, same, other]).next_token_logits.to_numpy()
    pipeline.release([found, same, other])
    assert relative_error(rows[0], rows[1]) < TOLERANCE
    assert relative_error(rows[2], rows[1]) > 1e-2


def test_what_is_encoded_outlives_the_copy_that_max_makes_of_it(
    case: tuple[Pipeline, TinyGolden],
) -> None:
    """MAX may copy it after it let go of it: its memory is not the next images'."""
    pipeline, golden = case
    if golden.image is None:
        pytest.skip("this checkpoint has no vision tower")
    contexts = [pipeline.context(golden.image.tokens, IMAGES) for _ in range(3)]
    addresses = [pipeline.encode(context).ctypes.data for context in contexts]
    pipeline.release(contexts)
    assert len({*addresses}) == len(contexts)


def test_decoding_after_images_equals_transformers(case: tuple[Pipeline, TinyGolden]) -> None:
    pipeline, golden = case
    if golden.image is None:
        pytest.skip("this checkpoint has no vision tower")
    prompt = golden.image
    found = pipeline.greedy(pipeline.context(prompt.tokens, IMAGES), len(prompt.greedy))
    assert found == prompt.greedy
