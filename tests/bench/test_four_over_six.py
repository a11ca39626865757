"""The peer is what its paper says: between abs-max and the search, 4 or 6 at each block's top."""

from __future__ import annotations

import numpy as np

from attnquant.nvfp4.reference import encode, relative_error
from bench.four_over_six import four_over_six

WEIGHT = np.random.default_rng(7).standard_normal((64, 640)).astype(np.float32)


def test_it_stands_between_absmax_and_the_search() -> None:
    amax = float(np.abs(WEIGHT).max())
    error = relative_error(WEIGHT, four_over_six(WEIGHT, amax=amax))
    absmax, mse = (relative_error(WEIGHT, encode(WEIGHT, scales=s)) for s in ("absmax", "mse"))
    assert mse < error < 0.97 * absmax


def test_every_block_has_a_four_or_a_six_at_its_top() -> None:
    packed = four_over_six(WEIGHT, amax=float(np.abs(WEIGHT).max())).codes
    codes = np.stack([packed & 7, packed >> 4 & 7], axis=-1).reshape(-1, 16)
    assert set(codes.max(axis=1).tolist()) == {6, 7}
