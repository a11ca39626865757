"""Coverage: what patterns match, how groups split, and what checkpoints declare."""

from __future__ import annotations

import time
from typing import Any

import pytest

from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import CheckpointError, SettingsError, UnsupportedError
from attnquant.nvfp4.coverage import IGNORED, Coverage, Group, declared_ignore
from attnquant.projections import BLOCK_OF_ROLE, ROLES, ProjectionKey, Role
from tests.configs import gemma3_270m, gemma4_31b

SHAPES = DecoderShapes.from_config(gemma3_270m()).projections


def left(*patterns: str, **keywords: Any) -> set[str]:
    coverage = Coverage.of(SHAPES, ignore=patterns, **keywords)
    return {key.module for key in SHAPES if not coverage.is_quantized(key)}


def modules(*, layers: range = range(18), roles: tuple[str, ...] = ROLES) -> set[str]:
    return {
        ProjectionKey(layer=layer, role=role).module
        for layer in layers
        for role in ROLES
        if role in roles
    }


ATTENTION = tuple(role for role in ROLES if BLOCK_OF_ROLE[role] == "self_attn")
MLP = tuple(role for role in ROLES if BLOCK_OF_ROLE[role] == "mlp")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("self_attn", modules(roles=ATTENTION)),
        ("mlp", modules(roles=MLP)),
        ("o_proj", modules(roles=("o_proj",))),
        ("*attn*", modules(roles=ATTENTION)),
        ("[qk]_proj", modules(roles=("q_proj", "k_proj"))),
        ("mlp.down_proj", modules(roles=("down_proj",))),
        ("layers.*.mlp.down_proj", modules(roles=("down_proj",))),
        ("model.layers.*.mlp.down_proj", modules(roles=("down_proj",))),
        ("model.language_model.layers.*.mlp.down_proj", modules(roles=("down_proj",))),
        ("layers.1", modules(layers=range(1, 2))),
        ("layers.1.*", modules(layers=range(1, 2))),
        ("model.layers.0.*", modules(layers=range(1))),
        ("layers.1*", modules(layers=range(1, 2)) | modules(layers=range(10, 18))),
        ("layers.1?", modules(layers=range(10, 18))),
        (
            "language_model.model.layers.17.self_attn*",
            modules(layers=range(17, 18), roles=ATTENTION),
        ),
        ("model.layers.2.mlp.up_proj", {"layers.2.mlp.up_proj"}),
        ("*", modules()),
        (r"re:.*layers\.1\.mlp.*", modules(layers=range(1, 2), roles=MLP)),
        ("lm_head", set()),
    ],
)
def test_pattern(pattern: str, expected: set[str]) -> None:
    assert left(pattern) == expected


def test_patterns_add_up() -> None:
    assert left("layers.0", "o_proj") == modules(layers=range(1)) | modules(roles=("o_proj",))
    assert left() == set()


@pytest.mark.parametrize(
    "pattern",
    [
        "q_porj",
        "layers.18",
        "attn",
        "proj",
        "layers.0.mlp.q_proj",
        "vision_tower.*",
        "norm",
        "re:x",
    ],
)
def test_pattern_that_matches_nothing(pattern: str) -> None:
    with pytest.raises(SettingsError) as raised:
        left("o_proj", pattern)
    message = str(raised.value)
    assert message.startswith(f"ATTNQUANT_QUANT_IGNORE: '{pattern}' matches no projection")
    assert "self_attn" in message
    assert "down_proj" in message
    assert "layers.17" in message
    assert len(message) < 200
    # A checkpoint's own list also names towers and norms.
    assert left("o_proj", pattern, source=None) == modules(roles=("o_proj",))


def test_bad_regular_expression() -> None:
    with pytest.raises(SettingsError, match=r"'re:\[' is not a regular expression"):
        left("re:[")
    with pytest.raises(CheckpointError, match=r"'re:\[' is not a regular expression"):
        left("re:[", source=None)


def test_columns_must_be_whole_blocks() -> None:
    odd = ProjectionKey(layer=3, role="o_proj")
    coverage = Coverage.of(SHAPES | {odd: (640, 1000)}, ignore=("layers.0",))
    assert not coverage.is_quantized(odd)
    assert coverage.reasons[odd] == "in = 1000 is not a multiple of 16"
    assert coverage.reasons[ProjectionKey(layer=0, role="o_proj")] == IGNORED
    assert len(coverage.quantized) == 126 - 1 - 7


def test_unknown_projection_is_an_error() -> None:
    with pytest.raises(KeyError):
        Coverage.of(SHAPES).is_quantized(ProjectionKey(layer=18, role="q_proj"))


