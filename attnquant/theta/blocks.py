"""Which layers share a block.

Only layers can whose projections all have equal shapes. Blocks are dealt out among the kinds of
layers so that the largest group is as small as it can be: every kind has one, and each further
block goes to the kind that has most layers to a block. Within a kind the layers stay in order, and
groups differ in size by one at most, the larger first.

So of Gemma 4's 60 layers, 50 sliding and 10 full, 12 blocks are 10 and 2: five layers in each
group, and a sliding layer never shares with a full one. The groups are the same for every role, so
that the roles that one matmul serves always have a common block.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

from attnquant.errors import SettingsError
from attnquant.projections import ProjectionKey

Shape = tuple[int, int]


def layer_kinds(shapes: Mapping[ProjectionKey, Shape]) -> list[Hashable]:
    """What must be equal for layers to share: each layer's roles and their shapes."""
    kinds: list[list[tuple[str, Shape]]] = [[] for _ in range(1 + max(key.layer for key in shapes))]
    for key, shape in sorted(shapes.items()):
        kinds[key.layer].append((key.role, shape))
    return [tuple(kind) for kind in kinds]


def block_groups(kinds: Sequence[Hashable], blocks: int) -> tuple[tuple[int, ...], ...]:
    """Splits a decoder's layers into groups that share one block each.

    Args:
        kinds: of each layer; layers of equal kind can share.
        blocks: how many groups to make.

    Returns:
        The layers of each group, ascending, and the groups in the order of their first layers.

    Raises:
        SettingsError: there are more blocks than layers, or fewer than kinds.
    """
    layers_of: dict[Hashable, list[int]] = {}
    for layer, kind in enumerate(kinds):
        layers_of.setdefault(kind, []).append(layer)
    fewest, most = max(1, len(layers_of)), len(kinds)
    if not fewest <= blocks <= most:
        reason = f"; layers of {fewest} shapes cannot share one block" if fewest > 1 else ""
        raise SettingsError(
            f"ATTNQUANT_BLOCKS={blocks} is not a whole number from {fewest} to {most}, "
            f"the number of layers{reason}"
        )
    groups_of = dict.fromkeys(layers_of, 1)
    for _ in range(blocks - len(layers_of)):
        fullest = max(layers_of, key=lambda kind: len(layers_of[kind]) / groups_of[kind])
        groups_of[fullest] += 1
    return tuple(
        sorted(
            group for kind, layers in layers_of.items() for group in _cut(layers, groups_of[kind])
        )
    )


def _cut(layers: Sequence[int], groups: int) -> list[tuple[int, ...]]:
    size, larger = divmod(len(layers), groups)
    ends = [size * group + min(group, larger) for group in range(groups + 1)]
    return [tuple(layers[start:end]) for start, end in pairwise(ends)]
