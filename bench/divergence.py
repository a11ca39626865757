"""How far one model's next-token distributions are from another's, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def chunks(tokens: Sequence[int], size: int) -> list[list[int]]:
    """`<bos>`, which is the first token, before each following run of `size - 1` tokens."""
    bos, *text = tokens
    return [[bos, *text[start : start + size - 1]] for start in range(0, len(text), size - 1)]


def compare(
    reference: NDArray[np.float32], other: NDArray[np.float32], targets: Sequence[int]
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


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Means over positions, and their standard errors.

    Attributes:
        kl: nats.
        top1: fraction of positions where both models put the same token first.
        perplexity: of the text under the quantized model.
        against_absmax: this KL divergence over abs-max scales'.
    """

    kl: float
    kl_error: float
    top1: float
    top1_error: float
    perplexity: float
    against_absmax: float
    against_absmax_error: float

    @classmethod
    def of(cls, figures: NDArray[np.float64], absmax: NDArray[np.float64]) -> Quality:
        """Summarizes `compare`'s figures; `absmax` are those of abs-max scales."""
        kl, top1, nll = figures
        under = absmax[0].mean()
        over = kl.mean() / under
        return cls(
            kl=float(kl.mean()),
            kl_error=standard_error(kl),
            top1=float(top1.mean()),
            top1_error=standard_error(top1),
            perplexity=float(np.exp(nll.mean())),
            against_absmax=float(over),
            # The delta method for a ratio of two means over the same positions.
            against_absmax_error=standard_error(kl - over * absmax[0]) / float(under),
        )

    def row(self) -> tuple[str, ...]:
        """Its cells of the table: KL, against abs-max, top-1, perplexity."""
        return (
            f"{self.kl:.4f} ± {self.kl_error:.4f}",
            f"{self.against_absmax:.3f} ± {self.against_absmax_error:.3f}",
            f"{self.top1:.3f} ± {self.top1_error:.3f}",
            f"{self.perplexity:.2f}",
        )


def standard_error(values: NDArray[np.float64]) -> float:
    """Of the mean."""
    return float(values.std(ddof=1) / len(values) ** 0.5)
