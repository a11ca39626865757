"""The type refuses whatever is not NVFP4, and stacking keeps every part's bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attnquant.nvfp4.format import E4M3_VALUES, NVFP4Weight, packed_bytes


def fields(out: int = 2, columns: int = 32, **changes: Any) -> dict[str, Any]:
    valid: dict[str, Any] = {
        "codes": np.zeros((out, columns // 2), np.uint8),
        "block_scales": np.zeros((out, columns // 16), ml_dtypes.float8_e4m3fn),
        "global_scales": np.ones(1, np.float32),
        "part_rows": (out,),
    }
    return valid | changes


def scale_bytes(*values: int) -> Any:
    return np.array([values], np.uint8).view(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": np.zeros((2, 16), np.int8)}, "codes: found int8 of rank 2"),
        ({"codes": np.zeros(16, np.uint8)}, "codes: found uint8 of rank 1"),
        ({"block_scales": np.zeros((2, 2), np.uint8)}, "block_scales: found uint8"),
        (
            {"block_scales": np.zeros((2, 1), ml_dtypes.float8_e4m3fn)},
            r"block_scales: found \(2, 1\), expected one per 16 columns of \[2, 32\]",
        ),
        ({"codes": np.zeros((2, 12), np.uint8)}, r"columns of \[2, 24\]"),
        ({"global_scales": np.ones(2, np.float32)}, r"parts: found rows \(2,\) with 2 global"),
        ({"part_rows": (1,)}, "expected one scale a part and 2 rows in all"),
        ({"global_scales": np.zeros(1, np.float32)}, "global_scales: found"),
        ({"global_scales": -np.ones(1, np.float32)}, "global_scales: found"),
        ({"global_scales": np.full(1, np.inf, np.float32)}, "global_scales: found"),
        ({"global_scales": np.full(1, np.nan, np.float32)}, "global_scales: found"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NVFP4Weight(**fields(**changes))


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0x81, 0xFE, 0xFF])
def test_refuses_scale_byte(byte: int) -> None:
    with pytest.raises(ValueError, match="NaN or negative E4M3 byte"):
        NVFP4Weight(**fields(out=1, block_scales=scale_bytes(0, byte)))


def test_accepts_the_extremes() -> None:
    weight = NVFP4Weight(
        **fields(
            out=1,
            block_scales=scale_bytes(0, 126),
            global_scales=np.array([1e-45], np.float32),
        )
    )
    assert weight.shape == (1, 32)
    assert weight.nbytes == packed_bytes(1, 32) == 16 + 2 + 4


def test_e4m3_values() -> None:
    assert len(E4M3_VALUES) == 127
    assert E4M3_VALUES[1] == 2.0**-9
    assert E4M3_VALUES[8] == 2.0**-6
    assert E4M3_VALUES[126] == 448
    assert (np.diff(E4M3_VALUES) > 0).all()


def test_stack_keeps_bits() -> None:
    rng = np.random.default_rng(0)
    parts = [
        NVFP4Weight(
            codes=rng.integers(0, 256, (rows, 16), np.uint8),
            block_scales=rng.integers(0, 127, (rows, 2), np.uint8).view(ml_dtypes.float8_e4m3fn),
            global_scales=np.array([scale], np.float32),
            part_rows=(rows,),
        )
        for rows, scale in ((3, 0.5), (1, 2.0))
    ]
    stacked = NVFP4Weight.stack(parts)
    assert stacked.part_rows == (3, 1)
    assert stacked.global_scales.tolist() == [0.5, 2.0]
    assert stacked.codes.tobytes() == b"".join(part.codes.tobytes() for part in parts)
    assert stacked.block_scales.tobytes() == b"".join(p.block_scales.tobytes() for p in parts)
