"""The scale search: equal to its definition in scalars, and to a search of all scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attnquant.nvfp4.format import E2M1_VALUES, E4M3_VALUES
from attnquant.nvfp4.reference import decode, encode
from attnquant.nvfp4.scales import (
    CODES_ABOVE,
    CODES_BELOW,
    ScaleTables,
    absmax_bytes,
    e2m1_codes,
    encode_scale,
    global_scale,
    mse_bytes,
)

f32 = np.float32


def draw(kind: str, blocks: int, seed: int = 0) -> NDArray[np.float32]:
    """Magnitudes `[blocks, 16]` of one distribution."""
    rng = np.random.default_rng(seed)
    shape = (blocks, 16)
    values = {
        "gaussian": lambda: rng.standard_normal(shape),
        "laplace": lambda: rng.laplace(size=shape),
        "student": lambda: rng.standard_t(3, size=shape),
        "uniform": lambda: rng.uniform(-1, 1, shape),
        "lognormal": lambda: np.exp(2 * rng.standard_normal(shape)),
        "sparse": lambda: rng.standard_normal(shape) * (rng.random(shape) < 0.1),
        "single": lambda: rng.standard_normal(shape) * (np.arange(16) == 3),
        "integers": lambda: rng.integers(-6, 7, shape).astype(np.float64),
        "varied": lambda: rng.standard_normal(shape) * np.exp(rng.uniform(-9, 0, (blocks, 1))),
    }[kind]()
    return np.abs(values).astype(np.float32)


KINDS = [
    "gaussian",
    "laplace",
    "student",
    "uniform",
    "lognormal",
    "sparse",
    "single",
    "integers",
    "varied",
]


def scalar_error(block: NDArray[np.float32], byte: int, scale: np.float32) -> np.float64:
    """E(c) of the definition in `reference`, one operation at a time."""
    exponent = int(np.frexp(scale)[1])
    unit = np.ldexp(f32(1), int(np.clip(-exponent, -126, 127)))
    inverse = min(f32(1) / (E4M3_VALUES[byte] * scale), np.finfo(np.float32).max)
    squares = []
    for x in block:
        y = x * inverse
        k = int(y > 0.25) + int(y >= 0.75) + int(y > 1.25) + int(y >= 1.75)
        k += int(y > 2.5) + int(y >= 3.5) + int(y > 5)
        w = (E2M1_VALUES[k] * E4M3_VALUES[byte]) * scale
        d = x * unit - w * unit
        assert isinstance(d, np.float32)
        squares.append(np.float64(d) * np.float64(d))
    for half in (8, 4, 2, 1):
        squares = [squares[i] + squares[i + half] for i in range(half)]
    return squares[0]


def scalar_search(block: NDArray[np.float32], absmax: int, scale: np.float32) -> int:
    if absmax == 0:
        return 0
    window = range(max(1, absmax - CODES_BELOW), min(126, absmax + CODES_ABOVE) + 1)
    errors = {byte: scalar_error(block, byte, scale) for byte in window}
    least = min(errors.values())
    return absmax if errors[absmax] == least else min(b for b in window if errors[b] == least)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_search_is_its_definition(kind: str, magnitude: float) -> None:
    magnitudes = draw(kind, 12) * f32(magnitude)
    amax = magnitudes.max() * f32(1.5)
    scale = global_scale(amax)
    absmax = absmax_bytes(magnitudes, encode_scale(amax))
    found = mse_bytes(magnitudes, absmax, ScaleTables.of(scale))
    expected = [scalar_search(b, int(a), scale) for b, a in zip(magnitudes, absmax, strict=True)]
    assert found.tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_window_holds_the_best_of_all_scales(kind: str) -> None:
    magnitudes = draw(kind, 2000)
    amax = magnitudes.max()
    tables = ScaleTables.of(global_scale(amax))
    absmax = absmax_bytes(magnitudes, encode_scale(amax))
    everywhere = mse_bytes(magnitudes, absmax, tables, below=126, above=126)
    np.testing.assert_array_equal(mse_bytes(magnitudes, absmax, tables), everywhere)


def test_window_is_tight() -> None:
    """A search of fewer scales would miss the best of some Gaussian block."""
    magnitudes = draw("gaussian", 20_000)
    amax = magnitudes.max()
    tables = ScaleTables.of(global_scale(amax))
    absmax = absmax_bytes(magnitudes, encode_scale(amax))
    found = mse_bytes(magnitudes, absmax, tables)
    offsets = found.astype(int) - absmax
    assert offsets.min() < 0
    assert offsets.max() >= CODES_ABOVE - 1


def assert_never_worse(weight: NDArray[np.float32]) -> None:
    """Block by block, in float64, on what the decoder returns."""
    exact = weight.astype(np.float64)
    squares = [
        ((exact - decode(encode(weight, scales=scales))) ** 2).reshape(-1, 16).sum(axis=1)
        for scales in ("absmax", "mse")
    ]
    assert (squares[1] <= squares[0]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_mse_is_never_worse_on_any_block(kind: str) -> None:
    assert_never_worse(draw(kind, 5000, seed=1).reshape(50, -1))


def test_mse_is_never_worse_beside_an_outlier() -> None:
    weight = draw("gaussian", 4096, seed=2).reshape(64, -1)
    for outlier in (1e4, 1e5, 3e5, 1e6, 1e8):
        weight[0, 0] = outlier
        assert_never_worse(weight)


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=32, max_size=32
    )
)
def test_mse_is_never_worse_on_any_floats(values: list[float]) -> None:
    assert_never_worse(np.array(values, np.float32).reshape(2, 16))


def test_squared_error_on_gaussian_weights() -> None:
    """0.729 of the abs-max scale's, on Gaussian weights."""
    weight = draw("gaussian", 40_000).reshape(100, -1)
    errors = [
        float(((weight.astype(np.float64) - decode(encode(weight, scales=scales))) ** 2).sum())
        for scales in ("absmax", "mse")
    ]
    assert errors[1] / errors[0] == pytest.approx(0.729, abs=0.005)


