"""`nvfp4_matmul` on the CPU against float64 over the dequantized weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from max.driver import CPU, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from numpy.typing import NDArray

from attnquant.kernels import extensions
from attnquant.kernels.ops import NVFP4Kernel, nvfp4_matmul
from attnquant.nvfp4 import reference
from attnquant.nvfp4.format import NVFP4Weight

VECTORS = (0, 1, 2, 5, 8, 9, 31, 32, 33, 130)
MANY = 32
"""Vectors from which the arithmetic is float32's, as in mojo/panels.mojo."""
MARGIN = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """A weight, and whether `x` is a slice of something wider in the graph."""

    weight: NVFP4Weight
    dtype: DType
    sliced: bool = False

    @property
    def width(self) -> int:
        return self.weight.shape[1] + 2 * MARGIN * self.sliced


def random_weight(part_rows: tuple[int, ...], columns: int, scales: list[float]) -> NVFP4Weight:
    """Random codes and finite scale bytes, zero and subnormal ones among them."""
    rng = np.random.default_rng(sum(part_rows) + columns)
    rows = sum(part_rows)
    return NVFP4Weight(
        codes=rng.integers(0, 256, (rows, columns // 2), np.uint8),
        block_scales=rng.integers(0, 0x7F, (rows, columns // 16), np.uint8).view(
            ml_dtypes.float8_e4m3fn
        ),
        global_scales=np.array(scales, np.float32),
        part_rows=part_rows,
    )


FUSED = random_weight((30, 17, 5), 208, [1e-3, 40.0, 1e5])
PAIR = random_weight((300, 340), 640, [2.0, 1e-9])
LONE = random_weight((7,), 1040, [0.25])
TINY = random_weight((1,), 16, [1.0])
CASES = {
    "three parts, float32": Case(weight=FUSED, dtype=DType.float32),
    "three parts, bfloat16": Case(weight=FUSED, dtype=DType.bfloat16),
    "two parts, float32": Case(weight=PAIR, dtype=DType.float32),
    "two parts, bfloat16": Case(weight=PAIR, dtype=DType.bfloat16),
    "one part, float32": Case(weight=LONE, dtype=DType.float32),
    "one block, float32": Case(weight=TINY, dtype=DType.float32),
    "a slice, float32": Case(weight=FUSED, dtype=DType.float32, sliced=True),
}

Multiply = Callable[[dict[str, NDArray[np.float32]]], dict[str, NDArray[np.float32]]]


@pytest.fixture(scope="module")
def multiply() -> Multiply:
    return multiplier(CPU())


def multiplier(device: Device) -> Multiply:
    """All cases in one graph, since compiling is what takes time."""
    ref = DeviceRef.from_device(device)
    types = []
    for case in CASES.values():
        rows, columns = case.weight.shape
        kernel = NVFP4Kernel.of(ref, case.dtype, rows, columns)
        types += [
            TensorType(case.dtype, ("vectors", case.width), ref),
            TensorType(DType.uint8, (rows, columns // 2), ref),
            TensorType(kernel.scale_dtype, (rows, columns // 16), ref),
            TensorType(DType.float32, (len(case.weight.part_rows),), ref),
        ]
    with Graph("cases", input_types=types, custom_extensions=[extensions()]) as graph:
        values = iter([value.tensor for value in graph.inputs])
        products = []
        for case in CASES.values():
            x = next(values)
            if case.sliced:
                x = x[:, MARGIN : case.width - MARGIN]
            products.append(
                nvfp4_matmul(x, next(values), next(values), next(values), case.weight.part_rows)
            )
        graph.output(*products)
    model = InferenceSession(devices=[device]).load(graph)

    def run(xs: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        buffers = []
        for name, case in CASES.items():
            weight = case.weight
            scales = Buffer.from_numpy(weight.block_scales.view(np.uint8))
            buffers += [
                to_buffer(xs[name], case.dtype),
                Buffer.from_numpy(weight.codes),
                scales.view(types[len(buffers) + 2].dtype, scales.shape),
                Buffer.from_numpy(weight.global_scales),
            ]
        products = model(*(buffer.to(device) for buffer in buffers))
        return {
            name: from_buffer(product.to(CPU()))
            for name, product in zip(CASES, products, strict=True)
        }

    return run


def to_buffer(array: NDArray[np.float32], dtype: DType) -> Buffer:
    if dtype == DType.float32:
        return Buffer.from_numpy(array)
    bits = array.astype(ml_dtypes.bfloat16).view(np.uint16)
    return Buffer.from_numpy(bits).view(DType.bfloat16, array.shape)


def from_buffer(buffer: Any) -> NDArray[np.float32]:
    if buffer.dtype == DType.float32:
        return np.array(buffer.to_numpy())
    bits = buffer.view(DType.uint16, buffer.shape).to_numpy()
    return np.array(bits.view(ml_dtypes.bfloat16).astype(np.float32))


def random_vectors(count: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Normal vectors with an outlier in some, rounded to what each case's dtype holds."""
    rng = np.random.default_rng(seed)
    vectors = {}
    for name, case in CASES.items():
        x = rng.standard_normal((count, case.width)).astype(np.float32)
        x[::3, min(MARGIN, case.width - 1)] *= 100
        rounded = x.astype(ml_dtypes.bfloat16) if case.dtype == DType.bfloat16 else x
        vectors[name] = rounded.astype(np.float32)
    return vectors


@pytest.mark.parametrize("count", VECTORS)
def test_equals_the_dequantized_matmul(multiply: Multiply, count: int) -> None:
    xs = random_vectors(count)
    for name, product in multiply(xs).items():
        case = CASES[name]
        x = xs[name][:, MARGIN:-MARGIN] if case.sliced else xs[name]
        weight = reference.decode(case.weight).astype(np.float64)
        expected = x.astype(np.float64) @ weight.T
        # As many float32 sums, one after the other, as a row has columns.
        bound = x.shape[1] * 2.0**-24 * np.abs(x) @ np.abs(weight).T
        # Activations are rounded to half a step of their block, unless arithmetic is float32's.
        blocks = x.shape[1] // 16
        steps = np.abs(x).reshape(count, blocks, 16).max(axis=2) / 0x7F7F00
        sizes = np.abs(weight).reshape(len(weight), blocks, 16).sum(axis=2)
        bound += 0.51 * steps @ sizes.T
        if case.dtype == DType.bfloat16:
            bound += 2.0**-8 * np.abs(expected)
        assert product.shape == expected.shape
        assert (np.abs(product - expected) <= bound).all(), name


def test_a_vector_does_not_depend_on_its_neighbours_nor_on_the_cores(multiply: Multiply) -> None:
    xs = random_vectors(130)
    together = multiply(xs)
    for _ in range(5):
        again = multiply(xs)
        assert all(again[name].tobytes() == together[name].tobytes() for name in CASES)
    for rows in (slice(0, MANY), slice(90, 130)):
        some = multiply({name: x[rows].copy() for name, x in xs.items()})
        assert all(some[name].tobytes() == together[name][rows].tobytes() for name in CASES)
    few = multiply({name: x[: MANY - 1].copy() for name, x in xs.items()})
    for i in (0, 7, MANY - 2):
        alone = multiply({name: x[i : i + 1].copy() for name, x in xs.items()})
        assert all(alone[name].tobytes() == few[name][i].tobytes() for name in CASES)


def test_zeros_give_zeros_and_scaling_by_a_power_of_two_is_exact(multiply: Multiply) -> None:
    xs = random_vectors(6)
    products = multiply(xs)
    scaled = multiply({name: x * np.float32(2.0**-20) for name, x in xs.items()})
    zeros = multiply({name: x * 0 for name, x in xs.items()})
    for name in CASES:
        assert (scaled[name] == products[name] * np.float32(2.0**-20)).all()
        assert (zeros[name] == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_vector(multiply: Multiply, value: float) -> None:
    xs = random_vectors(9)
    clean = multiply(xs)
    for x in xs.values():
        x[4, min(MARGIN, x.shape[1] - 1)] = value
    for name, product in multiply(xs).items():
        others = np.arange(9) != 4
        assert not np.isfinite(product[4]).any(), name
        assert (product[others] == clean[name][others]).all(), name


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    cpu = DeviceRef.CPU()

    def build(x: int, codes: tuple[int, int], scales: int, parts: tuple[int, ...]) -> None:
        types = [
            TensorType(DType.float32, ("vectors", x), cpu),
            TensorType(DType.uint8, codes, cpu),
            TensorType(DType.uint8, (codes[0], scales), cpu),
            TensorType(DType.float32, (len(parts),), cpu),
        ]
        with Graph("refused", input_types=types) as graph:
            nvfp4_matmul(*(value.tensor for value in graph.inputs), part_rows=parts)

    with pytest.raises(ValueError, match="x: found"):
        build(64, (8, 24), 3, (8,))
    with pytest.raises(ValueError, match="codes: found"):
        build(48, (8, 24), 3, (4, 3))
    with pytest.raises(ValueError, match="block_scales: found"):
        build(48, (8, 24), 2, (8,))
    with pytest.raises(ValueError, match="part_rows: found"):
        build(48, (8, 24), 3, (2, 2, 2, 2))
