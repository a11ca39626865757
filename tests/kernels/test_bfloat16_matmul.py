"""`bfloat16_matmul` against float64: the tables that a CPU keeps as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from numpy.typing import NDArray

from attnquant.kernels import extensions
from attnquant.kernels.ops import bfloat16_matmul

SHAPES = ((1, 16), (7, 1040), (37, 640), (530, 48))
VECTORS = (0, 1, 2, 3, 8, 31, 32, 45, 130)
CPU_REF = DeviceRef.CPU()

Multiply = Callable[[list[NDArray[np.float32]]], list[NDArray[np.float32]]]


def tables() -> list[NDArray[Any]]:
    """Random tables: subnormal rows and huge ones among them, at an address that suits nobody."""
    rng = np.random.default_rng(0)
    made = []
    for rows, columns in SHAPES:
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        values[::5] *= 1e-39
        values[1::5] *= 1e30
        memory = np.zeros(2 * values.size + 66, np.uint8)
        start = -memory.ctypes.data % 64 + 2
        table = memory[start : start + 2 * values.size].view(ml_dtypes.bfloat16)
        table = table.reshape(rows, columns)
        table[...] = values
        made.append(table)
    return made


TABLES = tables()


@pytest.fixture(scope="module")
def multiply() -> Multiply:
    """All shapes in one graph, since compiling is what takes time."""
    types: list[TensorType] = []
    for rows, columns in SHAPES:
        types.append(TensorType(DType.float32, ("vectors", columns), CPU_REF))
        types.append(TensorType(DType.bfloat16, (rows, columns), CPU_REF))
    with Graph("bfloat16", input_types=types, custom_extensions=[extensions()]) as graph:
        values = [value.tensor for value in graph.inputs]
        pairs = zip(values[::2], values[1::2], strict=True)
        graph.output(*(bfloat16_matmul(x, table) for x, table in pairs))
    model = InferenceSession(devices=[CPU()]).load(graph)

    def run(xs: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        buffers = []
        for x, table in zip(xs, TABLES, strict=True):
            bits = Buffer.from_numpy(table.view(np.uint16))
            buffers += [Buffer.from_numpy(x), bits.view(DType.bfloat16, table.shape)]
        return [np.array(product.to_numpy()) for product in model(*buffers)]

    return run


def vectors(count: int) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(count)
    return [rng.standard_normal((count, columns)).astype(np.float32) for _, columns in SHAPES]


@pytest.mark.parametrize("count", VECTORS)
def test_equals_float64(multiply: Multiply, count: int) -> None:
    xs = vectors(count)
    for x, table, product in zip(xs, TABLES, multiply(xs), strict=True):
        weight = table.astype(np.float64)
        expected = x.astype(np.float64) @ weight.T
        # A runtime may flush subnormal products, never more than the least normal number each.
        bound = 1e-6 * np.abs(x) @ np.abs(weight).T + x.shape[1] * 1.2e-38
        assert product.shape == expected.shape
        assert (np.abs(product - expected) <= bound).all()


def test_the_result_does_not_depend_on_the_cores(multiply: Multiply) -> None:
    xs = vectors(130)
    together = multiply(xs)
    for _ in range(5):
        assert all((a == b).all() for a, b in zip(multiply(xs), together, strict=True))
    some = multiply([x[50:].copy() for x in xs])
    assert all((a == b[50:]).all() for a, b in zip(some, together, strict=True))


def test_what_does_not_belong_together_is_refused() -> None:
    def build(x: TensorType, table: TensorType) -> None:
        with Graph("refused", input_types=[x, table]) as graph:
            bfloat16_matmul(*(value.tensor for value in graph.inputs))

    def floats(columns: int, device: DeviceRef = CPU_REF) -> TensorType:
        return TensorType(DType.float32, ("vectors", columns), device)

    def table(columns: int, dtype: DType = DType.bfloat16) -> TensorType:
        return TensorType(dtype, (8, columns), CPU_REF)

    for x, weight in [
        (floats(32), table(48)),
        (floats(40), table(40)),
        (floats(32), table(32, DType.float16)),
        (floats(32, DeviceRef.GPU()), table(32)),
    ]:
        with pytest.raises(ValueError, match="expected float32 and bfloat16"):
            build(x, weight)
