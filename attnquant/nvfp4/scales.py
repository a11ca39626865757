"""How a block's scale is chosen: from its largest magnitude (`absmax`), or by search (`mse`).

The abs-max scale maps a block's largest magnitude to 6, the largest code. It wastes the grid: E2M1
is coarse near 6 (4, then 6), so a somewhat larger or smaller scale often rounds the other fifteen
values better. The search tries every E4M3 byte from 3 below the abs-max byte to 7 above it and
keeps the one with the least squared error. arXiv 2606.07618 proves that this window holds the
optimum; the stored bytes are as many, and the kernels that read them are the same. Only where an
outlier elsewhere pushes a block's abs-max byte below 8, among the subnormals, whose spacing does
not shrink with them, can a byte outside the window (13 at most was seen) be better still.

`reference` defines the arithmetic to the last bit; this module is that text in NumPy, over blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attnquant.nvfp4.format import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    E4M3_NAN,
    E4M3_VALUES,
)

FLOAT32_MAX = np.finfo(np.float32).max
CODES_BELOW = 3
CODES_ABOVE = 7

# Columns that matter little let the scale shrink further below the abs-max scale: the columns that
# do may be small ones. With 8 the weighted search equalled one over all bytes where it was tried.
WEIGHTED_CODES_BELOW = 8

# The least |y| that rounds up to each of the codes 1 ... 7. The midpoints are .25 .75 1.25 1.75
# 2.5 3.5 5; a tie goes to the even code, so every second midpoint belongs to the code below it.
_FIRST_MAGNITUDES: NDArray[np.float32] = np.array(
    [
        np.nextafter(np.float32(midpoint), np.float32(8)) if below_is_even else midpoint
        for midpoint, below_is_even in (
            (0.25, True),
            (0.75, False),
            (1.25, True),
            (1.75, False),
            (2.5, True),
            (3.5, False),
            (5.0, True),
        )
    ],
    np.float32,
)


def encode_scale(amax: float | np.floating[Any]) -> np.float32:
    """Factor that maps the largest magnitude of a fused group to 6 · 448; never infinite."""
    with np.errstate(divide="ignore", over="ignore"):
        return min(np.float32(E2M1_MAX * E4M3_MAX) / np.float32(amax), FLOAT32_MAX)


def global_scale(amax: float | np.floating[Any]) -> np.float32:
    """The stored global scale of a fused group whose largest magnitude is `amax`; above 0.

    Args:
        amax: finite, not negative. 0 gives the smallest scale there is, 2^-128.
    """
    return np.float32(1) / encode_scale(amax)


def e2m1_codes(magnitudes: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Nearest code 0 ... 7 of magnitudes in units of the step; ties to even; 6 and more is 7."""
    codes = np.zeros(magnitudes.shape, np.uint8)
    for first in _FIRST_MAGNITUDES:
        codes += magnitudes >= first
    return codes


def absmax_bytes(magnitudes: NDArray[np.float32], encode: np.float32) -> NDArray[np.uint8]:
    """The abs-max scale byte of each block.

    Args:
        magnitudes: float32 `[blocks, 16]`.
        encode: `encode_scale` of the fused group.

    Returns:
        uint8 `[blocks]`: 0 for an all-zero block, 1 ... 126 for any other.
    """
    block_amax = magnitudes.max(axis=1)
    with np.errstate(over="ignore"):
        scaled = np.minimum(block_amax / np.float32(E2M1_MAX) * encode, np.float32(E4M3_MAX))
    nearest = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(block_amax > 0, np.maximum(nearest, 1), 0).astype(np.uint8)


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaleTables:
    """What each scale byte means under one global scale.

    Attributes:
        inverses: float32 `[127]`: what a weight is multiplied by before it is rounded.
        values: float32 `[127, 8]`: the magnitude that each code decodes to.
        unit: a power of two that brings `values` to the order of 1, so that squares neither
            overflow nor vanish.
    """

    inverses: NDArray[np.float32]
    values: NDArray[np.float32]
    unit: np.float32

    @classmethod
    def of(cls, scale: np.float32) -> ScaleTables:
        """The tables under the global scale `scale`."""
        exponent = int(np.frexp(scale)[1])
        with np.errstate(divide="ignore", over="ignore"):
            return cls(
                inverses=np.minimum(np.float32(1) / (E4M3_VALUES * scale), FLOAT32_MAX),
                values=(E4M3_VALUES[:, None] * E2M1_VALUES) * scale,
                unit=np.ldexp(np.float32(1), int(np.clip(-exponent, -126, 127))),
            )


def mse_bytes(
    magnitudes: NDArray[np.float32],
    absmax: NDArray[np.uint8],
    tables: ScaleTables,
    *,
    importance: NDArray[np.float32] | None = None,
    below: int | None = None,
    above: int = CODES_ABOVE,
) -> NDArray[np.uint8]:
    """The scale byte of least squared error of each block; the abs-max byte wins a tie.

    Args:
        magnitudes: float32 `[blocks, 16]`.
        absmax: uint8 `[blocks]`, from `absmax_bytes`.
        tables: of the fused group's global scale.
        importance: float32 `[blocks, 16]`, what each square counts; all alike if None.
        below: how many bytes below the abs-max byte to try; 3 if None, 8 with an importance.
        above: how many bytes above it to try.

    Returns:
        uint8 `[blocks]`, 0 only where `absmax` is 0.
    """
    if below is None:
        below = CODES_BELOW if importance is None else WEIGHTED_CODES_BELOW
    centre = absmax.astype(np.int32)
    best = absmax.copy()
    least = squared_errors(magnitudes, absmax, tables, importance)
    for offset in range(-below, above + 1):
        byte = centre + offset
        inside = (byte >= 1) & (byte < E4M3_NAN) & (centre > 0)
        if offset == 0 or not inside.any():
            continue
        candidate = np.where(inside, byte, centre).astype(np.uint8)
        error = squared_errors(magnitudes, candidate, tables, importance)
        better = error < least
        best[better] = candidate[better]
        least[better] = error[better]
    return best


def squared_errors(
    magnitudes: NDArray[np.float32],
    scale_bytes: NDArray[np.uint8],
    tables: ScaleTables,
    importance: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """Squared error of each block under a scale byte, in units of `tables.unit` squared.

    Args:
        magnitudes: float32 `[blocks, 16]`.
        scale_bytes: uint8 `[blocks]`.
        tables: of the fused group's global scale.
        importance: float32 `[blocks, 16]`, what each square counts; all alike if None.

    Returns:
        float64 `[blocks]`, summed by halves.
    """
    with np.errstate(over="ignore"):
        codes = e2m1_codes(magnitudes * tables.inverses[scale_bytes, None])
        decoded = np.take(tables.values * tables.unit, scale_bytes[:, None] * np.intp(8) + codes)
        residuals = (magnitudes * tables.unit - decoded).astype(np.float64)
    squares = residuals * residuals
    if importance is not None:
        squares *= importance
    for half in (8, 4, 2, 1):
        squares = squares[:, :half] + squares[:, half:]
    return squares[:, 0]
