"""Tensors between MAX and NumPy: the same memory, seen from either side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from max.driver import Buffer
from max.dtype import DType
from max.graph import Shape
from max.graph.weights import WeightData
from numpy.typing import NDArray

from attnquant.checkpoint.safetensors import DTYPE_NAMES, TensorSpec

State = dict[str, WeightData]
"""A graph's weights, by name."""

# MAX aligns its own tensors to this many bytes.
_ALIGNMENT = 64

# What NumPy has no dtype of its own for.
_EXTENDED: dict[DType, Any] = {
    DType.bfloat16: ml_dtypes.bfloat16,
    DType.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """NumPy's, or ml_dtypes', dtype of the same bits."""
    found: np.dtype[Any] = np.dtype(_EXTENDED.get(dtype) or dtype.to_numpy())
    return found


def max_dtype(dtype: np.dtype[Any]) -> DType:
    """MAX's dtype of the same bits: the inverse of `numpy_dtype`."""
    extended = [ours for ours, theirs in _EXTENDED.items() if dtype == theirs]
    return extended[0] if extended else DType.from_numpy(dtype)


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


def viewed(weight: WeightData, dtype: DType) -> WeightData:
    """The same bytes called another dtype of the same size; what has that dtype is itself."""
    if weight.dtype == dtype:
        return weight
    if weight.dtype.size_in_bytes != dtype.size_in_bytes:
        raise ValueError(f"{weight.name}: found {weight.dtype}, expected the size of {dtype}")
    return WeightData(weight.to_buffer().view(dtype), weight.name, dtype, weight.shape)


def specs_of(data: Mapping[str, WeightData]) -> dict[str, TensorSpec]:
    """What tensors are, in a checkpoint's words, by name."""
    return {
        name: TensorSpec(
            dtype=DTYPE_NAMES[numpy_dtype(weight.dtype)], shape=tuple(map(int, weight.shape))
        )
        for name, weight in data.items()
    }


def aligned(weight: WeightData) -> WeightData:
    """The tensor, or a copy of it, at an address that MAX would give a tensor of its own.

    MAX 26.7's CPU code mostly heeds that the graph leaves a weight's alignment open, but not where
    an elementwise operation on one is fused into a norm: its aligned loads then end the process.
    """
    array = to_numpy(weight)
    if array.ctypes.data % _ALIGNMENT == 0:
        return weight
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return from_numpy(copy, weight.dtype, weight.name)
