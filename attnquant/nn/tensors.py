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


def to_numpy(weight: WeightData) -> NDArray[Any]:
    """The tensor as an array over the same memory; bfloat16 as `ml_dtypes.bfloat16`."""
    buffer = weight.to_buffer()
    if weight.dtype != DType.bfloat16:
        return np.asarray(buffer.to_numpy())
    return np.asarray(buffer.view(DType.uint16).to_numpy()).view(ml_dtypes.bfloat16)


def from_numpy(array: NDArray[Any], dtype: DType, name: str) -> WeightData:
    """The array as a tensor over the same memory; `dtype` says what its bits are."""
    bits = array.view(f"u{array.itemsize}")
    return WeightData(Buffer.from_numpy(bits).view(dtype), name, dtype, Shape(array.shape))
