"""What is said of quantized models' figures, position by position."""

from __future__ import annotations

import numpy as np
import pytest

from attnquant.divergence import standard_error
from bench.divergence import Quality


def test_quality_of_paired_figures() -> None:
    rng = np.random.default_rng(1)
    absmax = np.abs(rng.normal(size=(3, 500)))
    absmax[1] = absmax[1] > 1
    quality = Quality.of(absmax * 0.8, absmax)
    assert quality.against_absmax == pytest.approx(0.8)
    # Position by position the ratio is the same, so that the mean's is certain.
    assert quality.against_absmax_error == pytest.approx(0, abs=1e-12)
    assert quality.kl == pytest.approx(0.8 * absmax[0].mean())
    assert quality.kl_error == pytest.approx(standard_error(absmax[0]) * 0.8)
    assert quality.perplexity == pytest.approx(np.exp(0.8 * absmax[2].mean()))
