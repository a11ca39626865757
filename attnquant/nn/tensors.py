"""Tensors between MAX and NumPy: the same memory, seen from either side."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from max.driver import Buffer
from max.dtype import DType
from max.graph import Shape
from max.graph.weights import WeightData
from numpy.typing import NDArray

State = dict[str, WeightData]
"""A graph's weights, by name."""

# What NumPy has no dtype of its own for.
_EXTENDED: dict[DType, Any] = {
    DType.bfloat16: ml_dtypes.bfloat16,
    DType.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """NumPy's, or ml_dtypes', dtype of the same bits."""
    found: np.dtype[Any] = np.dtype(_EXTENDED.get(dtype) or dtype.to_numpy())
    return found


def to_numpy(weight: WeightData) -> NDArray[Any]:
    """The tensor as an array over the same memory."""
    buffer = weight.to_buffer()
    if weight.dtype in _EXTENDED:
        bits = DType.uint16 if weight.dtype == DType.bfloat16 else DType.uint8
        return np.asarray(buffer.view(bits).to_numpy()).view(_EXTENDED[weight.dtype])
    return np.asarray(buffer.to_numpy())


def from_numpy(array: NDArray[Any], dtype: DType, name: str) -> WeightData:
    """The array as a tensor over the same memory; `dtype` says what its bits are."""
    bits = array.view(f"u{array.itemsize}")
    return WeightData(Buffer.from_numpy(bits).view(dtype), name, dtype, Shape(array.shape))
