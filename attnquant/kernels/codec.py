"""The host codec: `attnquant.nvfp4.reference` in Mojo, on all cores, byte-equal to it.

One graph holds the whole codec. It is compiled when it is first needed (MAX keeps the result in its
cache) and reads weights where they are, memory-mapped files included: nothing is copied on the way
in, and results are written straight into NumPy arrays.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import ml_dtypes
import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from numpy.typing import NDArray

from attnquant.errors import CheckpointError
from attnquant.kernels import extensions
from attnquant.nvfp4.format import BLOCK_SIZE, NVFP4Weight
from attnquant.nvfp4.reference import check_importance, check_source
from attnquant.nvfp4.scales import global_scale

# The actions of `attnquant_nvfp4_codec`, as in mojo/ops.mojo.
_LARGEST, _ABSMAX, _MSE, _DECODE, _ERROR = range(5)
_FORMATS: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(ml_dtypes.bfloat16): 2,
}
# An `amax` that asks for the weight's own.
_OWN = -1.0


def largest_magnitude(weight: NDArray[Any], *, name: str = "weight") -> np.float32:
    """The largest magnitude of a finite `[out, in]` weight, exactly; 0 if it is empty.

    Raises:
        CheckpointError: not of rank 2, not float32, float16 or bfloat16, `in` not a multiple of
            16, or a NaN or infinity: names the tensor, and the row and column of the first.
    """
    check_source(weight, name)
    if not weight.size:
        return np.float32(0)
    weight = np.ascontiguousarray(weight)
    return _largest(weight, name, *_run(_LARGEST, weight=weight, factor=_OWN))


def _largest(weight: NDArray[Any], name: str, bits: float, place: float) -> np.float32:
    """The largest magnitude from its bits; `place` is where one is not finite, or -1."""
    if place >= 0:
        row, column = divmod(int(place), weight.shape[1])
        raise CheckpointError(
            f"{name}: found {weight[row, column]} at [{row}, {column}], expected finite weights; "
            "repair the checkpoint, or keep this projection as it is with ATTNQUANT_QUANT_IGNORE"
        )
    width = np.uint32 if weight.dtype.itemsize == 4 else np.uint16
    largest: np.float32 = np.array([bits], width).view(weight.dtype).astype(np.float32)[0]
    return largest


def encode(
    weight: NDArray[Any],
    *,
    scales: Literal["absmax", "mse"] = "mse",
    amax: float | None = None,
    importance: NDArray[np.float32] | None = None,
    name: str = "weight",
) -> NVFP4Weight:
    """Quantizes one projection.

    Args:
        weight: float32, float16 or bfloat16 `[out, in]`, `in` a multiple of 16.
        scales: how block scales are chosen.
        amax: the largest magnitude of the fused group, which sets the global scale that its
            projections share; this projection's own if None.
        importance: float32 `[in]`, above 0: how much the search minds an error in each input
            column; all alike if None.
        name: the tensor's name, for errors.

    Raises:
        CheckpointError: as `largest_magnitude`.
        ValueError: `amax` is below this projection's own largest magnitude, or `importance` is not
            one finite number above 0 for each column.
    """
    check_source(weight, name)
    check_importance(importance, weight, name)
    weight = np.ascontiguousarray(weight)
    out, columns = weight.shape
    codes = np.empty((out, columns // 2), np.uint8)
    block_scales = np.empty((out, columns // BLOCK_SIZE), np.uint8)
    own = np.float32(0)
    if weight.size:
        statistics = _run(
            _MSE if scales == "mse" else _ABSMAX,
            weight=weight,
            codes=codes,
            scales=block_scales,
            factor=_OWN if amax is None else amax,
            importance=importance,
        )
        own = _largest(weight, name, *statistics)
    largest = own if amax is None else np.float32(amax)
    if not own <= largest < np.inf:
        raise ValueError(f"{name}: found amax {amax}, expected finite, at least its own {own}")
    return NVFP4Weight(
        codes=codes,
        block_scales=block_scales.view(ml_dtypes.float8_e4m3fn),
        global_scales=np.array([global_scale(largest)], np.float32),
        part_rows=(out,),
    )


def decode(weight: NVFP4Weight) -> NDArray[np.float32]:
    """Float32 `[out, in]` of a quantized weight: the exact product code · scale, times `g`."""
    values = np.empty(weight.shape, np.float32)
    for rows, scale in _parts(weight):
        _run(
            _DECODE,
            codes=weight.codes[rows],
            scales=weight.block_scales[rows],
            factor=scale,
            values=values[rows],
        )
    return values


def relative_error(weight: NDArray[Any], quantized: NVFP4Weight) -> float:
    """Relative L2 error `|W - decode(Q)| / |W|`, in float64; 0 for an all-zero weight."""
    error = total = 0.0
    for rows, scale in _parts(quantized):
        part_error, part_total = _run(
            _ERROR,
            weight=np.ascontiguousarray(weight[rows]),
            codes=quantized.codes[rows],
            scales=quantized.block_scales[rows],
            factor=scale,
        )
        error += part_error
        total += part_total
    return (error / total) ** 0.5 if total else 0.0


def _parts(weight: NVFP4Weight) -> Iterator[tuple[slice, np.float32]]:
    """The rows and the global scale of each part that is not empty."""
    start = 0
    for count, scale in zip(weight.part_rows, weight.global_scales, strict=True):
        if count and weight.shape[1]:
            yield slice(start, start + count), scale
        start += count


class _Codec:
    """The compiled graph, and the memory of the small arrays that go in and out with every call."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.model = _compile()
        self.statistics = np.zeros(2, np.float64)
        self.statistics_buffer = _buffer(self.statistics)
        self.factor = np.zeros(1, np.float32)
        self.factor_buffer = _buffer(self.factor)
        self.request = np.zeros(3, np.int64)
        self.request_buffer = _buffer(self.request)
        self.nothing = _buffer(np.empty(0, np.uint8))
        self.no_floats = _buffer(np.empty(0, np.float32))


