"""Rotary tables against the formula, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from attnquant.nn.rotary import rotary_table


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_rows_are_cosine_and_sine_of_each_angle(factor: float) -> None:
    theta, head_dim = 10_000.0, 64
    table = rotary_table(theta=theta, head_dim=head_dim, positions=300, factor=factor)
    assert table.shape == (300, head_dim)
    assert table.dtype == np.float32
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim) / factor
    angles = np.arange(300)[:, None] * frequencies
    assert np.allclose(table[:, 0::2], np.cos(angles), atol=2e-5)
    assert np.allclose(table[:, 1::2], np.sin(angles), atol=2e-5)


def test_partial_rotation_leaves_the_last_pairs_alone() -> None:
    whole = rotary_table(theta=1e6, head_dim=64, positions=200)
    part = rotary_table(theta=1e6, head_dim=64, positions=200, rotated=0.25)
    assert np.array_equal(part[:, :16], whole[:, :16])
    assert np.array_equal(part[:, 16::2], np.ones((200, 24)))
    assert np.array_equal(part[:, 17::2], np.zeros((200, 24)))
