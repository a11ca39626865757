"""Rotary position embedding tables, for the half-split ("rotate half") layout.

Row p is `cos(p·f_0), sin(p·f_0), cos(p·f_1), ...` with `f_i = theta^(-2i/head_dim) / factor` (Su et
al., arXiv 2104.09864; the factor is linear position scaling). Angles are rounded to float32, as
transformers rounds them: at position 100,000 that is a hundredth of a radian.

Partial rotation ("proportional" in transformers) keeps these frequencies for the first pairs of a
head and turns the others by no angle at all.

A table is bound to the graph like a weight, so that one compiled graph serves every theta.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rotary_table(
    *, theta: float, head_dim: int, positions: int, factor: float = 1.0, rotated: float = 1.0
) -> NDArray[np.float32]:
    """The table of `positions` rows.

    Args:
        theta: the base period.
        head_dim: elements of one head.
        positions: how many positions to tabulate.
        factor: position p is rotated like position p / factor.
        rotated: the fraction of a head's pairs that is rotated, rounded down.

    Returns:
        float32 `[positions, head_dim]`.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = (theta**-exponents).astype(np.float32) / np.float32(factor)
    frequencies[int(rotated * head_dim // 2) :] = 0
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).reshape(positions, head_dim)
