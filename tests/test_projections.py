"""Projections: names parse and print both ways, and nothing that is not one passes for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.projections import (
    BLOCK_OF_ROLE,
    FUSED_ROLES,
    PREFIXES,
    ROLES,
    ProjectionKey,
    fused_groups,
    group_module,
    parse_projection,
    strip_prefix,
)

keys = st.builds(ProjectionKey, layer=st.integers(0, 999), role=st.sampled_from(ROLES))


@given(keys, st.sampled_from(PREFIXES), st.sampled_from(["", ".weight"]))
def test_a_printed_name_parses_to_its_key(key: ProjectionKey, prefix: str, suffix: str):
    assert parse_projection(prefix + key.module + suffix) == key


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.q_proj",
        "model.layers.3.self_attn.up_proj.weight",
        "model.layers.3.self_attn.q_proj.bias",
        "model.layers.3.self_attn.q_proj.weight.weight",
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.3.self_attn.x_proj",
        "model.layers.x.self_attn.q_proj",
        "model.layers.3.self_attn.q_proj.weight_scale",
        "vision_tower.layers.3.self_attn.q_proj",
        "layers.3.self_attn.q_proj ",
        "lm_head.weight",
        "",
    ],
)
def test_what_is_no_projection(name: str):
    assert parse_projection(name) is None


def test_a_key_prints_as_the_decoder_names_it():
    key = ProjectionKey(layer=3, role="q_proj")
    assert key.module == "layers.3.self_attn.q_proj"
    assert ProjectionKey(layer=11, role="down_proj").module == "layers.11.mlp.down_proj"


def test_keys_sort_by_layer_first():
    first, second = (ProjectionKey(layer=n, role=r) for n, r in [(2, "v_proj"), (10, "down_proj")])
    assert sorted([second, first]) == [first, second]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    "rest",
    ["layers.0.input_layernorm.weight", "embed_tokens.weight", "norm.weight"],
)
def test_every_prefix_is_stripped(prefix: str, rest: str):
    assert strip_prefix(prefix + rest) == rest


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.vision_tower.layers.0.x", "normal.weight", "model.layer.0"]
)
def test_other_names_are_kept(name: str):
    assert strip_prefix(name) == name


@given(keys, st.sampled_from(PREFIXES))
def test_stripping_and_parsing_agree(key: ProjectionKey, prefix: str):
    name = f"{prefix}{key.module}.weight"
    assert strip_prefix(name) == f"{key.module}.weight"


@given(st.sets(st.sampled_from(ROLES)))
def test_fused_groups_hold_each_role_once_and_in_order(roles: set[str]):
    present = tuple(role for role in ROLES if role in roles)
    groups = fused_groups(present)
    assert tuple(role for group in groups for role in group) == present
    assert all(groups)
    assert all(len({BLOCK_OF_ROLE[role] for role in group}) == 1 for group in groups)


def test_fused_groups_of_gemma():
    assert fused_groups(ROLES) == FUSED_ROLES
    without_values = tuple(role for role in ROLES if role != "v_proj")
    assert fused_groups(without_values)[0] == ("q_proj", "k_proj")


def test_group_modules_of_a_layer_are_distinct():
    assert [group_module(4, group) for group in FUSED_ROLES] == [
        "layers.4.self_attn.qkv_proj",
        "layers.4.self_attn.o_proj",
        "layers.4.mlp.gate_up_proj",
        "layers.4.mlp.down_proj",
    ]
    assert group_module(4, ("q_proj", "k_proj")) == "layers.4.self_attn.qk_proj"
