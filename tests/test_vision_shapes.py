"""The vision tower's sizes: against transformers' tower, and what a config may say."""

from __future__ import annotations

import math
from typing import Any

import pytest

from attnquant.errors import CheckpointError
from attnquant.vision_shapes import VisionShapes
from tests.configs import gemma3_270m, gemma4_31b


def gemma4_31b_vision(**changes: Any) -> dict[str, Any]:
    """`vision_config` of Gemma 4 31B, with the fields that sizes depend on."""
    return {
        "model_type": "gemma4_vision",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 72,
        "standardize": True,
    } | changes


def shapes(vision: Any) -> VisionShapes | None:
    return VisionShapes.from_config(gemma4_31b() | {"vision_config": vision})


def test_weights_of_gemma4_31b() -> None:
    """transformers' `Gemma4VisionModel` of this config has 569,548,080 parameters and two buffers
    of 1152, the standard shift and scale; the projection to the text is 1152 x 5376."""
    tower = shapes(gemma4_31b_vision())
    assert tower is not None
    assert tower.weights == 569_548_080 + 2 * 1152 + 1152 * 5376
    plain = shapes(gemma4_31b_vision(standardize=False))
    assert plain is not None
    assert tower.weights - plain.weights == 2 * 1152


def test_tensors_are_all_weights() -> None:
    for standardize in (True, False):
        tower = shapes(gemma4_31b_vision(standardize=standardize, num_key_value_heads=8))
        assert tower is not None
        assert sum(map(math.prod, tower.tensors.values())) == tower.weights


def test_fused_weights_are_q_k_v_and_gate_up() -> None:
    tower = shapes(gemma4_31b_vision(num_key_value_heads=8))
    assert tower is not None
    rows = (16 + 8 + 8) * 72 + 2 * 4304
    assert tower.fused_weights == 27 * rows * 1152


@pytest.mark.parametrize(
    ("changes", "widest"),
    [
        ({}, 1152 + 3 * 4304),
        ({"intermediate_size": 1152, "num_key_value_heads": 15}, 1152 + 3 * 1152 + 5 * 1080),
        ({"intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}, 7 * 1152),
    ],
    ids=["feed-forward", "attention", "pooling"],
)
def test_the_widest_point_of_a_layer(changes: dict[str, Any], widest: int) -> None:
    tower = shapes(gemma4_31b_vision(**changes))
    assert tower is not None
    assert tower.patch_values == 3 * 16 * 16 + widest


def test_patches_of_a_step() -> None:
    tower = shapes(gemma4_31b_vision(pooling_kernel_size=4))
    assert tower is not None
    assert tower.patches(1000) == 16 * (1000 + 2240)


def test_a_config_without_a_tower() -> None:
    assert VisionShapes.from_config(gemma3_270m()) is None
    assert shapes(None) is None
    text_only = gemma4_31b() | {"architectures": ["Gemma4UnifiedForConditionalGeneration"]}
    assert VisionShapes.from_config(text_only) is None


def test_impossible_fields_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"vision_config\.head_dim is 0, expected a whole"):
        shapes(gemma4_31b_vision(head_dim=0))
    with pytest.raises(CheckpointError, match="vision_config is 'x', expected an object"):
        shapes("x")