def test_none() -> None:
    coverage = Coverage.none(SHAPES)
    assert coverage.quantized == ()
    assert all(not group.quantized for group in coverage.groups(0))
    assert not coverage.lm_head


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, False),
        ({"head": (262144, 640)}, True),
        ({"head": (262144, 641)}, False),
        ({"head": (262144, 640), "ignore": ("lm_head",)}, False),
        ({"head": (262144, 640), "ignore": ("*",)}, False),
        ({"head": (262144, 640), "ignore": ("mlp",)}, True),
    ],
)
def test_lm_head(keywords: dict[str, Any], expected: bool) -> None:
    assert Coverage.of(SHAPES, **keywords).lm_head is expected


def group(*roles: Role, quantized: bool) -> Group:
    return Group(roles=roles, quantized=quantized)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (
            (),
            (
                group("q_proj", "k_proj", "v_proj", quantized=True),
                group("o_proj", quantized=True),
                group("gate_proj", "up_proj", quantized=True),
                group("down_proj", quantized=True),
            ),
        ),
        (
            ("self_attn",),
            (
                group("q_proj", "k_proj", "v_proj", quantized=False),
                group("o_proj", quantized=False),
                group("gate_proj", "up_proj", quantized=True),
                group("down_proj", quantized=True),
            ),
        ),
        (
            ("v_proj", "layers.0.mlp.gate_proj"),
            (
                group("q_proj", quantized=True),
                group("k_proj", quantized=True),
                group("v_proj", quantized=False),
                group("o_proj", quantized=True),
                group("gate_proj", quantized=False),
                group("up_proj", quantized=True),
                group("down_proj", quantized=True),
            ),
        ),
    ],
)
def test_groups(patterns: tuple[str, ...], expected: tuple[Group, ...]) -> None:
    assert Coverage.of(SHAPES, ignore=patterns).groups(0) == expected


def test_groups_without_v_proj() -> None:
    shapes = DecoderShapes.from_config(gemma4_31b()).projections
    assert Coverage.of(shapes).groups(5)[0] == group("q_proj", "k_proj", quantized=True)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


@pytest.mark.parametrize(
    ("config", "separate", "expected"),
    [
        ({}, None, None),
        ({"quantization_config": None}, None, None),
        ({"quantization_config": MODELOPT}, None, ()),
        ({"quantization_config": MODELOPT | {"ignore": ["lm_head"]}}, None, ("lm_head",)),
        ({"quantization_config": MODELOPT | {"exclude_modules": ["a"]}}, None, ("a",)),
        ({"quantization_config": MODELOPT | {"ignored_layers": ["a"]}}, None, ("a",)),
        ({"quantization_config": COMPRESSED | {"ignore": ["re:.*attn"]}}, None, ("re:.*attn",)),
        ({}, {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["b"]}}, ("b",)),
        (
            {"quantization_config": MODELOPT | {"ignore": ["a"]}},
            {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["b"]}},
            ("a",),
        ),
    ],
)
def test_declared_ignore(config: Any, separate: Any, expected: Any) -> None:
    assert declared_ignore(config, separate) == expected


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, UnsupportedError, "says gptq, unnamed"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, UnsupportedError, "modelopt, FP8"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            UnsupportedError,
            "compressed-tensors, pack-quantized",
        ),
        (MODELOPT | {"ignore": "lm_head"}, CheckpointError, "ignore is 'lm_head'"),
        (MODELOPT | {"ignore": [1]}, CheckpointError, r"ignore is \[1\]"),
        ("nvfp4", CheckpointError, "quantization_config is 'nvfp4'"),
    ],
)
def test_declared_ignore_refuses(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        declared_ignore({"quantization_config": config})


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["re:(a|a|[a-z._0-9]+)+$!"], "could be matched for ever"),
        (["re:.*.*.*.*!"], "could be matched for ever"),
        (["re:(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)!"], "could be matched for ever"),
        (["re:(?=a)(x)\\1"], "could be matched for ever"),
        ([f"*a*b*c*d*{number}" for number in range(9000)], "9000 patterns that take too long"),
        (["re:a{9999999999}"], "is not a regular expression"),
        (["re:" + "(" * 5000 + ")" * 5000], "is not a regular expression"),
    ],
    ids=["nested", "repeated", "choices", "reference", "many", "overflow", "deep"],
)
def test_hostile_lists_are_refused_in_time(patterns: list[str], words: str) -> None:
    start = time.process_time()
    with pytest.raises(CheckpointError, match=words) as caught:
        left(*patterns, source=None)
    assert time.process_time() - start < 2
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "pattern",
    [r"re:.*(lm_head|vision_tower|router)\..*", r"re:.*layers\.\d+\.self_attn.*", "re:[[a]!"],
)
def test_what_real_lists_hold_is_taken(pattern: str, recwarn: pytest.WarningsRecorder) -> None:
    left(pattern, source=None)
    assert not recwarn.list
