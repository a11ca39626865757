"""NVFP4 scales by "Four Over Six" (Cook et al., arXiv 2512.02010), as a peer of our searches.

E2M1 is coarse near its top: 4, then 6. So each block is scaled twice, to have its largest magnitude
become 6 or 4, and keeps the scale under which its squared error is less. Written from the paper, on
the arithmetic of `attnquant.nvfp4`.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attnquant.nvfp4.format import BLOCK_SIZE, NVFP4Weight
from attnquant.nvfp4.scales import (
    ScaleTables,
    absmax_bytes,
    e2m1_codes,
    encode_scale,
    global_scale,
    squared_errors,
)


def four_over_six(weight: NDArray[Any], *, amax: float) -> NVFP4Weight:
    """Quantizes a finite `[out, in]`; `amax` is the fused group's largest magnitude."""
    out, columns = weight.shape
    blocks = np.ascontiguousarray(weight, np.float32).reshape(-1, BLOCK_SIZE)
    magnitudes = np.abs(blocks)
    scale, to_scale = global_scale(amax), encode_scale(amax)
    tables = ScaleTables.of(scale)
    six = absmax_bytes(magnitudes, to_scale)
    four = absmax_bytes(magnitudes * np.float32(1.5), to_scale)
    is_better = squared_errors(magnitudes, four, tables) < squared_errors(magnitudes, six, tables)
    chosen = np.where(is_better, four, six)
    codes = e2m1_codes(magnitudes * tables.inverses[chosen, None])
    codes |= np.where(blocks < 0, np.uint8(8), np.uint8(0))
    return NVFP4Weight(
        codes=(codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)).reshape(out, columns // 2),
        block_scales=chosen.astype(np.uint8).reshape(out, -1).view(ml_dtypes.float8_e4m3fn),
        global_scales=np.array([scale], np.float32),
        part_rows=(out,),
    )
