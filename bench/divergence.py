"""What quantizing moves of a model's answers, beside what abs-max scales move."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnquant.divergence import standard_error


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
