"""The decomposition is optimal: nothing of the same form comes nearer to the weights."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from attnquant.errors import CheckpointError
from attnquant.theta import ThetaBundle, effective_weight
from attnquant.theta.decompose import decompose, low_rank, shared_block

Array = NDArray[Any]
F64 = np.float64
module = importlib.import_module("attnquant.theta.decompose")


def group(
    layers: int, rows: int, columns: int, *, dtype: Any = np.float32, seed: int = 0
) -> list[Array]:
    """Weights that have something in common, each with a part of its own."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal((rows, columns))
    own = rng.standard_normal((layers, rows, columns))
    scales = rng.standard_normal((layers, rows, 1))
    return [(0.02 * part).astype(dtype) for part in scales * common + 0.3 * own]


def squared_error(bundle: ThetaBundle, weight: Array) -> float:
    difference = effective_weight(bundle).astype(F64) - weight.astype(F64)
    return float((difference**2).sum())


def relative_error(actual: Array, expected: Array) -> float:
    expected = expected.astype(F64)
    size = np.linalg.norm(expected)
    return float(np.linalg.norm(actual.astype(F64) - expected) / (size or 1))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("layers", "rows", "columns"), [(2, 7, 5), (3, 64, 48), (6, 5, 3)])
def test_shared_rows_and_scales_are_optimal(dtype: Any, layers: int, rows: int, columns: int):
    """Row by row against the float64 SVD: what rank 1 leaves is all singular values but one."""
    weights = group(layers, rows, columns, dtype=dtype)
    w0, scales = shared_block(weights, [""] * layers)
    assert w0.dtype == scales.dtype == np.float32
    stacked = np.stack([weight.astype(F64) for weight in weights], axis=1)
    left = ((stacked - scales.T[:, :, None].astype(F64) * w0[:, None]) ** 2).sum(axis=(1, 2))
    best = (np.linalg.svd(stacked, compute_uv=False)[:, 1:] ** 2).sum(axis=1)
    total = (stacked**2).sum(axis=(1, 2))
    assert (left <= best + 1e-12 * total).all()
    assert (left >= best - 1e-12 * total).all()
    np.testing.assert_allclose(np.linalg.norm(w0, axis=1), 1, rtol=1e-6)


@given(seed=st.integers(0, 2**32), step=st.floats(1e-3, 1), where=st.sampled_from(["w0", "s"]))
def test_no_other_shared_row_or_scale_is_nearer(seed: int, step: float, where: str):
    weights = group(3, 4, 6)
    w0, scales = shared_block(weights, [""] * 3)
    noise = step * np.random.default_rng(seed).standard_normal((3, 4, 6))
    other_w0 = w0 + (noise[0] if where == "w0" else 0)
    other_scales = scales + (noise[:, :, 0] if where == "s" else 0)

    def error(rows: Array, coefficients: Array) -> float:
        return float(((np.stack(weights) - coefficients[:, :, None] * rows) ** 2).sum())

    assert error(w0, scales) <= error(other_w0, other_scales) + 1e-9


@pytest.mark.parametrize(
    ("rows", "columns"), [(96, 80), (80, 96), (400, 300), (300, 400), (300, 300), (1, 50), (50, 1)]
)
@pytest.mark.parametrize("spectrum", ["flat", "slow", "fast", "deficient"])
def test_the_correction_is_the_truncated_svd_at_every_rank(rows: int, columns: int, spectrum: str):
    full = min(rows, columns)
    rng = np.random.default_rng(3)
    matrix = rng.standard_normal((rows, columns))
    if spectrum != "flat":
        left, _, right = np.linalg.svd(matrix, full_matrices=False)
        order = np.arange(1, full + 1)
        values = {"slow": order**-0.5, "fast": 0.9**order, "deficient": 1.0 * (order <= full // 2)}
        matrix = (left * values[spectrum]) @ right
    weight = matrix.astype(np.float32)
    values = np.linalg.svd(weight.astype(F64), compute_uv=False)
    size = np.linalg.norm(values)
    for rank in sorted({0, 1, 2, 5, full // 4, full // 2, full - 1, full} & set(range(full + 1))):
        u, v = low_rank(weight, rank)
        assert u.shape == (rows, rank) and v.shape == (columns, rank)
        assert u.dtype == v.dtype == np.float32
        error = np.linalg.norm(weight.astype(F64) - u.astype(F64) @ v.T.astype(F64))
        best = np.linalg.norm(values[rank:])
        assert best - 1e-6 * size <= error <= 1.01 * best + 1e-6 * size, rank


@pytest.mark.parametrize("rank", [8, 100])
@pytest.mark.parametrize("spectrum", ["flat", "slow"])
def test_iterating_comes_near_the_exact_way(
    monkeypatch: pytest.MonkeyPatch, rank: int, spectrum: str
):
    """Within a hundredth, also where singular values fall so slowly that a round gains little."""
    matrix = np.random.default_rng(5).standard_normal((500, 400))
    if spectrum == "slow":
        left, _, right = np.linalg.svd(matrix, full_matrices=False)
        matrix = (left * np.arange(1, 401) ** -0.5) @ right
    matrix = matrix.astype(np.float32)
    taken = []
    iterate = module._leading_subspace
    monkeypatch.setattr(
        module, "_leading_subspace", lambda *a: taken.append("iterated") or iterate(*a)
    )
    errors = {}
    for columns_to_one in (0, 10**6):
        monkeypatch.setattr(module, "_EXACT_BELOW", columns_to_one)
        u, v = low_rank(matrix, rank)
        errors[columns_to_one] = float(np.linalg.norm(matrix - u @ v.T))
    assert taken == ["iterated"]
    assert (1 - 1e-6) * errors[10**6] <= errors[0] <= 1.01 * errors[10**6]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(40, 24), (24, 40), (33, 33)])
def test_full_rank_gives_the_weight_back(dtype: Any, rows: int, columns: int):
    weights = group(3, rows, columns, dtype=dtype)
    for weight, bundle in zip(weights, decompose(weights, min(rows, columns)), strict=True):
        assert relative_error(effective_weight(bundle), weight) < 1e-6


def test_a_rank_beyond_the_shape_is_the_full_rank():
    bundles = decompose(group(2, 6, 9), 64)
    assert [bundle.rank for bundle in bundles] == [6, 6]


def test_the_layers_share_one_array():
    bundles = decompose(group(3, 6, 9), 2)
    assert all(bundle.w0 is bundles[0].w0 for bundle in bundles)
    assert not any(bundle.is_passthrough for bundle in bundles)


def test_a_group_of_one_is_passthrough_without_a_look():
    weight = np.full((3, 4), np.nan, ml_dtypes.bfloat16)
    (bundle,) = decompose([weight], 2)
    assert bundle.w0 is weight and bundle.is_passthrough


def test_equal_layers_cost_one_block():
    weight = group(1, 12, 8)[0]
    for bundle in decompose([weight, 2 * weight, -weight], 1):
        assert bundle.s is not None
    first, second, third = decompose([weight, 2 * weight, -weight], 0)
    for bundle, factor in ((first, 1), (second, 2), (third, -1)):
        assert relative_error(effective_weight(bundle), factor * weight) < 2e-7


def test_the_largest_scale_of_a_row_is_positive():
    scales = shared_block(group(4, 30, 20), [""] * 4)[1]
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=0)[None], axis=0)
    assert (largest > 0).all()


