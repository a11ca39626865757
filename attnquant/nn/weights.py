"""From a checkpoint's tensors to the tensors that a decoder's graph binds.

Every decoder's weight adapter is this function with that decoder's configuration. Names lose their
checkpoint prefix, every projection becomes a theta bundle and its W_eff again, and each fused group
is stored in one of the ways that `attnquant.nn.projection` describes. At passthrough, where the
graph's dtype is the file's, that is the mapped file's own memory. What the checkpoint has in NVFP4
keeps its bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from max.driver import is_virtual_device_mode
from max.dtype import DType
from max.graph.weights import WeightData, Weights

from attnquant.checkpoint.nvfp4_layouts import LM_HEAD, StoredWeight
from attnquant.checkpoint.safetensors import DTYPE_NAMES, TensorSpec
from attnquant.checkpoint.verify import decoder_tensors
from attnquant.decoder_shapes import DecoderShapes
from attnquant.nn.quantize import Quantizer
from attnquant.nn.tensors import State, from_numpy, numpy_dtype, to_numpy
from attnquant.nvfp4.coverage import coverage_of
from attnquant.projections import ProjectionKey, Role, fused_groups, group_module
from attnquant.settings import Settings
from attnquant.theta import blocks_of, decompose_decoder, effective_weight


def decoder_weights(
    tensors: Mapping[str, Weights], *, config: Mapping[str, Any], dtype: DType, settings: Settings
) -> State:
    """Prepares a decoder's weights.

    Args:
        tensors: the checkpoint's tensors, by their names in the checkpoint.
        config: config.json, or the text config in it.
        dtype: the graph's dtype; unquantized tensors are converted to it.
        settings: blocks and quantization.

    Returns:
        The graph's tensors, by their names in the graph.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of the wrong shape or dtype.
        SettingsError: the settings do not fit this decoder.
    """
    shapes = DecoderShapes.from_config(config)
    data = {name: weights.data() for name, weights in tensors.items()}
    names, stored = decoder_tensors(_specs(data), shapes, config)
    packed = {path for path, weight in stored.items() if weight.is_nvfp4}
    coverage = coverage_of(settings, shapes, packed)
    rebuilt = _rebuild(data, stored, packed, shapes, dtype, settings)

    state: State = {}
    with Quantizer(coverage, shapes, settings.quant_scales, data) as quantizer:

        def group(module: str, parts: Mapping[ProjectionKey, StoredWeight]) -> State:
            """Packed, dense, or member by member where the coverage splits the group."""
            answers = {coverage.is_quantized(key) for key in parts}
            if answers == {True}:
                return quantizer.group(module, parts)
            if answers == {False}:
                weights = {key.role: data[part.names[0]] for key, part in parts.items()}
                return _dense(module, weights, dtype, rebuilt)
            split = [group(f"{module}.{key.role}", {key: part}) for key, part in parts.items()]
            return {name: tensor for member in split for name, tensor in member.items()}

        for layer, layer_shapes in enumerate(shapes.layers):
            for roles in fused_groups(tuple(layer_shapes.projections)):
                keys = [ProjectionKey(layer=layer, role=role) for role in roles]
                state |= group(
                    group_module(layer, roles), {key: stored[key.module] for key in keys}
                )
        head = StoredWeight(
            module="embed_tokens",
            shape=shapes.head,
            layout="dense",
            names=(names["embed_tokens.weight"],),
        )
        if not shapes.tied:
            head = stored[LM_HEAD]
        if coverage.lm_head:
            state |= quantizer.head(head)
        elif not shapes.tied:
            names["lm_head.weight"] = head.names[0]
    return state | {name: _converted([data[source]], dtype, name) for name, source in names.items()}


def _rebuild(
    data: dict[str, WeightData],
    stored: Mapping[str, StoredWeight],
    packed: Collection[str],
    shapes: DecoderShapes,
    dtype: DType,
    settings: Settings,
) -> bool:
    """Puts every projection's W_eff where its weight was; whether that made new arrays.

    At passthrough W_eff is the weight itself.
    """
    blocks = blocks_of(settings, shapes, packed)
    dense = {key: shape for key, shape in shapes.projections.items() if key.module not in packed}
    if not dense:
        return False
    names = {key: stored[key.module].names[0] for key in dense}
    bundles = decompose_decoder(
        dense, lambda key: to_numpy(data[names[key]]), blocks=blocks, rank=settings.rank
    )
    # Compiling for a device that is elsewhere needs the shapes only.
    for group in () if is_virtual_device_mode() else bundles:
        for key, bundle in group.items():
            if not bundle.is_passthrough:
                weight = effective_weight(bundle, numpy_dtype(dtype))
                data[names[key]] = from_numpy(weight, dtype, names[key])
    return blocks != len(shapes.layers)


def _specs(data: Mapping[str, WeightData]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(
            dtype=DTYPE_NAMES[numpy_dtype(weight.dtype)], shape=tuple(map(int, weight.shape))
        )
        for name, weight in data.items()
    }


def _dense(module: str, parts: Mapping[Role, WeightData], dtype: DType, rebuilt: bool) -> State:
    """The parts as they are, if they are the file's memory and stay it; else one stacked array."""
    as_stored = not rebuilt and all(part.dtype == dtype for part in parts.values())
    if len(parts) > 1 and as_stored:
        return {f"{module}.{role}.weight": part for role, part in parts.items()}
    name = f"{module}.weight"
    return {name: _converted(list(parts.values()), dtype, name)}


def _converted(parts: Sequence[WeightData], dtype: DType, name: str) -> WeightData:
    """The parts' rows in one array of the graph's dtype; a single part of that dtype is itself."""
    if len(parts) == 1 and parts[0].dtype == dtype:
        return parts[0]
    rows = [int(part.shape[0]) for part in parts]
    stacked = np.empty((sum(rows), *map(int, parts[0].shape[1:])), numpy_dtype(dtype))
    # Compiling for a device that is elsewhere needs the shapes only.
    if not is_virtual_device_mode():
        for part, end in zip(parts, np.cumsum(rows), strict=True):
            stacked[end - int(part.shape[0]) : end] = to_numpy(part)
    return from_numpy(stacked, dtype, name)
