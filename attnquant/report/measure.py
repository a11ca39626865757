"""Size and relative error of theta bundles against blocks and rank.

Every block group is decomposed once for each number of blocks, at the largest rank; the bundles of
smaller ranks are its first columns. The error is measured on what would be stored, `|W - W_eff|` in
Frobenius norm, and the size is that of the tensors that `export` writes. One block group of one
role is in memory at a time, and nothing runs on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.checkpoint.export import dense_weights
from attnquant.checkpoint.safetensors import DTYPE_NAMES
from attnquant.checkpoint.theta_layout import bundle_specs
from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import SettingsError
from attnquant.projections import ROLES, ProjectionKey, Role
from attnquant.theta import ThetaBundle, block_keys, layer_kinds
from attnquant.theta.decompose import decompose, stored_dtype

RANKS = (0, 16, 32, 64)

# The default numbers of blocks: this many layers to a block.
_LAYERS_TO_A_BLOCK = (2, 3, 6)

Squares = tuple[float, float]
"""Squared norms: of the difference, and of the weight."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One number of blocks and one rank.

    Attributes:
        blocks: shared blocks of each role.
        rank: of the corrections.
        nbytes: of all projections' bundles.
        squares: of each projection.
    """

    blocks: int
    rank: int
    nbytes: int
    squares: Mapping[ProjectionKey, Squares]

    @property
    def error(self) -> float:
        """Relative error of all projections together."""
        return _relative(self.squares.values())

    def of_role(self, role: Role) -> float:
        """Relative error of a role's projections together."""
        return _relative(pair for key, pair in self.squares.items() if key.role == role)

    def of_layer(self, layer: int) -> float:
        """Relative error of a layer's projections together."""
        return _relative(pair for key, pair in self.squares.items() if key.layer == layer)

    def of(self, key: ProjectionKey) -> float:
        """Relative error of one projection."""
        return _relative([self.squares[key]])


@dataclass(frozen=True, kw_only=True)
class Report:
    """What sharing blocks would cost a model.

    Attributes:
        model: as the user named it.
        shapes: of the decoder.
        projection_bytes: of the checkpoint's projections.
        other_bytes: of its other tensors, which every export keeps.
        points: by blocks, descending, and rank, ascending.
    """

    model: str
    shapes: DecoderShapes
    projection_bytes: int
    other_bytes: int
    points: Sequence[Point]

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that the decoder has."""
        return tuple(role for role in ROLES if any(k.role == role for k in self.shapes.projections))

    def ratio(self, point: Point) -> float:
        """The bundles' bytes over the projections'."""
        return point.nbytes / self.projection_bytes


def measure(
    model: str | os.PathLike[str],
    *,
    blocks: Sequence[int] | None = None,
    ranks: Sequence[int] = RANKS,
    progress: Callable[[int], object] = lambda _: None,
) -> Report:
    """Measures a dense checkpoint of a supported decoder.

    Args:
        model: its directory.
        blocks: numbers of shared blocks; by default two, three and six layers to a block.
        ranks: of the corrections.
        progress: told the bytes of the weights that are done, of `len(blocks)` times all.

    Raises:
        CheckpointError: the checkpoint cannot be used, or is no dense one; a weight is NaN or
            infinite.
        SettingsError: a number of blocks is impossible.
        UnsupportedError: attnquant does not serve this architecture.
    """
    checkpoint = Checkpoint.open(model)
    shapes = DecoderShapes.from_config(checkpoint.config)
    stored = dense_weights(checkpoint, shapes)
    projections = shapes.projections
    names = {key: stored[key.module].names[0] for key in projections}
    asked = sorted(set(blocks or default_blocks(shapes)), reverse=True)
    groups_of = {count: block_keys(projections, count) for count in asked}
    if not ranks or min(ranks) < 0:
        raise SettingsError(f"--ranks {list(ranks)}: expected whole numbers, 0 or more")
    ordered = sorted(set(ranks))
    points = []
    for count, groups in groups_of.items():
        squares: list[dict[ProjectionKey, Squares]] = [{} for _ in ordered]
        sizes = [0] * len(ordered)
        for keys in groups:
            weights = [checkpoint.array(names[key]) for key in keys]
            dtype = stored_dtype([weight.dtype for weight in weights])
            bundles = decompose(weights, ordered[-1], [names[key] for key in keys], dtype)
            for index, rank in enumerate(ordered):
                specs = bundle_specs(
                    [str(key.layer) for key in keys],
                    projections[keys[0]],
                    rank,
                    DTYPE_NAMES[dtype],
                    packed=False,
                )
                shared = sum(spec.nbytes for spec in specs.values())
                sizes[index] += shared if len(keys) > 1 else weights[0].nbytes
            for key, weight, bundle in zip(keys, weights, bundles, strict=True):
                for index, pair in enumerate(_squares(weight, bundle, ordered)):
                    squares[index][key] = pair
                progress(weight.nbytes)
                checkpoint.release(names[key])
        points += [
            Point(blocks=count, rank=rank, nbytes=size, squares=pairs)
            for rank, size, pairs in zip(ordered, sizes, squares, strict=True)
        ]
    size = sum(checkpoint.info(name).nbytes for name in names.values())
    return Report(
        model=os.fspath(model),
        shapes=shapes,
        projection_bytes=size,
        other_bytes=sum(info.nbytes for info in checkpoint.tensors.values()) - size,
        points=points,
    )


def default_blocks(shapes: DecoderShapes) -> list[int]:
    """Two, three and six layers to a block, as far as a decoder has so many layers."""
    layers, fewest = len(shapes.layers), len(set(layer_kinds(shapes.projections)))
    return sorted({max(fewest, layers // size) for size in _LAYERS_TO_A_BLOCK}, reverse=True)


def _squares(weight: NDArray[Any], bundle: ThetaBundle, ranks: Sequence[int]) -> list[Squares]:
    """Those of a projection at each rank, ascending."""
    total = _square(weight.astype(np.float32))
    if bundle.s is None:
        return [(0.0, total)] * len(ranks)
    left = weight.astype(np.float32)
    left -= bundle.s[:, None] * bundle.w0.astype(np.float32)
    found = []
    done = 0
    for rank in ranks:
        columns = slice(done, rank)
        left -= bundle.u[:, columns].astype(np.float32) @ bundle.v[:, columns].T.astype(np.float32)
        done = rank
        found.append((_square(left), total))
    return found


def _square(values: NDArray[Any]) -> float:
    return float(np.vdot(values, values))


def _relative(squares: Iterable[Squares]) -> float:
    wrong, total = (sum(column) for column in zip(*squares, strict=True))
    return sqrt(wrong / total) if total else 0.0
