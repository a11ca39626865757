"""A drafter's sizes, from its config.json and its target's."""

from __future__ import annotations

import math
from typing import Any

import pytest

from attnquant.drafter_shapes import DrafterShapes
from attnquant.errors import CheckpointError
from tests.configs import gemma4_31b, gemma4_31b_drafter
from tests.tiny.gemma4_drafter import DRAFTERS

DRAFTER = DRAFTERS["gemma4-shared-values"]


def test_the_tiny_drafter_has_the_tensors_that_its_config_implies() -> None:
    shapes = DrafterShapes.from_config(DRAFTER.config(), DRAFTER.target.config())
    found = {name: tensor.shape for name, tensor in DRAFTER.tensors().items()}
    assert shapes.tensors == found
    shapes.check(found)


def test_the_31b_s_drafter() -> None:
    shapes = DrafterShapes.from_config(gemma4_31b_drafter(), gemma4_31b())
    assert shapes.head_dims == {"sliding_attention": 256, "full_attention": 512}
    queries, inner = 1024 * 32 * (3 * 256 + 512), 4 * 3 * 1024 * 8192
    projections = 2 * queries + inner + 3 * 5376 * 1024
    vectors = 4 * (4 * 1024 + 1) + 3 * 256 + 512 + 1024
    assert sum(map(math.prod, shapes.tensors.values())) == 262144 * 1024 + projections + vectors


@pytest.mark.parametrize("field", ["rope_parameters", "sliding_window"])
def test_what_a_config_leaves_to_transformers_is_not_compared(field: str) -> None:
    config, target = DRAFTER.config(), DRAFTER.target.config()
    expected = DrafterShapes.from_config(config, target)
    for one in (config, target):
        del one["text_config"][field]
        assert DrafterShapes.from_config(config, target) == expected


def test_a_target_without_a_kind_of_layer_is_named() -> None:
    target = gemma4_31b(layer_types=["full_attention"] * 60)
    with pytest.raises(CheckpointError, match=r"the drafter's .* layer_types has 'sliding"):
        DrafterShapes.from_config(gemma4_31b_drafter(), target)


def test_what_is_wrong_with_the_target_is_not_said_of_the_drafter() -> None:
    target: dict[str, Any] = gemma4_31b()
    del target["text_config"]["hidden_size"]
    with pytest.raises(CheckpointError, match=r"^config\.json: hidden_size is missing"):
        DrafterShapes.from_config(gemma4_31b_drafter(), target)
