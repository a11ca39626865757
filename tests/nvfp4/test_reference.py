"""The codec: equal to MAX's host encoder, exact at every tie, and sound on numbers that bite."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attnquant.errors import CheckpointError
from attnquant.nvfp4.format import E2M1_VALUES, E4M3_VALUES, NVFP4Weight
from attnquant.nvfp4.reference import decode, encode, largest_magnitude, relative_error
from attnquant.nvfp4.scales import global_scale

FLOAT32_MAX = np.finfo(np.float32).max
SOURCES = [np.float32, np.float16, ml_dtypes.bfloat16]
SCALES = ["absmax", "mse"]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Divisions by zero and overflows must be meant, and then silent."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def gaussian(shape: tuple[int, int], scale: float = 0.02, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * scale
    return np.clip(values, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)


def codes_of(weight: NVFP4Weight) -> NDArray[np.uint8]:
    """One code an element, in column order."""
    return np.stack([weight.codes & 15, weight.codes >> 4], axis=-1).reshape(weight.shape)


def scale_bytes(weight: NVFP4Weight) -> NDArray[np.uint8]:
    return weight.block_scales.view(np.uint8)


def assert_equals_max(weight: NDArray[np.float32]) -> None:
    from max.pipelines.weights.fp4_quantization import FP4Format, quantize_nvfp4

    ours = encode(weight, scales="absmax")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        packed, scales, scale = quantize_nvfp4(weight, FP4Format.NVFP4)
    assert ours.global_scales[0] == scale
    # Where MAX flushes a block's scale to 0 its codes mean nothing: those blocks are ours alone.
    block_amax = np.abs(weight).reshape(-1, 16).max(axis=1).reshape(scales.shape[:2])
    defined = (scales[..., 0] > 0) | (block_amax == 0)
    np.testing.assert_array_equal(scale_bytes(ours)[defined], scales[..., 0][defined])
    codes = packed.reshape(*defined.shape, 8)
    np.testing.assert_array_equal(ours.codes.reshape(codes.shape)[defined], codes[defined])


class TestEqualsMax:
    @pytest.mark.parametrize("scale", [1e-38, 1e-30, 0.02, 1.0, 1e30, 1e38])
    @pytest.mark.parametrize("shape", [(1, 16), (3, 48), (64, 640), (7, 2048)])
    def test_gaussian(self, shape: tuple[int, int], scale: float) -> None:
        assert_equals_max(gaussian(shape, scale))

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_narrow_sources_widen_exactly(self, dtype: Any) -> None:
        narrow = gaussian((16, 256)).astype(dtype)
        assert_equals_max(narrow.astype(np.float32))
        wide = encode(narrow.astype(np.float32))
        assert encode(narrow).codes.tobytes() == wide.codes.tobytes()
        assert scale_bytes(encode(narrow)).tobytes() == scale_bytes(wide).tobytes()

    def test_every_tie_of_every_scale(self) -> None:
        """Blocks whose other values sit on, just below and just above each rounding midpoint."""
        midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
        near = np.concatenate([np.nextafter(midpoints, 0), midpoints, np.nextafter(midpoints, 8)])
        blocks = np.zeros((126 * 3, 16), np.float32)
        for row, (byte, part) in enumerate((b, p) for b in range(1, 127) for p in range(3)):
            step = E4M3_VALUES[byte]
            blocks[row, 0] = 6 * step
            blocks[row, 1:8] = near[part * 7 : part * 7 + 7] * step
            blocks[row, 8:15] = -blocks[row, 1:8]
        blocks[-1, 0] = 2688
        assert_equals_max(blocks)
        assert encode(blocks, scales="absmax").global_scales[0] == 1

    @settings(max_examples=60, deadline=None)
    @given(
        rows=st.integers(1, 9),
        blocks=st.integers(1, 9),
        exponent=st.integers(-125, 120),
        spread=st.integers(0, 24),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_any_shape_and_magnitude(
        self, rows: int, blocks: int, exponent: int, spread: int, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        magnitudes = np.exp2(exponent - spread * rng.random((rows, blocks * 16)))
        signs = rng.choice([-1.0, 0.0, 1.0], magnitudes.shape)
        with np.errstate(under="ignore"):
            assert_equals_max((magnitudes * signs).astype(np.float32))

    @settings(max_examples=60, deadline=None)
    @given(data=st.binary(min_size=16 * 4, max_size=16 * 4))
    def test_any_bits(self, data: bytes) -> None:
        weight = np.frombuffer(data, np.float32).reshape(1, 16)
        assert_equals_max(np.nan_to_num(weight, posinf=FLOAT32_MAX, neginf=-FLOAT32_MAX))


class TestTies:
    @pytest.mark.parametrize(
        ("value", "code"),
        [
            (0.0, 0),
            (-0.0, 0),
            (0.25, 0),
            (-0.25, 8),
            (0.75, 2),
            (1.25, 2),
            (1.75, 4),
            (2.5, 4),
            (3.5, 6),
            (5.0, 6),
            (-0.75, 10),
            (-1.25, 10),
            (-1.75, 12),
            (-2.5, 12),
            (-3.5, 14),
            (-5.0, 14),
            (1e-30, 0),
            (-1e-30, 8),
        ],
    )
    def test_code(self, value: float, code: int) -> None:
        """Steps of exactly 1: amax 2688 makes the global scale 1, a block maximum of 6 scale 1."""
        weight = np.zeros((1, 32), np.float32)
        weight[0, :2] = 6, value
        weight[0, 16] = 2688
        quantized = encode(weight, scales="absmax")
        assert quantized.global_scales[0] == 1
        assert scale_bytes(quantized).tolist() == [[56, 126]]
        assert codes_of(quantized)[0, 1] == code

    def test_all_codes_are_fixed_points(self) -> None:
        weight = np.concatenate([E2M1_VALUES, -E2M1_VALUES])[None, :]
        quantized = encode(weight, scales="absmax", amax=2688)
        assert codes_of(quantized)[0].tolist() == [*range(8), 0, *range(9, 16)]
        np.testing.assert_array_equal(decode(quantized), weight)


class TestNumbersThatBite:
    @pytest.mark.parametrize("scales", SCALES)
    @pytest.mark.parametrize("dtype", SOURCES)
    def test_all_zero_tensor(self, dtype: Any, scales: Any) -> None:
        quantized = encode(np.zeros((3, 32), dtype), scales=scales)
        assert not quantized.codes.any()
        assert not scale_bytes(quantized).any()
        assert quantized.global_scales[0] == np.float32(2.0**-128)
        np.testing.assert_array_equal(decode(quantized), np.zeros((3, 32), np.float32))
        assert relative_error(np.zeros((3, 32), dtype), quantized) == 0

    @pytest.mark.parametrize("scales", SCALES)
    def test_all_zero_row_and_block(self, scales: Any) -> None:
        weight = gaussian((4, 64))
        weight[1] = 0
        weight[2, 16:32] = -0.0
        quantized = encode(weight, scales=scales)
        zero_blocks = np.zeros((4, 4), np.bool_)
        zero_blocks[1], zero_blocks[2, 1] = True, True
        np.testing.assert_array_equal(scale_bytes(quantized) == 0, zero_blocks)
        assert not codes_of(quantized).reshape(4, 4, 16)[zero_blocks].any()

    @pytest.mark.parametrize("scales", SCALES)
    def test_outlier_flushes_the_other_scales(self, scales: Any) -> None:
        """Where the scale would be 0, the smallest one is never worse than a flushed block."""
        weight = gaussian((8, 256), 1.0)
        weight[0, 0] = 3e6
        quantized = encode(weight, scales=scales)
        assert scale_bytes(quantized)[1:].min() >= 1
        error = np.abs(decode(quantized) - weight)
        assert (error <= np.abs(weight) * np.float32(1 + 1e-6)).all()
        # 2^-9 of the global scale is 2.2 here: values of 1.1 and up survive as half of it.
        assert (decode(quantized)[1:][np.abs(weight[1:]) > 1.2] != 0).all()
        assert (decode(quantized)[0, 0] / 3e6) == pytest.approx(1, abs=1e-6)

    @pytest.mark.parametrize("scales", SCALES)
    @pytest.mark.parametrize("scale", [1e-44, 1e-40, 1e-38, 1e-37, 1e-30, 1e30, 3.4e38])
    def test_tiny_and_huge(self, scale: float, scales: Any) -> None:
        rng = np.random.default_rng(0)
        with np.errstate(under="ignore"):
            weight = (rng.uniform(-1, 1, (8, 64)) * scale).astype(np.float32)
        quantized = encode(weight, scales=scales)
        decoded = decode(quantized)
        assert np.isfinite(decoded).all()
        # Below 2^-126 · 6 steps leave float32's normal range; there it need only not be worse.
        limit = 0.12 if scale >= 1e-37 else 1.0
        assert relative_error(weight, quantized) <= limit

    def test_largest_float32(self) -> None:
        weight = np.zeros((1, 16), np.float32)
        weight[0, :2] = FLOAT32_MAX, -FLOAT32_MAX
        for scales in SCALES:
            decoded = decode(encode(weight, scales=scales))  # type: ignore[arg-type]
            np.testing.assert_allclose(decoded, weight, rtol=1e-6)

    def test_float16_extremes(self) -> None:
        weight = np.zeros((1, 32), np.float16)
        weight[0, 0], weight[0, 16] = 65504, 2.0**-24
        quantized = encode(weight)
        assert scale_bytes(quantized).tolist() == [[126, 1]]
        assert decode(quantized)[0, 0] == pytest.approx(65504, rel=1e-6)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("dtype", SOURCES)
    def test_not_finite(self, dtype: Any, bad: float) -> None:
        weight = gaussian((700, 1024)).astype(dtype)
        weight[650, 17] = bad
        weight[651, 3] = bad
        with pytest.raises(
            CheckpointError, match=r"layers\.0\.q: found -?(nan|inf) at \[650, 17\]"
        ):
            encode(weight, name="layers.0.q")

    @pytest.mark.parametrize(
        "weight",
        [
            np.zeros((4, 24), np.float32),
            np.zeros(16, np.float32),
            np.zeros((1, 1, 16), np.float32),
            np.zeros((4, 16), np.float64),
            np.zeros((4, 16), np.uint8),
        ],
        ids=["in", "vector", "rank3", "float64", "uint8"],
    )
    def test_refuses(self, weight: NDArray[Any]) -> None:
        with pytest.raises(CheckpointError, match=r"^w: found .* multiple of 16"):
            encode(weight, name="w")

    def test_empty(self) -> None:
        assert encode(np.zeros((0, 16), np.float32)).shape == (0, 16)
        assert decode(encode(np.zeros((2, 0), np.float32))).shape == (2, 0)

    def test_strided_source(self) -> None:
        weight = gaussian((32, 64))
        assert encode(weight.T).codes.tobytes() == encode(weight.T.copy()).codes.tobytes()


class TestGlobalScale:
    def test_formula(self) -> None:
        for amax in np.float32([1e-30, 0.3, 2688, 1e30]):
            expected = np.float32(1) / (np.float32(2688) / amax)
            assert global_scale(amax) == expected
            assert global_scale(float(amax)) == expected

    @pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 7e-36, FLOAT32_MAX])
    def test_is_always_finite_and_above_zero(self, amax: float) -> None:
        assert 0 < global_scale(amax) < np.inf

    def test_group_shares_the_largest(self) -> None:
        parts = [gaussian((8, 64), scale, seed) for seed, scale in enumerate((1.0, 0.1, 0.3))]
        amax = max(largest_magnitude(part) for part in parts)
        quantized = NVFP4Weight.stack([encode(part, amax=amax) for part in parts])
        whole = encode(np.concatenate(parts))
        assert set(quantized.global_scales) == set(whole.global_scales)
        assert quantized.codes.tobytes() == whole.codes.tobytes()
        assert scale_bytes(quantized).tobytes() == scale_bytes(whole).tobytes()
        np.testing.assert_array_equal(decode(quantized), decode(whole))

    @pytest.mark.parametrize("amax", [0.5, np.inf, np.nan])
    def test_refuses_amax(self, amax: float) -> None:
        with pytest.raises(ValueError, match="found amax"):
            encode(np.ones((1, 16), np.float32), amax=amax)


class TestDecode:
    @settings(max_examples=60, deadline=None)
    @given(
        rows=st.integers(1, 5),
        blocks=st.integers(1, 5),
        scale=st.floats(2.0**-100, 2.0**100, width=32),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_any_bytes_decode_as_max_decodes_them(
        self, rows: int, blocks: int, scale: float, seed: int
    ) -> None:
        from max.pipelines.weights.fp4_quantization import FP4Format, dequantize_nvfp4

        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 256, (rows, blocks * 8), np.uint8)
        scales = rng.integers(0, 127, (rows, blocks), np.uint8)
        weight = NVFP4Weight(
            codes=codes,
            block_scales=scales.view(ml_dtypes.float8_e4m3fn),
            global_scales=np.array([scale], np.float32),
            part_rows=(rows,),
        )
        expected = dequantize_nvfp4(codes, scales[..., None], np.float32(scale), FP4Format.NVFP4)
        np.testing.assert_array_equal(decode(weight), expected)

    def test_parts_have_their_own_global_scale(self) -> None:
        parts = [encode(gaussian((3, 32), scale)) for scale in (1.0, 1e-3)]
        stacked = decode(NVFP4Weight.stack(parts))
        np.testing.assert_array_equal(stacked, np.concatenate([decode(part) for part in parts]))

    def test_low_nibble_is_the_even_column(self) -> None:
        weight = NVFP4Weight(
            codes=np.full((1, 8), 0x72, np.uint8),
            block_scales=np.array([[2.0]], ml_dtypes.float8_e4m3fn),
            global_scales=np.array([0.5], np.float32),
            part_rows=(1,),
        )
        assert decode(weight)[0, :2].tolist() == [1.0, 6.0]

    def test_chunks_do_not_show(self) -> None:
        weight = gaussian((300, 2048))
        quantized = encode(weight)
        rows = [encode(row[None], amax=np.abs(weight).max()) for row in weight[[0, 127, 128, 299]]]
        for index, row in zip((0, 127, 128, 299), rows, strict=True):
            assert quantized.codes[index].tobytes() == row.codes.tobytes()
        np.testing.assert_array_equal(decode(quantized)[299:], decode(rows[-1]))


@pytest.mark.parametrize(("scales", "expected"), [("absmax", 0.0950), ("mse", 0.0811)])
def test_relative_error_of_gaussian_weights(scales: Any, expected: float) -> None:
    weight = gaussian((512, 1024))
    quantized = encode(weight, scales=scales)
    by_hand = np.linalg.norm((weight - decode(quantized)).astype(np.float64))
    by_hand /= np.linalg.norm(weight.astype(np.float64))
    assert relative_error(weight, quantized) == pytest.approx(by_hand, rel=1e-12)
    assert relative_error(weight, quantized) == pytest.approx(expected, abs=4e-4)
