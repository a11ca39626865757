"""Which layers share a block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.errors import SettingsError
from attnquant.theta import block_groups

A, B, C = (8, 4), (16, 4), (8, 8)

# Gemma 4 31B: five sliding layers, then a full one, ten times over.
SLIDING_AND_FULL = ([A] * 5 + [B]) * 10
WITHOUT_FULL: list[tuple[int, int] | None] = ([A] * 5 + [None]) * 10

shape_lists = st.lists(st.sampled_from([A, B, C, None]), min_size=1, max_size=40)


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


def test_a_layer_without_the_role_is_in_no_group():
    groups = block_groups(WITHOUT_FULL, 5)
    assert [len(group) for group in groups] == [10] * 5
    assert 5 not in {layer for group in groups for layer in group}


def test_as_many_blocks_as_layers_is_passthrough_for_every_role():
    for shapes in (SLIDING_AND_FULL, WITHOUT_FULL):
        having = [layer for layer, shape in enumerate(shapes) if shape is not None]
        assert block_groups(shapes, 60) == tuple((layer,) for layer in having)


@pytest.mark.parametrize(
    ("shapes", "blocks", "allowed"),
    [
        ([A] * 18, 19, "from 1 to 18, the number of layers"),
        ([A] * 18, 0, "from 1 to 18, the number of layers"),
        ([A] * 18, -1, "from 1 to 18, the number of layers"),
        (
            SLIDING_AND_FULL,
            1,
            "from 2 to 60, the number of layers; layers of 2 shapes cannot share one block",
        ),
        (WITHOUT_FULL, 61, "from 1 to 60, the number of layers"),
    ],
)
def test_an_impossible_number_says_what_is_allowed(shapes: list, blocks: int, allowed: str):
    with pytest.raises(SettingsError) as caught:
        block_groups(shapes, blocks)
    assert str(caught.value) == f"ATTNQUANT_BLOCKS={blocks} is not a whole number {allowed}"


@given(shape_lists, st.integers(-1, 45))
def test_groups_of_any_decoder(shapes: list[tuple[int, int] | None], blocks: int):
    distinct = {shape for shape in shapes if shape is not None}
    if not max(1, len(distinct)) <= blocks <= len(shapes):
        with pytest.raises(SettingsError):
            block_groups(shapes, blocks)
        return
    groups = block_groups(shapes, blocks)
    having = [layer for layer, shape in enumerate(shapes) if shape is not None]
    assert sorted(layer for group in groups for layer in group) == having
    assert len(groups) == min(blocks, len(having))
    assert list(groups) == sorted(groups)
    for shape in distinct:
        own = [group for group in groups if shapes[group[0]] == shape]
        assert [layer for group in own for layer in group] == [
            layer for layer in having if shapes[layer] == shape
        ]
        sizes = [len(group) for group in own]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(shape_lists, st.integers(1, 40))
def test_the_largest_group_is_as_small_as_it_can_be(
    shapes: list[tuple[int, int] | None], blocks: int
):
    counts = [shapes.count(shape) for shape in (A, B, C) if shape in shapes]
    if not max(1, len(counts)) <= blocks <= len(shapes) or not counts:
        return
    largest = max(len(group) for group in block_groups(shapes, blocks))
    # With groups of at most `size` layers, this many blocks are needed.
    needed = {size: sum(-(-count // size) for count in counts) for size in range(1, 41)}
    assert largest == min(size for size, least in needed.items() if least <= blocks)
