"""Which path serves a decoder's bundles, and which settings cannot be served."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import SettingsError
from attnquant.log import LOGGER
from attnquant.nvfp4.coverage import coverage_of
from attnquant.settings import Settings
from attnquant.theta import HeldBundles, ThetaPlan, plan_of
from tests.configs import gemma4_31b

SHAPES = DecoderShapes.from_config(gemma4_31b())
LAYERS = len(SHAPES.layers)
HELD = HeldBundles(blocks=12, rank=32, packed=False)
PACKED = HeldBundles(blocks=12, rank=32, packed=True)


def plan(*, held: HeldBundles | None = None, packed: Any = (), **settings: Any) -> ThetaPlan:
    asked = Settings(**settings)
    coverage = coverage_of(asked, SHAPES, packed)
    return plan_of(asked, SHAPES, coverage, packed=packed, held=held)


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({}, "weights"),
        ({"blocks": LAYERS, "precompute_outside": False}, "weights"),
        ({"blocks": 12, "rank": 8}, "outside"),
        ({"blocks": 12, "precompute_outside": True}, "outside"),
        ({"blocks": 12, "quant": "nvfp4"}, "outside"),
        ({"blocks": 12, "precompute_outside": False}, "factored"),
        ({"blocks": 12, "precompute_outside": False, "gemm": "dense"}, "dense"),
        ({"blocks": 12, "precompute_outside": False, "gemm": "factored"}, "factored"),
        ({"blocks": 12, "precompute_outside": False, "quant": "nvfp4"}, "factored"),
        ({"blocks": 12, "rank": 32, "held": HELD}, "outside"),
        ({"blocks": 12, "rank": 8, "held": HELD, "precompute_outside": False}, "factored"),
        ({"blocks": 12, "rank": 32, "held": PACKED, "quant": "nvfp4"}, "factored"),
    ],
)
def test_the_path(settings: dict[str, Any], path: str) -> None:
    made = plan(**settings)
    assert made.path == path
    assert made.reason
    assert len(made.groups) == settings.get("blocks", LAYERS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 4}, "ATTNQUANT_RANK=4 corrects shared blocks"),
        ({"blocks": 1}, "ATTNQUANT_BLOCKS=1 is not a whole number from 2 to 60"),
        (
            {"blocks": 12, "packed": {"layers.0.mlp.up_proj"}},
            "ATTNQUANT_BLOCKS=12: the checkpoint holds projections in NVFP4",
        ),
        (
            {"blocks": 6, "held": HELD},
            "ATTNQUANT_BLOCKS=6: the checkpoint holds bundles of 12 blocks; unset it",
        ),
        (
            {"held": HELD},
            "ATTNQUANT_BLOCKS=60: the checkpoint holds bundles of 12 blocks; unset it",
        ),
        (
            {"blocks": 12, "rank": 33, "held": HELD},
            "ATTNQUANT_RANK=33: the checkpoint holds corrections of rank 32, which can only be cut",
        ),
        (
            {"blocks": 12, "held": PACKED, "quant": "nvfp4", "precompute_outside": True},
            "ATTNQUANT_PRECOMPUTE_OUTSIDE=1: the checkpoint's shared blocks are in NVFP4",
        ),
        (
            {"blocks": 12, "quant": "nvfp4", "gemm": "dense", "precompute_outside": False},
            "ATTNQUANT_GEMM=dense rebuilds weights in the graph",
        ),
        (
            {
                "blocks": 12,
                "quant": "nvfp4",
                "quant_ignore": ("layers.3.*",),
                "precompute_outside": False,
            },
            "names q_proj in some of the layers 0, 1, 2, 3, 4, which share one block",
        ),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        plan(**settings)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_log_says_which_path_runs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        plan().log()
        assert not caplog.records
        plan(blocks=12, rank=8, precompute_outside=False).log()
    (record,) = caplog.records
    assert "theta: 12 blocks for 60 layers, rank 8, factored: " in record.getMessage()
