"""Divergences against their definition in float64."""

from __future__ import annotations

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from attnquant.divergence import chunks, compare, standard_error

LOGITS = arrays.arrays(
    np.float32, (2, 3, 17), elements=st.floats(-40, 40, width=32, allow_subnormal=False)
)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    return wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)


@given(LOGITS, st.lists(st.integers(0, 16), min_size=3, max_size=3))
def test_compare_is_the_definition(logits: NDArray[np.float32], targets: list[int]) -> None:
    reference, other = logits
    p, q = log_softmax(reference), log_softmax(other)
    kl, top1, nll = compare(reference, other, targets)
    np.testing.assert_allclose(kl, (np.exp(p) * (p - q)).sum(axis=-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(top1, reference.argmax(axis=-1) == other.argmax(axis=-1))
    np.testing.assert_allclose(nll, -q[np.arange(3), targets], rtol=1e-5, atol=1e-5)


def test_a_model_does_not_diverge_from_itself_shifted() -> None:
    logits = np.random.default_rng(0).normal(size=(4, 1000)).astype(np.float32)
    kl, top1, _ = compare(logits, logits + np.float32(8), [0] * 4)
    assert np.abs(kl).max() < 1e-6 and top1.all()


def test_kl_is_not_symmetric() -> None:
    p, q = np.float32([[0, 0, 5]]), np.float32([[0, 3, 0]])
    assert compare(p, q, [0])[0, 0] != pytest.approx(compare(q, p, [0])[0, 0], rel=0.1)


def test_targets_must_be_as_many_as_positions() -> None:
    with pytest.raises(ValueError):
        compare(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32), [0])


@given(st.lists(st.integers(), min_size=2), st.integers(2, 20))
def test_chunks_hold_every_token_once_after_bos(tokens: list[int], size: int) -> None:
    pieces = chunks(tokens, size)
    assert [token for piece in pieces for token in piece[1:]] == tokens[1:]
    assert all(piece[0] == tokens[0] and 2 <= len(piece) <= size for piece in pieces)


def test_standard_error_is_that_of_a_mean() -> None:
    means = [np.random.default_rng(seed).normal(size=100).mean() for seed in range(2000)]
    one = standard_error(np.random.default_rng(5).normal(size=100))
    assert one == pytest.approx(np.std(means), rel=0.25)
