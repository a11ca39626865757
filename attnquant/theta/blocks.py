"""Which layers share a block.

Only layers of equal shape can. The blocks of a role are dealt out among its shapes so that the
largest group is as small as it can be: every shape has one, and each further block goes to the
shape that has most layers to a block. Within a shape the layers stay in order, and groups differ
in size by one at most, the larger first.

So of Gemma 4's 60 layers, 50 sliding and 10 full, 12 blocks are 10 and 2: five layers in each
group, and a sliding layer never shares with a full one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import SettingsError
from attnquant.projections import ROLES
from attnquant.settings import Settings

Shape = tuple[int, int]


def blocks_of(settings: Settings, shapes: DecoderShapes, packed: Collection[str]) -> int:
    """How many blocks each role gets; as many as there are layers is passthrough.

    Args:
        settings: what the user asked for.
        shapes: of the decoder.
        packed: module paths below the decoder of what the checkpoint holds in NVFP4.

    Raises:
        SettingsError: the settings contradict each other, the decoder or the checkpoint.
    """
    layers = len(shapes.layers)
    blocks = layers if settings.blocks is None else settings.blocks
    if blocks == layers:
        if settings.rank:
            raise SettingsError(
                f"ATTNQUANT_RANK={settings.rank} corrects shared blocks, and with ATTNQUANT_BLOCKS="
                f"{blocks}, a block for each layer, none is shared; set fewer blocks or unset it"
            )
        return blocks
    for role in ROLES:
        block_groups([layer.projections.get(role) for layer in shapes.layers], blocks)
    if any(key.module in packed for key in shapes.projections):
        raise SettingsError(
            f"ATTNQUANT_BLOCKS={blocks}: the checkpoint holds projections in NVFP4, which keep "
            f"their bits; set it to {layers}, the number of layers, or unset it"
        )
    if not settings.precompute_outside:
        raise SettingsError(
            f"ATTNQUANT_PRECOMPUTE_OUTSIDE=0 with ATTNQUANT_BLOCKS={blocks} is not served: below "
            "passthrough weights are rebuilt on the host; set it to 1 or unset it"
        )
    return blocks


def block_groups(
    shapes_by_layer: Sequence[Shape | None], blocks: int
) -> tuple[tuple[int, ...], ...]:
    """Splits the layers that have a role into groups that share one block each.

    Args:
        shapes_by_layer: `(out, in)` of the role in each layer; None where a layer lacks it.
        blocks: how many groups to make. Where fewer layers than that have the role, each of them
            is a group of its own.

    Returns:
        The layers of each group, ascending, and the groups in the order of their first layers.

    Raises:
        SettingsError: there are more blocks than layers, or fewer than shapes.
    """
    layers_of: dict[Shape, list[int]] = {}
    for layer, shape in enumerate(shapes_by_layer):
        if shape is not None:
            layers_of.setdefault(shape, []).append(layer)
    fewest, most = max(1, len(layers_of)), len(shapes_by_layer)
    if not fewest <= blocks <= most:
        reason = f"; layers of {fewest} shapes cannot share one block" if fewest > 1 else ""
        raise SettingsError(
            f"ATTNQUANT_BLOCKS={blocks} is not a whole number from {fewest} to {most}, "
            f"the number of layers{reason}"
        )
    groups_of = dict.fromkeys(layers_of, 1)
    having = sum(map(len, layers_of.values()))
    for _ in range(min(blocks, having) - len(layers_of)):
        fullest = max(layers_of, key=lambda shape: len(layers_of[shape]) / groups_of[shape])
        groups_of[fullest] += 1
    return tuple(
        sorted(
            group for shape, layers in layers_of.items() for group in _cut(layers, groups_of[shape])
        )
    )


def _cut(layers: Sequence[int], groups: int) -> list[tuple[int, ...]]:
    size, larger = divmod(len(layers), groups)
    ends = [size * group + min(group, larger) for group in range(groups + 1)]
    return [tuple(layers[start:end]) for start, end in pairwise(ends)]
