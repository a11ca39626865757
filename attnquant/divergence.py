"""How far one model's next-token distributions are from another's, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def chunks(tokens: Sequence[int], size: int) -> list[list[int]]:
    """`<bos>`, which is the first token, before each following run of `size - 1` tokens."""
    bos, *text = tokens
    return [[bos, *text[start : start + size - 1]] for start in range(0, len(text), size - 1)]


def compare(
    reference: NDArray[np.floating[Any]], other: NDArray[np.floating[Any]], targets: Sequence[int]
) -> NDArray[np.float64]:
    """Holds two models' logits against each other.

    Args:
        reference: `[positions, vocab]`.
        other: `[positions, vocab]`.
        targets: each position's next token.

    Returns:
        `[3, positions]`: KL(reference || other) in nats, 1 where both put the same token first and
        0 elsewhere, and -log p(target) of `other`.
    """
    # A row at a time stays in the processor's cache. Sums over a vocabulary are float64's.
    result = np.empty((3, len(targets)))
    for row, (p, q, target) in enumerate(zip(reference, other, targets, strict=True)):
        same_first = p.argmax() == q.argmax()
        p, q = p - p.max(), q - q.max()
        weight = np.exp(p)
        p_total = weight.sum(dtype=np.float64)
        q_total = np.exp(q).sum(dtype=np.float64)
        mean = (weight * (p - q)).sum(dtype=np.float64) / p_total
        result[:, row] = (
            mean + np.log(q_total / p_total),
            same_first,
            np.log(q_total) - q[target],
        )
    return result


def standard_error(values: NDArray[np.float64]) -> float:
    """Of the mean."""
    return float(values.std(ddof=1) / len(values) ** 0.5)
