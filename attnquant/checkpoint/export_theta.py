"""Writes a dense checkpoint again as theta bundles: shared blocks and low-rank corrections.

What is written is what decomposing at load makes, to the bit, so that both give the same logits.
With NVFP4 the shared blocks are quantized, each fused group's with one scale, as at load; scales
and corrections keep their dtypes. One block group is in memory at a time, of one role or, where
roles have a scale in common, of those.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnquant.checkpoint.checkpoint import CONFIG_FILE, Checkpoint
from attnquant.checkpoint.export import (
    Encode,
    ExportReport,
    copied,
    dense_weights,
    to_json,
    write_export,
)
from attnquant.checkpoint.nvfp4_layouts import StoredWeight, modelopt_specs, modelopt_tensors
from attnquant.checkpoint.safetensors import DTYPE_NAMES, TensorSpec
from attnquant.checkpoint.theta_layout import (
    SECTION,
    bundle_specs,
    bundle_tensors,
    theta_section,
)
from attnquant.checkpoint.writer import SHARD_BYTES, TensorGroup
from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import SettingsError
from attnquant.nvfp4.coverage import Coverage
from attnquant.nvfp4.reference import largest_magnitude
from attnquant.projections import ProjectionKey
from attnquant.settings import Quant, Settings
from attnquant.theta import HeldBundles, ThetaBundle, ThetaPlan, plan_of
from attnquant.theta.decompose import decompose, stored_dtype

Tensors = Iterator[tuple[str, NDArray[Any]]]


def export_theta(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    blocks: int,
    rank: int = 0,
    quant: Quant = "none",
    encode: Encode,
    largest_magnitude: Callable[..., float | np.float32] = largest_magnitude,
    recipe: Mapping[str, Any],
    ignore: Collection[str] = (),
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], object] = lambda _: None,
) -> ExportReport:
    """Decomposes a checkpoint of a supported decoder into a new directory.

    Args:
        source: a dense checkpoint's directory; it is only read.
        target: the new directory.
        blocks: shared blocks of each role, fewer than there are layers.
        rank: of the corrections.
        quant: whether blocks are quantized.
        encode: as in `export_nvfp4`.
        largest_magnitude: likewise.
        recipe: likewise, with what decides the encoder's output.
        ignore: patterns of projections whose blocks are not quantized.
        shard_bytes: the largest shard.
        progress: told the bytes of every tensor that is in place.

    Raises:
        CheckpointError: the source cannot be used, or is no dense checkpoint; the target exists or
            cannot be written; a weight is NaN or infinite.
        SettingsError: `blocks` or `rank` is impossible, or a pattern matches nothing.
        UnsupportedError: attnquant does not serve this architecture.
    """
    checkpoint = Checkpoint.open(source)
    shapes = DecoderShapes.from_config(checkpoint.config)
    stored = dense_weights(checkpoint, shapes)
    coverage = Coverage.none(shapes.projections)
    if quant == "nvfp4":
        coverage = Coverage.of(shapes.projections, ignore=ignore, source="--ignore")
    plan = _plan(shapes, coverage, blocks, rank)
    writer = _Bundles(checkpoint, stored, rank, encode, largest_magnitude)
    groups = list(_groups(checkpoint, _units(plan, coverage, shapes), writer))
    section = theta_section(
        HeldBundles(blocks=blocks, rank=rank, packed=quant == "nvfp4"),
        {"quant": quant, "quant_ignore": list(ignore)},
    )
    return write_export(
        checkpoint,
        target,
        groups,
        coverage=coverage,
        files={CONFIG_FILE: to_json({**checkpoint.config, SECTION: section})},
        recipe=recipe,
        shard_bytes=shard_bytes,
        progress=progress,
    )


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """Projections that are made together: the layers of a block group, times some roles."""

    keys: tuple[tuple[ProjectionKey, ...], ...]  # by role, then by layer
    quantized: bool


def _plan(shapes: DecoderShapes, coverage: Coverage, blocks: int, rank: int) -> ThetaPlan:
    settings = Settings(blocks=blocks, rank=rank, precompute_outside=False)
    try:
        plan = plan_of(settings, shapes, coverage)
    except SettingsError as error:
        # The same rules as at load, where variables say what options say here.
        text = str(error).replace("ATTNQUANT_BLOCKS=", "--blocks ")
        text = text.replace("ATTNQUANT_RANK=", "--rank ")
        raise SettingsError(text.replace("ATTNQUANT_QUANT_IGNORE", "--ignore")) from None
    if plan.path == "weights":
        raise SettingsError(
            f"--blocks {blocks} is a block for each layer, which is the checkpoint itself; give "
            "fewer"
        )
    return plan


def _units(plan: ThetaPlan, coverage: Coverage, shapes: DecoderShapes) -> Iterator[_Unit]:
    for layers in plan.groups:
        for group in coverage.groups(layers[0]):
            # Roles with a scale in common are made together, the others one by one.
            for roles in [group.roles] if group.quantized else [(role,) for role in group.roles]:
                keys = [
                    tuple(ProjectionKey(layer=layer, role=role) for layer in layers)
                    for role in roles
                ]
                yield _Unit(keys=tuple(keys), quantized=group.quantized)


def _groups(
    checkpoint: Checkpoint, units: Iterator[_Unit], writer: _Bundles
) -> Iterator[TensorGroup]:
    """The export's tensors in the order of the source's, each unit where its first member lay."""
    unit_of = {
        writer.stored[key.module].names[0]: unit
        for unit in units
        for keys in unit.keys
        for key in keys
    }
    done: set[int] = set()
    for name, info in checkpoint.tensors.items():
        unit = unit_of.get(name)
        if unit is None or (len(unit.keys[0]) == 1 and not unit.quantized):
            yield TensorGroup(specs={name: info}, make=partial(copied, checkpoint, name))
        elif id(unit) not in done:
            done.add(id(unit))
            yield writer.group(unit)


@dataclass(frozen=True)
class _Bundles:
    """Makes the tensors of units."""

    checkpoint: Checkpoint
    stored: Mapping[str, StoredWeight]
    rank: int
    encode: Encode
    largest_magnitude: Callable[..., float | np.float32]

    def group(self, unit: _Unit) -> TensorGroup:
        specs: dict[str, TensorSpec] = {}
        for keys in unit.keys:
            modules = [self.stored[key.module].module for key in keys]
            shape = self.stored[keys[0].module].shape
            if len(keys) == 1:
                specs |= modelopt_specs(modules[0], shape)
            else:
                dtype = DTYPE_NAMES[self._dtype(keys)]
                specs |= bundle_specs(modules, shape, self.rank, dtype, packed=unit.quantized)
        return TensorGroup(specs=specs, make=partial(self._make, unit))

    def _make(self, unit: _Unit) -> Tensors:
        made = [self._decomposed(keys) for keys in unit.keys]
        names = [self.stored[keys[0].module].names[0] for keys in unit.keys]
        amax = 0.0
        if unit.quantized:
            amax = max(
                float(self.largest_magnitude(bundles[0].w0, name=name))
                for bundles, name in zip(made, names, strict=True)
            )
        for keys, bundles, name in zip(unit.keys, made, names, strict=True):
            modules = [self.stored[key.module].module for key in keys]
            packed = None
            if unit.quantized:
                packed = self.encode(bundles[0].w0, amax=amax, name=name)
            if len(keys) > 1:
                yield from bundle_tensors(modules, bundles, packed)
            elif packed is not None:
                yield from modelopt_tensors(modules[0], packed)

    def _decomposed(self, keys: Sequence[ProjectionKey]) -> list[ThetaBundle]:
        names = [self.stored[key.module].names[0] for key in keys]
        weights = [self.checkpoint.array(name) for name in names]
        bundles = decompose(weights, self.rank, names, self._dtype(keys))
        if len(names) > 1:
            for name in names:
                self.checkpoint.release(name)
        return bundles

    def _dtype(self, keys: Sequence[ProjectionKey]) -> np.dtype[Any]:
        names = [self.stored[key.module].names[0] for key in keys]
        return stored_dtype([self.checkpoint.info(name).numpy_dtype for name in names])
