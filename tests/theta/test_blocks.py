"""Which layers share a block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import SettingsError
from attnquant.theta import block_groups, layer_kinds
from tests.configs import gemma4_31b

A, B, C = (8, 4), (16, 4), (8, 8)

# Gemma 4 31B: five sliding layers, then a full one, ten times over.
SLIDING_AND_FULL = ([A] * 5 + [B]) * 10

kind_lists = st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("layers", "blocks", "sizes"),
    [(18, 18, [1] * 18), (18, 6, [3] * 6), (18, 1, [18]), (7, 3, [3, 2, 2]), (5, 4, [2, 1, 1, 1])],
)
def test_one_shape_is_cut_in_order(layers: int, blocks: int, sizes: list[int]):
    groups = block_groups([A] * layers, blocks)
    assert [len(group) for group in groups] == sizes
    assert [layer for group in groups for layer in group] == list(range(layers))


def test_two_shapes_never_share():
    groups = block_groups(SLIDING_AND_FULL, 12)
    assert len(groups) == 12
    assert [group for group in groups if len({SLIDING_AND_FULL[n] for n in group}) > 1] == []
    assert {len(group) for group in groups} == {5}
    assert (0, 1, 2, 3, 4) in groups and (5, 11, 17, 23, 29) in groups


def test_gemma_4s_layers_differ_by_attention_alone():
    kinds = layer_kinds(DecoderShapes.from_config(gemma4_31b()).projections)
    assert len(set(kinds)) == 2
    groups = block_groups(kinds, 12)
    # The full layers' keys are their values, so that every role has the groups of every other.
    assert (0, 1, 2, 3, 4) in groups and (5, 11, 17, 23, 29) in groups


def test_as_many_blocks_as_layers_is_passthrough():
    assert block_groups(SLIDING_AND_FULL, 60) == tuple((layer,) for layer in range(60))


@pytest.mark.parametrize(
    ("kinds", "blocks", "allowed"),
    [
        ([A] * 18, 19, "from 1 to 18, the number of layers"),
        ([A] * 18, 0, "from 1 to 18, the number of layers"),
        ([A] * 18, -1, "from 1 to 18, the number of layers"),
        (
            SLIDING_AND_FULL,
            1,
            "from 2 to 60, the number of layers; layers of 2 shapes cannot share one block",
        ),
        (
            SLIDING_AND_FULL,
            61,
            "from 2 to 60, the number of layers; layers of 2 shapes cannot share one block",
        ),
    ],
)
def test_an_impossible_number_says_what_is_allowed(kinds: list, blocks: int, allowed: str):
    with pytest.raises(SettingsError) as caught:
        block_groups(kinds, blocks)
    assert str(caught.value) == f"ATTNQUANT_BLOCKS={blocks} is not a whole number {allowed}"


@given(kind_lists, st.integers(-1, 45))
def test_groups_of_any_decoder(kinds: list[tuple[int, int]], blocks: int):
    if not len(set(kinds)) <= blocks <= len(kinds):
        with pytest.raises(SettingsError):
            block_groups(kinds, blocks)
        return
    groups = block_groups(kinds, blocks)
    assert sorted(layer for group in groups for layer in group) == list(range(len(kinds)))
    assert len(groups) == blocks
    assert list(groups) == sorted(groups)
    for kind in set(kinds):
        own = [group for group in groups if kinds[group[0]] == kind]
        assert [layer for group in own for layer in group] == [
            layer for layer, other in enumerate(kinds) if other == kind
        ]
        sizes = [len(group) for group in own]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(kind_lists, st.integers(1, 40))
def test_the_largest_group_is_as_small_as_it_can_be(kinds: list[tuple[int, int]], blocks: int):
    counts = [kinds.count(kind) for kind in set(kinds)]
    if not len(counts) <= blocks <= len(kinds):
        return
    largest = max(len(group) for group in block_groups(kinds, blocks))
    # With groups of at most `size` layers, this many blocks are needed.
    needed = {size: sum(-(-count // size) for count in counts) for size in range(1, 41)}
    assert largest == min(size for size, least in needed.items() if least <= blocks)
