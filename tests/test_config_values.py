"""What config.json says beside shapes: every field of a wrong type or range, all in one line."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from attnquant.config_values import Activation, check_values
from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import CheckpointError
from attnquant.nn.mlp import ACTIVATIONS
from tests.configs import gemma3_270m, gemma4_31b
from tests.tiny.cases import CASES

GEMMA3, GEMMA4 = CASES["pattern2-scalar"].config(), CASES["gemma4-shared-values"].config()
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
HUGE = 10**30


def check(config: dict[str, Any]) -> None:
    check_values(config, DecoderShapes.from_config(config))


@pytest.mark.parametrize("name", CASES)
def test_tiny_checkpoints_are_good(name: str) -> None:
    check(CASES[name].config())


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": None},
        {"rope_parameters": {}},
        {"rope_parameters": {"full_attention": {"rope_theta": 10000}}},
        {"rope_scaling": {"rope_type": "linear", "factor": 8}},
        {"final_logit_softcapping": 30.0, "eos_token_id": 1, "bos_token_id": None},
        {"dtype": None, "attention_dropout": 0, "max_position_embeddings": 131072},
    ],
)
def test_odd_but_good(changes: dict[str, Any]) -> None:
    check(GEMMA3 | changes)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model_type", ["gemma2", None, []]),
        ("rms_norm_eps", [0.0, 1, -1e-6, "x", None, float("inf"), float("nan")]),
        ("sliding_window", [0, -1, None, "512", 512.0, HUGE, True]),
        ("max_position_embeddings", [0, None, "x", HUGE]),
        ("query_pre_attn_scalar", [0, -256, 1.5, None]),
        ("hidden_activation", ["relu", None, {}]),
        ("final_logit_softcapping", [0.0, -1.0, 30, "x"]),
        ("eos_token_id", ["1", HUGE, [1, None], {}]),
        ("use_bidirectional_attention", ["all", 1]),
        ("dtype", [16, ["bfloat16"]]),
        ("rope_theta", [0, -5, "x", None]),
        ("rope_parameters", ["x", [], 3, DEFAULT]),
        ("rope_parameters.full_attention", [[], "x"]),
        ("rope_parameters.full_attention.rope_theta", [0, -5, "x", float("inf")]),
        ("rope_parameters.full_attention.rope_type", [3, []]),
        ("rope_parameters.full_attention.factor", [0, "x"]),
        ("rope_parameters.full_attention.partial_rotary_factor", [0, 1.5]),
        ("rope_scaling", ["x", 8.0]),
    ],
)
def test_impossible_values_are_named(field: str, values: list[Any]) -> None:
    first, *rest = field.split(".")
    for value in values:
        inner = value
        for name in reversed(rest):
            inner = {name: inner} if name == "full_attention" else DEFAULT | {name: inner}
        config = GEMMA3 | {first: inner}
        with pytest.raises(CheckpointError) as caught:
            check(config)
        assert f"config.json: {field} is " in str(caught.value)
        assert str(caught.value).isprintable()


def test_all_that_is_wrong_is_one_line() -> None:
    linear = {"full_attention": {"rope_type": "linear"}}
    with pytest.raises(CheckpointError) as caught:
        check(GEMMA3 | {"rms_norm_eps": 0, "sliding_window": "x\n", "rope_parameters": linear})
    assert str(caught.value) == (
        "config.json: sliding_window is 'x\\n', expected a whole number from 1 to 2147483647; "
        "rms_norm_eps is 0, expected a decimal number between 0 and 1; "
        "rope_parameters.full_attention.factor is missing, expected a number above 0: "
        "correct config.json, or download it again"
    )


def test_what_transformers_demands_of_gemma3() -> None:
    with pytest.raises(CheckpointError, match="hidden_size is 130, expected a multiple of"):
        check(GEMMA3 | {"hidden_size": 130, "num_attention_heads": 4})
    with pytest.raises(CheckpointError, match="text_config is there, expected its fields beside"):
        check(GEMMA3 | {"text_config": GEMMA3})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vision_config.hidden_size", None),
        ("vision_config.rms_norm_eps", 1),
        ("vision_config.standardize", "yes"),
        ("vision_config.patch_size", HUGE),
        ("vision_config", "x"),
        ("audio_config", []),
        ("image_token_id", None),
        ("boi_token_id", -1),
        ("tie_word_embeddings", None),
        ("model_type", "gemma3"),
        ("text_config.model_type", "gemma3_text"),
        ("text_config.use_bidirectional_attention", "some"),
        ("text_config.num_kv_shared_layers", "none"),
    ],
)
def test_the_parts_of_a_multimodal_config(field: str, value: Any) -> None:
    config = json.loads(json.dumps(GEMMA4))
    *outer, last = field.split(".")
    (config[outer[0]] if outer else config)[last] = value
    shapes = DecoderShapes.from_config(GEMMA4)
    with pytest.raises(CheckpointError, match=f"config.json: .*{field} is ") as caught:
        check_values(config, shapes)
    assert str(caught.value).isprintable()


def test_placeholders_are_needed_by_a_tower_only() -> None:
    check(CASES["gemma4-own-values"].config() | {"image_token_id": None})


def test_the_real_models_are_good() -> None:
    check(gemma3_270m(model_type="gemma3_text"))
    config = gemma4_31b()
    text = config["text_config"] | {"model_type": "gemma4_text"}
    check(config | {"model_type": "gemma4", "text_config": text})


def test_every_activation_has_its_function() -> None:
    assert set(get_args(Activation)) == set(ACTIVATIONS)
