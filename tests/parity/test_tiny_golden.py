"""The tiny checkpoints' golden answers, made anew with transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")

from tests.golden import make_golden, reference
from tests.golden.data import HERE, load_tiny, relative_error
from tests.tiny import prompts
from tests.tiny.cases import CASES

# Float32 on another processor or torch: sums in another order.
SAME = 2e-5


@pytest.mark.parametrize("name", CASES)
def test_golden_file_is_what_transformers_says(name: str, tmp_path: Path) -> None:
    anew = make_golden.tiny(CASES[name], CASES[name].write(tmp_path))
    with np.load(HERE / f"tiny-{name}.npz") as kept:
        assert set(kept.files) == set(anew)
        for key, value in anew.items():
            if key.startswith(("last_", "every_", "image_last")):
                assert relative_error(value, kept[key]) < SAME
            else:
                assert np.array_equal(value, kept[key]), key


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("pattern6-mha", {"pattern": 7}),
        ("pattern6-mha", {"sliding_window": 127}),
        ("pattern6-mha", {"rope_theta": 900_000.0}),
        ("pattern6-mha", {"rms_norm_eps": 1e-5}),
        ("pattern2-scalar", {"query_pre_attn_scalar": 256}),
        ("pattern2-scalar", {"pattern": 4}),
        ("pattern2-scalar", {"rope_theta": 20_000.0, "rope_local_theta": 500_000.0}),
        ("linear-rope-old-config", {"rope_linear_factor": None}),
        ("linear-rope-old-config", {"rope_linear_factor": 7.5}),
        ("linear-rope-old-config", {"rope_local_theta": 11_000.0}),
        ("untied-sharded", {"tied": True}),
        ("untied-sharded", {"final_logit_softcapping": None}),
        ("gemma4-shared-values", {"final_logit_softcapping": 31.0}),
        ("gemma4-shared-values", {"partial_rotary_factor": 0.5}),
        ("gemma4-shared-values", {"sliding_window": 127}),
        ("gemma4-shared-values", {"scalars": (0.9, 0.05, 0.31, 0.01)}),
        ("gemma4-own-values", {"rope_theta": 450_000.0}),
        ("gemma4-own-values", {"rope_local_theta": 22_000.0}),
        ("gemma4-own-values", {"scalars": (0.012, 0.6, 0.2)}),
        ("gemma4-own-values", {"rms_norm_eps": 1e-5}),
    ],
)
def test_golden_logits_notice(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    """A mistake in any of these moves the golden logits far beyond the tolerance of tests.

    That is 1e-4, and 2e-5 for Gemma 4.
    """
    case = replace(CASES[name], **change)
    model = reference.load(case.write(tmp_path))
    longest = load_tiny(name).prompts[-1]
    least = 1e-4 if name.startswith("gemma4") else 1e-3
    assert relative_error(reference.logits(model, longest.tokens)[0], longest.last) > least


def test_golden_logits_notice_a_single_gain(tmp_path: Path) -> None:
    case = CASES["linear-rope-old-config"]
    model = reference.load(case.write(tmp_path))
    model.model.layers[1].self_attn.k_norm.weight.data += 0.02
    prompt = load_tiny(case.name).prompts[prompts.LENGTHS.index(24)]
    assert relative_error(reference.logits(model, prompt.tokens)[0], prompt.last) > 1e-3
