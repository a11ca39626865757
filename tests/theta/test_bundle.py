"""The bundle: what it accepts, what passthrough costs, what bundles count, what they rebuild."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import attnquant.theta.rebuild as rebuild
from attnquant.theta import ThetaBundle, effective_weight, stored_bytes

F32 = np.float32
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def parts(rows: int = 6, columns: int = 4, rank: int = 2, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "w0": rng.standard_normal((rows, columns), F32),
        "s": rng.standard_normal(rows, F32),
        "u": rng.standard_normal((rows, rank), F32),
        "v": rng.standard_normal((columns, rank), F32),
    }


@pytest.mark.parametrize(
    ("name", "part", "complaint"),
    [
        ("w0", np.zeros(6, F32), "w0 has shape (6,), expected [out, in]"),
        ("s", np.zeros(5, F32), "s is float32 [5], expected float32 [6]"),
        ("s", np.zeros((6, 1), F32), "s is float32 [6, 1], expected float32 [6]"),
        ("s", np.zeros(6), "s is float64 [6], expected float32 [6]"),
        ("s", None, "s is missing, expected [6] beside rank 2"),
        ("u", np.zeros((5, 2), F32), "u is float32 [5, 2], expected float32 [6, 2]"),
        ("u", np.zeros(6, F32), "u is float32 [6], expected float32 [6, 0]"),
        ("u", np.zeros((6, 2), np.float16), "u is float16 [6, 2], expected float32 [6, 2]"),
        ("v", np.zeros((4, 3), F32), "v is float32 [4, 3], expected float32 [4, 2]"),
        ("v", np.zeros((2, 4), F32), "v is float32 [2, 4], expected float32 [4, 2]"),
    ],
)
def test_parts_that_do_not_fit_are_named(name: str, part: object, complaint: str):
    with pytest.raises(ValueError) as caught:
        ThetaBundle(**(parts() | {name: part}))
    assert str(caught.value).startswith(f"theta bundle: {complaint}")


def test_a_bundle_cannot_be_changed():
    bundle = ThetaBundle(**parts())
    with pytest.raises(FrozenInstanceError):
        bundle.s = None  # type: ignore[misc]


@pytest.mark.parametrize("dtype", DTYPES)
def test_passthrough_holds_and_gives_back_the_very_array(dtype: Any):
    weight = np.arange(12).reshape(3, 4).astype(dtype)
    weight.flags.writeable = False
    bundle = ThetaBundle.passthrough(weight)
    assert bundle.is_passthrough and bundle.rank == 0 and bundle.w0 is weight
    assert effective_weight(bundle) is weight
    assert effective_weight(bundle, dtype) is weight
    assert stored_bytes([bundle]) == weight.nbytes


def test_passthrough_converts_only_to_another_dtype():
    weight = np.array([[1.00390625, 3.0]], F32)
    converted = effective_weight(ThetaBundle.passthrough(weight), ml_dtypes.bfloat16)
    assert converted.dtype == ml_dtypes.bfloat16
    assert converted.astype(F32).tolist() == [[1.0, 3.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_rebuilt_weight_is_the_sum_rounded_once(dtype: Any, rank: int):
    p = parts(rows=50, columns=40, rank=rank)
    weight = effective_weight(ThetaBundle(**p), dtype)
    p64 = {name: part.astype(np.float64) for name, part in p.items()}
    exact = p64["s"][:, None] * p64["w0"] + p64["u"] @ p64["v"].T
    assert weight.dtype == dtype and weight.shape == (50, 40)
    unit = float(ml_dtypes.finfo(dtype).eps)
    scale = np.abs(p64["s"][:, None] * p64["w0"]) + np.abs(p64["u"]) @ np.abs(p64["v"].T)
    error = np.abs(weight.astype(np.float64) - exact)
    assert (error <= unit / 2 * np.abs(exact) + 8 * 2.0**-24 * scale).all()


def test_float32_is_the_default_below_passthrough():
    p = {name: part.astype(ml_dtypes.bfloat16) for name, part in parts().items()}
    assert effective_weight(ThetaBundle(**p | {"s": parts()["s"]})).dtype == F32


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3), st.integers(1, 12))
def test_strips_do_not_show(rows: int, columns: int, rank: int, strip: int):
    bundle = ThetaBundle(**parts(rows, columns, rank))
    whole = effective_weight(bundle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebuild, "_STRIP", strip)
        cut = effective_weight(bundle)
    np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-6)


def test_a_shared_block_counts_once():
    first = ThetaBundle(**parts())
    second = ThetaBundle(w0=first.w0, **{k: v for k, v in parts(seed=1).items() if k != "w0"})
    own = 4 * (6 + 6 * 2 + 4 * 2)
    assert stored_bytes([first]) == 4 * 24 + own
    assert stored_bytes([first, second]) == 4 * 24 + 2 * own
    copy: NDArray[Any] = first.w0.copy()
    apart = ThetaBundle(w0=copy, s=first.s, u=second.u, v=second.v)
    assert stored_bytes([first, apart]) == stored_bytes([first]) + 4 * 24 + 4 * (6 * 2 + 4 * 2)
