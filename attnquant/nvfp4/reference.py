"""NVFP4 in NumPy, a line of code for a line of the specification; its Mojo twin is byte-equal.

All arithmetic is IEEE float32, round to nearest even, subnormals kept, except where float64 is
named. `fl(...)` below is one rounding to float32. Sources in bfloat16 or float16 widen exactly.

**Global scale**, from the largest magnitude `amax` of a projection or of its whole fused group:

    encode_scale = min(fl(2688 / amax), FLT_MAX)        2688 = 6 * 448; amax = 0 gives FLT_MAX
    g            = fl(1 / encode_scale)                 the stored global scale, always above 0

**Abs-max scale** of a block of 16 whose largest magnitude is `block_amax`:

    a = E4M3(min(fl(fl(block_amax / 6) * encode_scale), 448))     nearest, ties to even

An all-zero block keeps scale byte 0 and codes 0. In any other block a = 0 (the scale underflowed)
becomes a = 1, the smallest E4M3 value 2^-9: every value then rounds to 0 or nearer than 0, so that
is never worse than flushing the block.

**Codes** of a block under scale byte c, whose value is s(c):

    inverse(c) = min(fl(1 / fl(s(c) * g)), FLT_MAX)
    y          = fl(x * inverse(c))
    k          = index of |y| among 0 0.5 1 1.5 2 3 4 6, nearest, ties to even, saturating at 6:
                 (|y| > .25) + (|y| >= .75) + (|y| > 1.25) + (|y| >= 1.75) + (|y| > 2.5)
                 + (|y| >= 3.5) + (|y| > 5)
    code       = k | 8 if y < 0 else k                  so -0.1 may become 8, but -0.0 becomes 0

**Value** of a code, which is what `decode` returns: w = fl(fl(q(k) * s(c)) * g) with the sign of
the code. The inner product is exact; the outer one must be rounded (no fused multiply-add with what
follows). There are only 126 * 8 magnitudes per global scale: a table `w[c][k]` is both the simplest
and the safest way to get them.

**Search** (`mse`): the candidates are the bytes max(1, a - 3) ... min(126, a + 7). With
p = 2^clip(-frexp(g).exponent, -126, 127), a power of two that keeps squares in range and is exact,

    d_i = fl(fl(|x_i| * p) - fl(w[c][k_i] * p))         float32
    z_i = float64(d_i) * float64(d_i)                   exact
    E(c) = sum of z by halves, in float64: for n = 8, 4, 2, 1: z_i += z_(i+n) for i < n

Since z is exact and everything after it is an addition, contraction into fused multiply-adds cannot
change E, nor can the SIMD width. The byte with the least E is stored; on a tie `a` wins, else the
smallest byte. E is the squared error of what `decode` returns, so `mse` is never worse than
`absmax` on any block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attnquant.errors import CheckpointError
from attnquant.nvfp4.format import BLOCK_SIZE, E2M1_VALUES, NVFP4Weight
from attnquant.nvfp4.scales import (
    ScaleTables,
    absmax_bytes,
    e2m1_codes,
    encode_scale,
    global_scale,
    mse_bytes,
)

# Weights worked on at once: bounds the temporaries to some 20 MB whatever the projection.
_CHUNK = 1 << 18

_SOURCES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def check_source(weight: NDArray[Any], name: str) -> None:
    """Refuses what NVFP4 cannot be made of, whatever its values are.

    Raises:
        CheckpointError: not of rank 2, not float32, float16 or bfloat16, or `in` not a multiple
            of 16: names the tensor.
    """
    if weight.ndim != 2 or weight.dtype not in _SOURCES or weight.shape[1] % BLOCK_SIZE:
        raise CheckpointError(
            f"{name}: found {weight.dtype} {list(weight.shape)}, expected float32, float16 or "
            f"bfloat16 [out, in] with in a multiple of {BLOCK_SIZE} to make NVFP4 of"
        )


def check_importance(
    importance: NDArray[np.float32] | None, weight: NDArray[Any], name: str
) -> None:
    """Refuses an importance that is not one finite number above 0 for each column.

    Raises:
        ValueError: names the tensor.
    """
    if importance is None:
        return
    if importance.dtype != np.float32 or importance.shape != weight.shape[1:]:
        raise ValueError(
            f"{name}: found an importance {importance.dtype} {list(importance.shape)}, expected "
            f"float32 {list(weight.shape[1:])}"
        )
    if not (np.isfinite(importance) & (importance > 0)).all():
        raise ValueError(f"{name}: found an importance that is not finite and above 0")


def largest_magnitude(weight: NDArray[Any], *, name: str = "weight") -> np.float32:
    """The largest magnitude of a finite `[out, in]` weight, exactly; 0 if it is empty.

    Raises:
        CheckpointError: not of rank 2, not float32, float16 or bfloat16, `in` not a multiple of
            16, or a NaN or infinity: names the tensor, and the row and column of the first.
    """
    check_source(weight, name)
    amax = np.float32(0)
    for start, rows in _chunks(weight):
        finite = np.isfinite(rows)
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            raise CheckpointError(
                f"{name}: found {rows[row, column]} at [{start + row}, {column}], expected finite "
                "weights; repair the checkpoint, or keep this projection as it is with "
                "ATTNQUANT_QUANT_IGNORE"
            )
        if rows.size:
            amax = max(amax, np.abs(rows).max())
    return amax


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
    check_importance(importance, weight, name)
    own = largest_magnitude(weight, name=name)
    largest = own if amax is None else np.float32(amax)
    if not own <= largest < np.inf:
        raise ValueError(f"{name}: found amax {amax}, expected finite, at least its own {own}")
    to_scale, scale = encode_scale(largest), global_scale(largest)
    tables = ScaleTables.of(scale)
    out, columns = weight.shape
    codes = np.empty((out, columns // 2), np.uint8)
    scale_bytes = np.empty((out, columns // BLOCK_SIZE), np.uint8)
    for start, rows in _chunks(weight):
        blocks = rows.reshape(-1, BLOCK_SIZE)
        magnitudes = np.abs(blocks)
        chosen = absmax_bytes(magnitudes, to_scale)
        if scales == "mse":
            counts = None
            if importance is not None:
                counts = np.tile(importance.reshape(-1, BLOCK_SIZE), (len(rows), 1))
            chosen = mse_bytes(magnitudes, chosen, tables, importance=counts)
        stop = start + len(rows)
        codes[start:stop] = _pack(_signed_codes(blocks, chosen, tables)).reshape(len(rows), -1)
        scale_bytes[start:stop] = chosen.reshape(len(rows), -1)
    return NVFP4Weight(
        codes=codes,
        block_scales=scale_bytes.view(ml_dtypes.float8_e4m3fn),
        global_scales=np.array([scale], np.float32),
        part_rows=(out,),
    )


def decode(weight: NVFP4Weight) -> NDArray[np.float32]:
    """Float32 `[out, in]` of a quantized weight: the exact product code · scale, times `g`."""
    out, columns = weight.shape
    decoded = np.empty((out, columns), np.float32)
    scale_of_row = np.repeat(weight.global_scales, weight.part_rows)[:, None]
    signed_values = np.concatenate([E2M1_VALUES, -E2M1_VALUES])
    step = max(1, _CHUNK // max(1, columns))
    for start in range(0, out, step):
        rows = slice(start, start + step)
        values = decoded[rows]
        values[:, 0::2] = signed_values[weight.codes[rows] & 15]
        values[:, 1::2] = signed_values[weight.codes[rows] >> 4]
        values *= np.repeat(weight.block_scales[rows].astype(np.float32), BLOCK_SIZE, axis=1)
        values *= scale_of_row[rows]
    return decoded


def relative_error(weight: NDArray[Any], quantized: NVFP4Weight) -> float:
    """Relative L2 error `|W - decode(Q)| / |W|`, in float64; 0 for an all-zero weight."""
    decoded = decode(quantized)
    error = total = 0.0
    for start, rows in _chunks(weight):
        exact = rows.astype(np.float64)
        error += float(((exact - decoded[start : start + len(rows)]) ** 2).sum())
        total += float((exact**2).sum())
    return (error / total) ** 0.5 if total else 0.0


def _chunks(weight: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Consecutive rows in float32, with the index of the first."""
    step = max(1, _CHUNK // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        yield start, weight[start : start + step].astype(np.float32)


def _signed_codes(
    blocks: NDArray[np.float32], scale_bytes: NDArray[np.uint8], tables: ScaleTables
) -> NDArray[np.uint8]:
    with np.errstate(over="ignore"):
        scaled = blocks * tables.inverses[scale_bytes, None]
    return e2m1_codes(np.abs(scaled)) | np.where(scaled < 0, np.uint8(8), np.uint8(0))


def _pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
