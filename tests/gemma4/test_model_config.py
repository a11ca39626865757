"""Gemma 4's configuration: what is read, and what is refused before anything is compiled."""

from __future__ import annotations

from typing import Any

import pytest
from max.dtype import DType
from transformers import AutoConfig, PretrainedConfig

from attnquant.errors import UnsupportedError
from attnquant.gemma4.model_config import Gemma4Config
from attnquant.nn.config import Rope
from tests.tiny.gemma4 import CASES

TINY = CASES["gemma4-shared-values"]


def config(**changes: Any) -> PretrainedConfig:
    """The tiny checkpoint's config; `changes` go to the text config."""
    return AutoConfig.for_model(**_typed(TINY.config(), changes))


def _typed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return values | {"text_config": values["text_config"] | changes}


def test_ropes_and_scale() -> None:
    fields = Gemma4Config.own_fields(config())
    assert fields["attention_scale"] == 1.0
    assert fields["ropes"] == {
        "sliding_attention": Rope(theta=10_000.0),
        "full_attention": Rope(theta=1_000_000.0, rotated=0.25),
    }


def test_the_vision_tower_is_read_where_there_is_one() -> None:
    Gemma4Config.check(config())
    assert Gemma4Config.own_fields(config())["vision"].patch_size == 8
    # 256 positions a side of the table, pooled 3 by 3, a float32 row of 128 each.
    assert Gemma4Config.estimate_vision_cache_entry_bytes(config()) == 28 * 128 * 4
    assert Gemma4Config.get_vision_cache_row_spec(config()) == (128, DType.float32)


@pytest.mark.parametrize("name", ["gemma4-own-values", "gemma4-unified"])
def test_text_only_checkpoints_have_no_vision_cache(name: str) -> None:
    text_only = AutoConfig.for_model(**CASES[name].config())
    Gemma4Config.check(text_only)
    assert Gemma4Config.own_fields(text_only)["vision"] is None
    assert Gemma4Config.estimate_vision_cache_entry_bytes(text_only) == 0
    assert Gemma4Config.get_vision_cache_row_spec(text_only) is None


def test_the_unified_lines_own_embedder_is_left_out() -> None:
    values = CASES["gemma4-unified"].config() | {"vision_config": {"patch_size": 16}}
    unified = AutoConfig.for_model(**values)
    assert unified.vision_config is not None
    assert Gemma4Config.own_fields(unified)["vision"] is None


ROPES = TINY.config()["text_config"]["rope_parameters"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        (
            {"rope_parameters": ROPES | {"full_attention": ROPES["sliding_attention"]}},
            "rope_type of full_attention is 'default', expected 'proportional'",
        ),
        (
            {"rope_parameters": ROPES | {"sliding_attention": ROPES["full_attention"]}},
            "rope_type of sliding_attention is 'proportional', expected 'default'",
        ),
    ],
)
def test_what_the_graph_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Gemma4Config.check(config(**changes))


def test_a_tower_that_clips_is_refused() -> None:
    values = TINY.config()
    values["vision_config"]["use_clipped_linears"] = True
    with pytest.raises(UnsupportedError, match="use_clipped_linears is True"):
        Gemma4Config.check(AutoConfig.for_model(**values))
