"""The two sides of `bench.attention` do the same work."""

from __future__ import annotations

import numpy as np
import pytest

from bench.attention import LAYERS, MAX, OURS, Side


@pytest.mark.parametrize(("past", "new"), [(0, 9), (600, 1)])
def test_both_sides_see_the_same(past: int, new: int) -> None:
    layer = LAYERS["Gemma 3 270M, sliding"]
    found = []
    for name in (MAX, OURS):
        side = Side(layer, name, 640)
        if past:
            side.call(0, past)()
        (seen,) = side.call(past, new)()
        found.append(np.array(seen.to_numpy()))
    assert np.abs(found[0] - found[1]).max() < 2e-5 * np.abs(found[0]).max()
