"""A whole decoder: each weight once, a group at a time, and settings checked before weights."""

from __future__ import annotations

import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attnquant.errors import CheckpointError, SettingsError
from attnquant.projections import ROLES, ProjectionKey
from attnquant.theta import decompose_decoder, effective_weight


def decoder(layers: int = 4) -> dict[ProjectionKey, tuple[int, int]]:
    """Like Gemma 4: every other layer has wider queries, and no values of its own."""
    return {
        ProjectionKey(layer=layer, role=role): (16 if role == "q_proj" and layer % 2 else 8, 6)
        for layer in range(layers)
        for role in ROLES
        if not (role == "v_proj" and layer % 2)
    }


def weight_of(shapes: dict[ProjectionKey, tuple[int, int]], key: ProjectionKey) -> NDArray[Any]:
    rng = np.random.default_rng(key.layer * 10 + ROLES.index(key.role))
    return rng.standard_normal(shapes[key], np.float32)


def test_every_weight_is_loaded_once_and_rebuilt():
    shapes = decoder()
    loaded = []

    def load(key: ProjectionKey) -> NDArray[Any]:
        loaded.append(key)
        return weight_of(shapes, key)

    bundles = {}
    for group in decompose_decoder(shapes, load, blocks=2, rank=6):
        bundles |= group
    assert sorted(loaded) == sorted(shapes) == sorted(bundles)
    for key, bundle in bundles.items():
        weight = weight_of(shapes, key)
        assert np.linalg.norm(effective_weight(bundle) - weight) < 1e-6 * np.linalg.norm(weight)


def test_groups_come_role_by_role_and_share_within():
    groups = list(
        decompose_decoder(decoder(), lambda key: weight_of(decoder(), key), blocks=2, rank=1)
    )
    without_values = [role for role in ROLES if role != "v_proj"]
    assert [next(iter(group)).role for group in groups] == [*ROLES, *without_values]
    layers = [[key.layer for key in group] for group in groups]
    assert layers == [[0, 2]] * len(ROLES) + [[1, 3]] * len(without_values)
    assert all(len({id(bundle.w0) for bundle in group.values()}) == 1 for group in groups)


def test_bundles_are_stored_in_their_weights_dtype():
    shapes = {ProjectionKey(layer=layer, role="o_proj"): (40, 30) for layer in range(4)}
    stored = {key: ml_dtypes.bfloat16 if key.layer < 2 else np.float32 for key in shapes}
    stored[ProjectionKey(layer=3, role="o_proj")] = np.float16
    first, second = decompose_decoder(
        shapes, lambda key: weight_of(shapes, key).astype(stored[key]), blocks=2, rank=30
    )
    assert {bundle.w0.dtype for bundle in first.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert {bundle.w0.dtype for bundle in second.values()} == {np.dtype(np.float32)}
    for key, bundle in first.items():
        weight = weight_of(shapes, key)
        # Roundings of W0, V and U, each 2^-9 at most.
        assert np.linalg.norm(effective_weight(bundle) - weight) < 2**-7 * np.linalg.norm(weight)


def test_as_many_blocks_as_layers_is_the_checkpoint_itself():
    shapes = decoder()
    weights = {key: weight_of(shapes, key) for key in shapes}
    groups = list(decompose_decoder(shapes, weights.__getitem__, blocks=4, rank=3))
    assert len(groups) == len(shapes)
    for group in groups:
        for key, bundle in group.items():
            assert effective_weight(bundle) is weights[key]


def test_one_group_of_weights_is_held_at_a_time():
    shapes = {ProjectionKey(layer=layer, role="o_proj"): (8, 6) for layer in range(6)}
    loaded: list[weakref.ref[NDArray[Any]]] = []
    alive = []

    def load(key: ProjectionKey) -> NDArray[Any]:
        weight = weight_of(shapes, key)
        loaded.append(weakref.ref(weight))
        alive.append(sum(reference() is not None for reference in loaded))
        return weight

    assert len(list(decompose_decoder(shapes, load, blocks=3, rank=1))) == 3
    assert alive == [1, 2] * 3


def test_impossible_blocks_are_found_before_any_weight_is_loaded():
    def load(key: ProjectionKey) -> NDArray[Any]:
        raise AssertionError(key)

    with pytest.raises(SettingsError, match=r"ATTNQUANT_BLOCKS=1 .* from 2 to 4"):
        decompose_decoder(decoder(), load, blocks=1, rank=0)
    with pytest.raises(SettingsError, match=r"ATTNQUANT_BLOCKS=5 .* from 2 to 4"):
        decompose_decoder(decoder(), load, blocks=5, rank=0)


def test_a_damaged_weight_is_named():
    shapes = decoder()

    def load(key: ProjectionKey) -> NDArray[Any]:
        weight = weight_of(shapes, key)
        if key == ProjectionKey(layer=3, role="up_proj"):
            weight[0, 0] = np.nan
        return weight

    with pytest.raises(CheckpointError, match=r"^layers\.3\.mlp\.up_proj\.weight holds a NaN"):
        list(decompose_decoder(shapes, load, blocks=2, rank=1))