def test_rows_of_zeros_stay_zeros():
    weights = group(3, 6, 9)
    for weight in weights:
        weight[[0, 4]] = 0
    weights[1][2] = 0
    bundles = decompose(weights, 3)
    assert (bundles[0].w0[[0, 4]] == 0).all() and (bundles[1].s[2] == 0).all()
    for bundle in bundles:
        rebuilt = effective_weight(bundle)
        assert np.isfinite(rebuilt).all() and np.abs(rebuilt[[0, 4]]).max() < 1e-9


def test_weights_of_zeros_alone():
    for bundle in decompose([np.zeros((5, 400), np.float32)] * 2, 3):
        assert (effective_weight(bundle) == 0).all()
    u, v = low_rank(np.zeros((500, 400), np.float32), 3)
    assert (u @ v.T == 0).all() and np.isfinite(v).all()


@given(
    layers=st.integers(2, 4),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    rank=st.integers(0, 10),
    dtype=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    seed=st.integers(0, 999),
)
def test_any_group_fits_its_bundles_and_errors_fall_with_rank(
    layers: int, rows: int, columns: int, rank: int, dtype: Any, seed: int
):
    weights = group(layers, rows, columns, dtype=dtype, seed=seed)
    more, less = decompose(weights, rank + 1), decompose(weights, rank)
    for weight, bundle, worse in zip(weights, more, less, strict=True):
        assert bundle.rank == min(rank + 1, rows, columns)
        size = float((weight.astype(F64) ** 2).sum())
        assert squared_error(bundle, weight) <= squared_error(worse, weight) + 1e-12 * size


def test_equal_weights_give_equal_bits():
    first, second = (decompose(group(3, 500, 400), 6) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for name in ("w0", "s", "u", "v"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()


def test_strips_do_not_show(monkeypatch: pytest.MonkeyPatch):
    weights = group(3, 50, 20)
    whole = [effective_weight(bundle) for bundle in decompose(weights, 4)]
    monkeypatch.setattr(module, "_STRIP", 7 * 60)
    for expected, bundle in zip(whole, decompose(weights, 4), strict=True):
        assert relative_error(effective_weight(bundle), expected) < 1e-6


def test_the_weights_are_left_alone():
    weights = group(3, 8, 6)
    before = [weight.copy() for weight in weights]
    for weight in weights:
        weight.flags.writeable = False
    decompose(weights, 2)
    assert all((a == b).all() for a, b in zip(weights, before, strict=True))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_is_named(value: float):
    weights = group(3, 5, 4, dtype=ml_dtypes.bfloat16)
    weights[1][4, 0] = value
    with pytest.raises(CheckpointError, match=r"^b holds a NaN or an infinity"):
        decompose(weights, 1, names=["a", "b", "c"])


@given(
    data=st.data(),
    dtype=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    layers=st.integers(2, 3),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    rank=st.integers(0, 5),
)
def test_any_finite_bits_give_finite_bundles_or_one_line(
    data: st.DataObject, dtype: Any, layers: int, rows: int, columns: int, rank: int
):
    size = layers * rows * columns * np.dtype(dtype).itemsize
    bits = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), dtype)
    finite = np.where(np.isfinite(bits.astype(np.float32)), bits, np.zeros_like(bits))
    weights = list(finite.reshape(layers, rows, columns).astype(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            bundles = decompose(weights, rank, dtype=dtype)
        except CheckpointError as error:
            assert "a row of length" in str(error)
            longest = max(np.linalg.norm(weight.astype(F64), axis=1).max() for weight in weights)
            assert longest > 65000
            return
    for weight, bundle in zip(weights, bundles, strict=True):
        effective = effective_weight(bundle).astype(F64)
        assert np.isfinite(effective).all()
        tiny = float(ml_dtypes.finfo(dtype).smallest_normal)
        length = np.linalg.norm(weight.astype(F64))
        assert np.linalg.norm(effective - weight.astype(F64)) <= 1.02 * length + 99 * tiny


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"a block group has shapes"):
        decompose([np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32)], 1)
