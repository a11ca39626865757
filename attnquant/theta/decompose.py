"""How bundles are made from weights: analytic, in one pass, and with the smallest error there is.

Of a group's m layers, the rows i form a matrix `A [m, in]`. Its best approximation by one shared
row and one coefficient for each layer is its leading singular triple (Eckart and Young, 1936): the
right singular vector is row i of `W0`, and `s = A·W0[i]`. The m x m matrix `A·Aᵀ` has it all, for
its leading eigenvector a gives `Aᵀ·a`, the shared row times the singular value. Squaring loses
nothing here, since it is the largest singular value that is wanted, and it is done in float64.

What remains of a layer, `R = W - s·W0`, gets the best `U·Vᵀ` of rank r, its truncated singular
value decomposition, written as an orthonormal V of r columns and `U = R·V`. Given V that U is
optimal, and with r = in it gives R back to rounding, as no small singular value is divided by. V
holds the leading eigenvectors of `Rᵀ·R`:

- exactly, where r is not small beside the columns, and that costs no more;
- else by subspace iteration (Halko, Martinsson and Tropp, 2011, algorithm 4.4, from a fixed seed)
  that goes on until a round no longer lowers the squared error by a thousandth. A round costs
  `4·out·in·r` operations, against `out·in²` and a dense eigenproblem for the exact way.

Where W0 and V are stored in fewer bits they are rounded first, and what depends on them, s, R and
U, is computed from what is stored, so that it makes up for their rounding as far as it can.

A projection with fewer rows than columns is done transposed. Signs are fixed, so equal weights give
equal bundles. Memory beyond the weights and the result is one projection in float32, `Rᵀ·R` where
that is solved exactly, and a strip of float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from attnquant.errors import CheckpointError
from attnquant.theta.bundle import ThetaBundle

# Numbers in a strip of float64: 32 MB.
_STRIP = 1 << 22

# Columns that subspace iteration carries beyond the rank: they make it converge faster.
_EXTRA_COLUMNS = 16

# Up to this many columns of the matrix to a carried one the exact way costs half as much again as
# iterating, or less: measured on one AVX2 core, with 640 and 1152 columns and ranks 32 and 64.
_EXACT_BELOW = 12

# A round that lowers the squared error by less than this part of it is the last.
_SMALLEST_GAIN = 1e-3
_MOST_ROUNDS = 50

# No model has rows a billionth as long; float32 holds the squares of longer ones no more.
_LONGEST_ROW = 1e15


def decompose(
    weights: Sequence[NDArray[Any]],
    rank: int,
    names: Sequence[str] | None = None,
    dtype: DTypeLike = np.float32,
) -> list[ThetaBundle]:
    """Makes the bundles of a block group.

    Args:
        weights: the group's projections, `[out, in]` each, float32, float16 or bfloat16.
        rank: of the correction; `min(rank, out, in)` is used, as more cannot be of use.
        names: what to call the weights in an error.
        dtype: of w0, u and v.

    Returns:
        A bundle for each weight, all with the same array as `w0`, whose rows have length 1 (to the
        dtype's rounding), or 0 where they are 0 in every layer. A group of one layer is
        passthrough: nothing is smaller or nearer.

    Raises:
        CheckpointError: a weight holds a NaN or an infinity, or a row too long to be decomposed.
        ValueError: the shapes differ.
    """
    if len({weight.shape for weight in weights}) != 1:
        raise ValueError(f"a block group has shapes {[weight.shape for weight in weights]}")
    if len(weights) == 1:
        return [ThetaBundle.passthrough(weights[0])]
    names = [f"weight {index}" for index in range(len(weights))] if names is None else names
    w0, scales = shared_block(weights, names, dtype)
    bundles = []
    for weight, s in zip(weights, scales, strict=True):
        remainder = weight.astype(np.float32)
        remainder -= s[:, None] * w0.astype(np.float32, copy=False)
        u, v = low_rank(remainder, min(rank, *weight.shape), dtype)
        bundles.append(ThetaBundle(w0=w0, s=s, u=u, v=v))
    return bundles


def stored_dtype(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """What a group's bundles are stored in: the dtype of its weights, or float32 if they differ."""
    return dtypes[0] if len(set(dtypes)) == 1 else np.dtype(np.float32)


def shared_block(
    weights: Sequence[NDArray[Any]], names: Sequence[str], dtype: DTypeLike = np.float32
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """The best shared rows `[out, in]`, and each layer's scales `[layers, out]`, in float32."""
    rows, columns = weights[0].shape
    w0 = np.empty((rows, columns), dtype)
    scales = np.empty((len(weights), rows), np.float32)
    largest = ml_dtypes.finfo(dtype).max  # type: ignore[no-untyped-call]
    most = min(_LONGEST_ROW, float(largest))
    for strip in _strips(rows, columns * len(weights)):
        stacked = np.stack([weight[strip].astype(np.float64) for weight in weights], axis=1)
        grams = stacked @ stacked.transpose(0, 2, 1)
        squares = np.diagonal(grams, axis1=1, axis2=2)
        finite = np.isfinite(squares).all(axis=0)
        if not finite.all():
            raise CheckpointError(
                f"{names[int(finite.argmin())]} holds a NaN or an infinity, expected numbers: "
                "the checkpoint is damaged, download it again"
            )
        if (longest := float(squares.max(initial=0)) ** 0.5) > most:
            name = names[int(squares.max(axis=0).argmax())]
            raise CheckpointError(
                f"{name} holds a row of length {longest:.3g}, expected at most {most:.3g}, beyond "
                "which its factors overflow: the checkpoint is damaged, download it again"
            )
        leading = _with_fixed_signs(np.linalg.eigh(grams)[1][:, :, -1:])
        shared = (leading.transpose(0, 2, 1) @ stacked)[:, 0]
        w0[strip] = shared / _nonzero(np.linalg.norm(shared, axis=1, keepdims=True))
        # From the rounded rows, so that the scales are the best for what is stored.
        stored = w0[strip].astype(np.float64)
        projected = (stacked @ stored[:, :, None])[:, :, 0]
        scales[:, strip] = (projected / _nonzero((stored * stored).sum(axis=1, keepdims=True))).T
    return w0, scales


def low_rank(
    matrix: NDArray[np.float32], rank: int, dtype: DTypeLike = np.float32
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The best approximation of `[out, in]` by `U·Vᵀ`: U `[out, rank]`, V `[in, rank]`."""
    rows, columns = matrix.shape
    if rows < columns:
        v, u = low_rank(matrix.T, rank, dtype)
        return u, v
    if rank == 0:
        return np.empty((rows, 0), dtype), np.empty((columns, 0), dtype)
    v = _with_fixed_signs(_right_vectors(matrix, rank)).astype(dtype)
    return _times(matrix, v.astype(np.float64)).astype(dtype), v


def _right_vectors(matrix: NDArray[np.float32], rank: int) -> NDArray[np.float64]:
    """The leading right singular vectors, `[columns, rank]`, the largest first."""
    width = rank + _EXTRA_COLUMNS
    if matrix.shape[1] <= _EXACT_BELOW * width:
        return _leading_eigenvectors(_gram(matrix), rank)
    basis = _leading_subspace(matrix, rank, width)
    image = _times(matrix, basis)
    return basis @ _leading_eigenvectors(image.T @ image, rank)


def _leading_subspace(matrix: NDArray[np.float32], rank: int, width: int) -> NDArray[np.float64]:
    """An orthonormal float64 basis `[columns, width]` that all but holds those vectors."""
    start = np.random.default_rng(0).standard_normal((matrix.shape[1], width), np.float32)
    basis = np.linalg.qr(matrix.T @ (matrix @ start))[0]
    energy = float(np.vdot(matrix, matrix))
    captured = 0.0
    for _ in range(_MOST_ROUNDS):
        image = matrix @ basis
        before, captured = captured, _leading_energy(image, rank)
        if captured - before <= _SMALLEST_GAIN * (energy - captured):
            break
        basis = np.linalg.qr(matrix.T @ image)[0]
    return np.linalg.qr(basis.astype(np.float64))[0]


def _leading_energy(image: NDArray[np.float32], rank: int) -> float:
    squares = np.linalg.eigvalsh((image.T @ image).astype(np.float64))
    return float(squares[-rank:].sum())


def _leading_eigenvectors(symmetric: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    return np.linalg.eigh(symmetric)[1][:, : -count - 1 : -1]


def _gram(matrix: NDArray[np.float32]) -> NDArray[np.float64]:
    """`Rᵀ·R` in float64, without a float64 copy of R."""
    gram = np.zeros((matrix.shape[1], matrix.shape[1]))
    for strip in _strips(*matrix.shape):
        part = matrix[strip].astype(np.float64)
        gram += part.T @ part
    return gram


def _times(matrix: NDArray[np.float32], factor: NDArray[np.float64]) -> NDArray[np.float64]:
    """The product in float64, without a float64 copy of the matrix."""
    product = np.empty((matrix.shape[0], factor.shape[1]))
    for strip in _strips(*matrix.shape):
        product[strip] = matrix[strip].astype(np.float64) @ factor
    return product


def _strips(rows: int, numbers_in_a_row: int) -> Iterator[slice]:
    step = max(1, _STRIP // max(1, numbers_in_a_row))
    return (slice(start, start + step) for start in range(0, rows, step))


def _with_fixed_signs(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turns each column so that its entry of largest magnitude is positive."""
    largest = np.take_along_axis(columns, np.abs(columns).argmax(axis=-2, keepdims=True), axis=-2)
    return columns * np.where(largest < 0, -1.0, 1.0)


def _nonzero(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(values == 0, 1.0, values)