def test_absmax_wins_ties() -> None:
    """6 · s is exact under s and, as 4 · 1.5 s, under the byte 4 above."""
    magnitudes = np.zeros((1, 16), np.float32)
    magnitudes[0, 0] = 6
    absmax = absmax_bytes(magnitudes, encode_scale(2688))
    assert absmax[0] == 56
    assert mse_bytes(magnitudes, absmax, ScaleTables.of(global_scale(2688)))[0] == 56


def test_smallest_byte_wins_other_ties() -> None:
    """4.5 is 4 · 1.125 under byte 57, and 3 · 1.5 under byte 60; both are exact."""
    magnitudes = np.zeros((1, 16), np.float32)
    magnitudes[0, 0] = 4.5
    tables = ScaleTables.of(global_scale(2688))
    absmax = np.array([56], np.uint8)
    assert mse_bytes(magnitudes, absmax, tables)[0] == 57


@pytest.mark.parametrize("byte", [1, 2, 3, 124, 125, 126])
def test_window_stays_among_valid_bytes(byte: int) -> None:
    magnitudes = draw("gaussian", 64)
    magnitudes *= f32(6) * E4M3_VALUES[byte] / magnitudes.max(axis=1, keepdims=True)
    absmax = absmax_bytes(magnitudes, encode_scale(2688))
    found = mse_bytes(magnitudes, absmax, ScaleTables.of(global_scale(2688)))
    assert found.min() >= 1
    assert found.max() <= 126


def test_all_zero_block_keeps_scale_zero() -> None:
    zeros = np.zeros((2, 16), np.float32)
    absmax = absmax_bytes(zeros, encode_scale(1))
    assert absmax.tolist() == [0, 0]
    assert mse_bytes(zeros, absmax, ScaleTables.of(global_scale(1))).tolist() == [0, 0]


@settings(max_examples=100, deadline=None)
@given(bits=st.integers(0, 0x7F7F_FFFF))
def test_e2m1_is_the_nearest_code_and_the_even_one_at_a_tie(bits: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    # Beyond 8 the distances to all codes may round to one number.
    distances = np.abs(E2M1_VALUES.astype(np.float64) - min(np.float64(value[0]), 8))
    nearest = np.flatnonzero(distances == distances.min())
    assert e2m1_codes(value)[0] == min(nearest, key=lambda code: int(code) % 2)


def test_e2m1_over_all_bfloat16() -> None:
    values = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    codes: Any = e2m1_codes(values)
    distances = np.abs(E2M1_VALUES.astype(np.float64) - np.minimum(values, f32(8))[:, None])
    np.testing.assert_array_equal(distances[np.arange(len(values)), codes], distances.min(axis=1))
