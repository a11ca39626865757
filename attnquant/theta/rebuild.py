"""From a bundle back to the weight: `W_eff = s·W0 + U·Vᵀ`.

The sum is float32 and is rounded once, to the dtype that was asked for. Rows are done a strip at a
time, so that what is needed beyond the result is small however large the projection is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from attnquant.theta.bundle import ThetaBundle

# Elements of a strip: 4 MB of float32, which stays in a core's cache.
_STRIP = 1 << 20


def effective_weight(bundle: ThetaBundle, dtype: DTypeLike | None = None) -> NDArray[Any]:
    """The weight that a bundle stands for.

    Args:
        bundle: of any kind.
        dtype: of the result; by default the checkpoint's at passthrough and float32 elsewhere.

    Returns:
        `[out, in]`. At passthrough and in the checkpoint's dtype it is `bundle.w0` itself.
    """
    if bundle.s is None:
        return bundle.w0 if dtype is None else bundle.w0.astype(dtype, copy=False)
    weight = np.empty(bundle.w0.shape, np.float32 if dtype is None else dtype)
    rows, columns = bundle.w0.shape
    right = bundle.v.T.astype(np.float32, copy=False)
    step = max(1, _STRIP // max(1, columns))
    for start in range(0, rows, step):
        strip = slice(start, start + step)
        part = bundle.s[strip, None] * bundle.w0[strip].astype(np.float32, copy=False)
        part += bundle.u[strip].astype(np.float32, copy=False) @ right
        weight[strip] = part
    return weight
