"""The decomposition of a whole decoder, one block group of one role after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from numpy.typing import NDArray
from tqdm import tqdm

from attnquant.projections import ROLES, ProjectionKey
from attnquant.theta.blocks import Shape, block_groups, layer_kinds
from attnquant.theta.bundle import ThetaBundle
from attnquant.theta.decompose import decompose, stored_dtype


def decompose_decoder(
    shapes: Mapping[ProjectionKey, Shape],
    load: Callable[[ProjectionKey], NDArray[Any]],
    *,
    blocks: int,
    rank: int,
) -> Iterator[dict[ProjectionKey, ThetaBundle]]:
    """Makes every bundle of a decoder.

    Args:
        shapes: `(out, in)` of each projection.
        load: gives a projection's weight. It is asked for a group's weights when the group is due
            and they are let go after it, so that one group is in memory at a time.
        blocks: shared blocks of each role; the number of layers is passthrough.
        rank: of the corrections.

    Returns:
        An iterator over block groups in order, role by role. W0, U and V have the dtype of the
        group's weights, or float32 if those differ. A bar on a terminal shows how many weights are
        done.

    Raises:
        SettingsError: `blocks` is impossible, at once and before any weight is loaded.
        CheckpointError: a weight holds a NaN or an infinity; names it.
    """
    groups = block_keys(shapes, blocks)
    return _decompose(groups, load, rank)


def block_keys(shapes: Mapping[ProjectionKey, Shape], blocks: int) -> list[list[ProjectionKey]]:
    """The projections that share a block, group by group and role by role.

    Raises:
        SettingsError: `blocks` is impossible.
    """
    return [
        [ProjectionKey(layer=layer, role=role) for layer in group]
        for group in block_groups(layer_kinds(shapes), blocks)
        for role in ROLES
        if ProjectionKey(layer=group[0], role=role) in shapes
    ]


def _decompose(
    groups: list[list[ProjectionKey]], load: Callable[[ProjectionKey], NDArray[Any]], rank: int
) -> Iterator[dict[ProjectionKey, ThetaBundle]]:
    # At passthrough there is nothing to wait for.
    shared = any(len(group) > 1 for group in groups)
    disable = None if shared else True
    with tqdm(total=sum(map(len, groups)), desc="theta", unit="weight", disable=disable) as bar:
        for group in groups:
            names = [f"{key.module}.weight" for key in group]
            yield dict(zip(group, _made([load(key) for key in group], rank, names), strict=True))
            bar.update(len(group))


def _made(weights: list[NDArray[Any]], rank: int, names: list[str]) -> list[ThetaBundle]:
    return decompose(weights, rank, names, stored_dtype([weight.dtype for weight in weights]))
