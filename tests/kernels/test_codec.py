"""The Mojo codec against the NumPy reference: every byte must be equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from attnquant.errors import CheckpointError
from attnquant.kernels import codec
from attnquant.nvfp4 import reference
from attnquant.nvfp4.format import NVFP4Weight

FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 0.0])


def equal_bytes(found: NVFP4Weight, expected: NVFP4Weight) -> bool:
    return (
        found.codes.tobytes() == expected.codes.tobytes()
        and found.block_scales.tobytes() == expected.block_scales.tobytes()
        and found.global_scales.tobytes() == expected.global_scales.tobytes()
        and found.part_rows == expected.part_rows
    )


def check(weight: NDArray[Any], amax: float | None = None) -> None:
    columns = np.random.default_rng(weight.size).standard_normal(weight.shape[1])
    importance = np.exp(4 * columns).astype(np.float32)
    expected = reference.encode(weight, amax=amax, importance=importance)
    assert equal_bytes(codec.encode(weight, amax=amax, importance=importance), expected)
    for scales in ("absmax", "mse"):
        expected = reference.encode(weight, scales=scales, amax=amax)
        assert equal_bytes(codec.encode(weight, scales=scales, amax=amax), expected)
        assert codec.decode(expected).tobytes() == reference.decode(expected).tobytes()
        assert codec.relative_error(weight, expected) == pytest.approx(
            reference.relative_error(weight, expected), rel=1e-12, abs=0
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 16), (37, 208), (5, 1040), (300, 640), (0, 64), (3, 0)])
def test_normal_weights(shape: tuple[int, int], dtype: type) -> None:
    weight = np.random.default_rng(1).standard_normal(shape) * 0.03
    check(weight.astype(dtype))


@settings(max_examples=40)
@given(data=st.data(), dtype=st.sampled_from(FLOATS))
def test_any_finite_bits(data: st.DataObject, dtype: type) -> None:
    word = np.uint32 if dtype is np.float32 else np.uint16
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5).map(lambda n: 16 * n)))
    weight = data.draw(hnp.arrays(word, shape)).view(dtype)
    weight = np.where(np.isfinite(weight), weight, np.zeros_like(weight))
    check(weight)


@pytest.mark.parametrize("exponent", [-149, -140, -126, -100, -20, 20, 60, 100, 120])
def test_magnitudes_from_subnormal_to_huge(exponent: int) -> None:
    weight = np.random.default_rng(2).standard_normal((16, 64))
    check(np.ldexp(weight, exponent).astype(np.float32))


def test_exponents_that_differ_within_a_block() -> None:
    rng = np.random.default_rng(3)
    weight = np.ldexp(rng.standard_normal((64, 64)), rng.integers(-149, 120, (64, 64)))
    check(weight.astype(np.float32))


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_rounding_tie_of_both_signs(dtype: type) -> None:
    rng = np.random.default_rng(4)
    weight = rng.choice(MIDPOINTS, (64, 64)) * rng.choice([-1, 1], (64, 64))
    check(weight.astype(dtype))
    check((weight * 448).astype(dtype))


def test_grids_on_which_many_scales_tie() -> None:
    check((np.random.default_rng(5).integers(-48, 49, (64, 64)) / 8).astype(np.float32))


def test_zero_blocks_rows_and_tensors_and_minus_zero() -> None:
    weight = np.random.default_rng(6).standard_normal((33, 64)).astype(np.float32)
    weight[:, :16], weight[4], weight[5] = 0, 0, -0.0
    check(weight)
    check(np.zeros((3, 32), np.float32))


def test_an_outlier_that_flushes_other_scales() -> None:
    weight = np.random.default_rng(7).standard_normal((33, 64)).astype(np.float32)
    weight[3, 5] = 3e6
    check(weight)


def test_a_group_shares_the_largest_magnitude() -> None:
    weight = np.random.default_rng(8).standard_normal((8, 64)).astype(np.float32)
    check(weight, amax=300.0)
    with pytest.raises(ValueError, match="at least its own"):
        codec.encode(weight, amax=0.5)


def test_parts_are_decoded_with_their_own_scales() -> None:
    rng = np.random.default_rng(9)
    parts = [
        reference.encode((rng.standard_normal((rows, 48)) * size).astype(np.float32))
        for rows, size in ((3, 1e-6), (0, 1.0), (20, 1.0), (7, 1e9))
    ]
    stacked = NVFP4Weight.stack(parts)
    assert codec.decode(stacked).tobytes() == reference.decode(stacked).tobytes()
    weight = reference.decode(stacked)
    assert codec.relative_error(weight, stacked) == 0


def test_a_transposed_view_and_a_memory_map(tmp_path: Path) -> None:
    weight = np.random.default_rng(10).standard_normal((64, 48)).astype(np.float32)
    check(weight.T)
    weight.tofile(tmp_path / "weight")
    mapped = np.memmap(tmp_path / "weight", np.float32, "r", shape=weight.shape)
    assert equal_bytes(codec.encode(mapped), reference.encode(weight))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named_with_its_place(dtype: type, value: float) -> None:
    weight = np.ones((600, 144), dtype)
    weight[577, 143] = value
    weight[590, 3] = np.nan
    with pytest.raises(CheckpointError, match=r"some\.weight: found .* at \[577, 143\]") as found:
        codec.encode(weight, name="some.weight")
    with pytest.raises(CheckpointError) as expected:
        reference.encode(weight, name="some.weight")
    assert str(found.value) == str(expected.value)


def test_what_cannot_be_encoded_is_refused_by_name() -> None:
    for weight in (np.ones((2, 20), np.float32), np.ones((2, 16)), np.ones(16, np.float32)):
        with pytest.raises(CheckpointError, match=r"w: found"):
            codec.encode(weight, name="w")


@settings(max_examples=20)
@given(
    hnp.arrays(np.uint8, (4, 24)),
    hnp.arrays(np.uint8, (4, 3), elements=st.integers(0, 126)),
    st.integers(1, 0x7F7F_FFFF),
)
def test_any_bytes_decode_alike(
    codes: NDArray[np.uint8], scales: NDArray[np.uint8], global_bits: int
) -> None:
    weight = NVFP4Weight(
        codes=codes,
        block_scales=scales.view(ml_dtypes.float8_e4m3fn),
        global_scales=np.array([global_bits], np.uint32).view(np.float32),
        part_rows=(4,),
    )
    with np.errstate(over="ignore"):
        expected = reference.decode(weight)
    assert codec.decode(weight).tobytes() == expected.tobytes()


@pytest.mark.parametrize("encode", [codec.encode, reference.encode])
@pytest.mark.parametrize(
    "importance",
    [
        np.ones(31, np.float32),
        np.ones(32),
        np.array([1.0] * 31 + [0.0], np.float32),
        np.array([1.0] * 31 + [np.inf], np.float32),
    ],
)
def test_an_importance_that_does_not_fit_is_refused(encode: Any, importance: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match="o_proj: found an importance"):
        encode(np.ones((2, 32), np.float32), importance=importance, name="o_proj")