_codec = cache(_Codec)


def _run(
    action: int,
    *,
    weight: NDArray[Any] | None = None,
    codes: NDArray[Any] | None = None,
    scales: NDArray[Any] | None = None,
    values: NDArray[np.float32] | None = None,
    importance: NDArray[np.float32] | None = None,
    factor: float | np.float32 = 0.0,
) -> tuple[float, float]:
    """Runs one action over contiguous arrays, and returns the two statistics."""
    codec = _codec()
    blocks, form = 0, 0
    if weight is not None:
        blocks, form = weight.size // BLOCK_SIZE, _FORMATS[weight.dtype]
    elif scales is not None:
        blocks = scales.size
    with codec.lock:
        codec.request[:] = action, form, blocks
        codec.factor[0] = factor
        codec.model.execute(
            codec.nothing if codes is None else _buffer(codes.view(np.uint8)),
            codec.nothing if scales is None else _buffer(scales.view(np.uint8)),
            codec.no_floats if values is None else _buffer(values),
            codec.statistics_buffer,
            codec.nothing if weight is None else _buffer(weight.view(np.uint8)),
            codec.no_floats if importance is None else _buffer(importance),
            codec.factor_buffer,
            codec.request_buffer,
        )
        return float(codec.statistics[0]), float(codec.statistics[1])


def _buffer(array: NDArray[Any]) -> Buffer:
    """A flat view of a contiguous array's memory.

    MAX copies an array that NumPy calls read-only, as every memory-mapped weight is. The codec
    only reads those, so the view is made from the address; the caller keeps the array alive.
    """
    if not array.flags.c_contiguous:
        raise ValueError(f"found strides {array.strides}, expected a contiguous array")
    if not array.size:
        return Buffer.from_numpy(np.empty(0, array.dtype))
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return Buffer.from_numpy(np.frombuffer(memoryview(memory), array.dtype))


def _compile() -> Model:
    cpu = DeviceRef.CPU()
    with Graph(
        "attnquant_nvfp4_codec",
        input_types=[
            BufferType(DType.uint8, ["codes"], cpu),
            BufferType(DType.uint8, ["scales"], cpu),
            BufferType(DType.float32, ["values"], cpu),
            BufferType(DType.float64, [2], cpu),
            TensorType(DType.uint8, ["weight"], cpu),
            TensorType(DType.float32, ["importance"], cpu),
            TensorType(DType.float32, [1], cpu),
            TensorType(DType.int64, [3], cpu),
        ],
        custom_extensions=[extensions()],
    ) as graph:
        ops.inplace_custom("attnquant_nvfp4_codec", device=cpu, values=list(graph.inputs))
        graph.output()
    return InferenceSession(devices=[CPU()]).load(graph)
