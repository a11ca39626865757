"""The NVFP4 format: `W ≈ code · block_scale · global_scale`, in one validated type.

E2M1 codes (sign, two exponent bits, one mantissa bit: 0 0.5 1 1.5 2 3 4 6), two a byte with the
even column in the low nibble; one E4M3 scale per 16 columns; one float32 global scale per part.
That is 4.5 bits a weight, and 4 bytes a projection. The layout is that of NVIDIA's ModelOpt
checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_NAN = 0x7F

# What the three low bits of a code stand for, and what the bytes 0 ... 126 of a block scale do.
E2M1_VALUES: NDArray[np.float32] = np.array([0, 0.5, 1, 1.5, 2, 3, 4, E2M1_MAX], np.float32)
E4M3_VALUES: NDArray[np.float32] = (
    np.arange(E4M3_NAN, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
)


@dataclass(frozen=True, kw_only=True, eq=False)
class NVFP4Weight:
    """A quantized weight of logical shape `[out, in]`: one projection, or a fused group's rows.

    Attributes:
        codes: uint8 `[out, in / 2]`.
        block_scales: float8_e4m3fn `[out, in / 16]`, finite and not negative.
        global_scales: float32 `[parts]`, finite and positive: one for each stacked projection.
        part_rows: the rows of each part; they add up to `out`.

    Raises:
        ValueError: where a shape, dtype or value breaks these invariants.
    """

    codes: NDArray[np.uint8]
    block_scales: NDArray[ml_dtypes.float8_e4m3fn]
    global_scales: NDArray[np.float32]
    part_rows: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, dtype, rank in (
            ("codes", np.uint8, 2),
            ("block_scales", ml_dtypes.float8_e4m3fn, 2),
            ("global_scales", np.float32, 1),
        ):
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != rank:
                raise ValueError(
                    f"{name}: found {array.dtype} of rank {array.ndim}, "
                    f"expected {np.dtype(dtype)} of rank {rank}"
                )
        out, columns = self.shape
        if columns % BLOCK_SIZE or self.block_scales.shape != (out, columns // BLOCK_SIZE):
            raise ValueError(
                f"block_scales: found {self.block_scales.shape}, expected one per {BLOCK_SIZE} "
                f"columns of [{out}, {columns}]"
            )
        if len(self.part_rows) != len(self.global_scales) or sum(self.part_rows) != out:
            raise ValueError(
                f"parts: found rows {self.part_rows} with {len(self.global_scales)} global "
                f"scales, expected one scale a part and {out} rows in all"
            )
        # As bits, because a process that flushes subnormals to zero would misjudge a tiny scale.
        bits = self.global_scales.view(np.uint32)
        if ((bits == 0) | (bits >= 0x7F80_0000)).any():
            raise ValueError(f"global_scales: found {self.global_scales}, expected finite, above 0")
        if (self.block_scales.view(np.uint8) >= E4M3_NAN).any():
            raise ValueError("block_scales: found a NaN or negative E4M3 byte")

    @property
    def shape(self) -> tuple[int, int]:
        """Logical `(out, in)`."""
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and global scales together."""
        return self.codes.nbytes + self.block_scales.nbytes + self.global_scales.nbytes

    @classmethod
    def stack(cls, parts: Sequence[NVFP4Weight]) -> NVFP4Weight:
        """Stacks the rows of several weights with equal `in`; every part keeps its bits."""
        return cls(
            codes=np.concatenate([part.codes for part in parts]),
            block_scales=np.concatenate([part.block_scales for part in parts]),
            global_scales=np.concatenate([part.global_scales for part in parts]),
            part_rows=tuple(rows for part in parts for rows in part.part_rows),
        )


def packed_bytes(out: int, columns: int) -> int:
    """Bytes of one NVFP4 projection of shape `[out, columns]`, its global scale included."""
    return out * columns // 2 + out * columns // BLOCK_SIZE + 4


def empty_parts(shapes: Sequence[tuple[int, int]]) -> NVFP4Weight:
    """All-zero parts of these shapes, of equal `in`: for where only the shapes count."""
    rows, columns = tuple(out for out, _ in shapes), shapes[0][1]
    return NVFP4Weight(
        codes=np.zeros((sum(rows), columns // 2), np.uint8),
        block_scales=np.zeros((sum(rows), columns // BLOCK_SIZE), ml_dtypes.float8_e4m3fn),
        global_scales=np.ones(len(rows), np.float32),
        part_rows=rows,
    )
