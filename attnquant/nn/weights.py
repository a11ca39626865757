"""From a checkpoint's tensors to the tensors that a decoder's graph binds.

Every decoder's weight adapter is this function with that decoder's configuration. Names lose their
checkpoint prefix, every projection becomes a theta bundle and, on most paths, its W_eff again, and
each fused group is stored in one of the ways that `attnquant.nn.projection` describes. At
passthrough, where the graph's dtype is the file's, that is the mapped file's own memory. What the
checkpoint has in NVFP4 keeps its bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import is_virtual_device_mode
from max.dtype import DType
from max.graph.weights import WeightData, Weights
from max.pipelines.lib import PipelineConfig
from max.pipelines.modeling.config_enums import supported_encoding_dtype

from attnquant.checkpoint.nvfp4_layouts import LM_HEAD, StoredWeight
from attnquant.checkpoint.theta_layout import StoredBundle, held_bundles
from attnquant.checkpoint.verify import EMBEDDING, decoder_tensors
from attnquant.decoder_shapes import DecoderShapes
from attnquant.nn.bundles import bundle_at, bundles_of, corrections, keep, rebuild
from attnquant.nn.config import DecoderConfig, graph_encoding
from attnquant.nn.embedding import TABLES, table_dtype
from attnquant.nn.packed_cache import PackedCache
from attnquant.nn.profiled import LoadedDecoder
from attnquant.nn.quantize import Quantizer
from attnquant.nn.tensors import State, aligned, from_numpy, numpy_dtype, specs_of, to_numpy
from attnquant.nn.theta import block_module
from attnquant.nvfp4.coverage import coverage_of
from attnquant.nvfp4.profile import SEQUENCE_TOKENS, chosen_scales
from attnquant.projections import ProjectionKey, Role, fused_groups, group_module
from attnquant.settings import PREFIX, Settings
from attnquant.theta import Device, ThetaPlan, plan_of

_SHARED = (
    f"{PREFIX}QUANT_SCALES=profile needs each layer's own weight, and "
    f"{PREFIX}PRECOMPUTE_OUTSIDE=0 shares blocks in the graph; set one of them differently"
)


def decoder_weights(
    tensors: Mapping[str, Weights],
    *,
    config: Mapping[str, Any],
    dtype: DType,
    settings: Settings,
    device: Device = "cpu",
    decoder: Callable[[], DecoderConfig] | None = None,
    files: Sequence[Path] = (),
) -> State:
    """Prepares a decoder's weights.

    Args:
        tensors: the checkpoint's tensors, by their names in the checkpoint.
        config: config.json, or the text config in it.
        dtype: the graph's dtype; unquantized tensors are converted to it.
        settings: blocks and quantization.
        device: where the graph runs.
        decoder: makes the decoder's configuration, which a profile needs; without it there is none.
        files: those that the tensors are in; without them, packed weights are not kept on disk.

    Returns:
        The graph's tensors, by their names in the graph.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of the wrong shape or dtype.
        SettingsError: the settings do not fit this decoder.
    """
    shapes = DecoderShapes.from_config(config)
    data = {name: weights.data() for name, weights in tensors.items()}
    names, stored = decoder_tensors(specs_of(data), shapes, config)
    packed = {path for path, weight in stored.items() if weight.is_nvfp4}
    coverage = coverage_of(settings, shapes, packed)
    plan = plan_of(
        settings,
        shapes,
        coverage,
        packed=packed,
        held=held_bundles(config, stored),
        device=device,
    )
    plan.log()
    _prepare_bundles(data, stored, shapes, dtype, plan)
    rebuilt = plan.path == "outside"
    scales = chosen_scales(
        settings.quant_scales, shapes.architecture, _SHARED if plan.in_graph else None
    )
    profile = cache = None
    encoded = [key for key in coverage.quantized if key.module not in packed]
    # Compiling for a device that is elsewhere needs the shapes only.
    real = not is_virtual_device_mode()
    if files and encoded and real and settings.cache_gb:
        how = (coverage, plan, scales, settings.profile_tokens, dtype, device)
        cache = PackedCache(files, how, settings.cache_gb * 10**9)
    filled = cache is not None and cache.is_filled
    if scales == "profile" and decoder and encoded and real and not filled:
        loaded = LoadedDecoder(decoder(), data, names, stored)
        profile = loaded.profile(settings.profile_tokens)

    state: State = {}
    with Quantizer(coverage, shapes, scales, data, profile, cache) as quantizer:

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

        def shared(modules: Sequence[str], keys: Sequence[Sequence[ProjectionKey]]) -> State:
            """A block group's bundles: the block, which all layers share, and each one's own."""
            answers = [coverage.is_quantized(key) for key in keys[0]]
            if not can_fuse(answers):
                members = [
                    shared([f"{module}.{key.role}" for module in modules], [[k[n]] for k in keys])
                    for n, key in enumerate(keys[0])
                ]
                return {name: tensor for member in members for name, tensor in member.items()}
            layers = [own[0].layer for own in keys]
            bundles = [[bundle_at(stored, key) for key in own] for own in keys]
            blocks = {key: bundle.block for key, bundle in zip(keys[0], bundles[0], strict=True)}
            block = block_module(layers, modules[0])
            if answers[0]:
                state = quantizer.group(block, blocks, layers)
            else:
                dense = [data[part.names[0]] for part in blocks.values()]
                state = {f"{block}.weight": aligned(_converted(dense, dtype, f"{block}.weight"))}
            for module, parts in zip(modules, bundles, strict=True):
                own_tensors = corrections(data, module, parts, plan, dtype)
                quantizer.beside(sum(math.prod(map(int, t.shape)) for t in own_tensors.values()))
                state |= {name: aligned(tensor) for name, tensor in own_tensors.items()}
            return state

        for layers in plan.groups:
            for roles in fused_groups(tuple(shapes.layers[layers[0]].projections)):
                keys = [[ProjectionKey(layer=n, role=role) for role in roles] for n in layers]
                modules = [group_module(layer, roles) for layer in layers]
                if plan.in_graph and len(layers) > 1:
                    state |= shared(modules, keys)
                    continue
                for module, own in zip(modules, keys, strict=True):
                    state |= group(module, {key: stored[key.module] for key in own})
        head = StoredWeight(
            module="embed_tokens",
            shape=shapes.head,
            layout="dense",
            names=(names[EMBEDDING],),
        )
        if not shapes.tied:
            head = stored[LM_HEAD]
        if coverage.lm_head:
            state |= quantizer.head(head)
        elif not shapes.tied:
            names["lm_head.weight"] = head.names[0]

    def in_graph(name: str, stored: DType) -> DType:
        return table_dtype(stored, dtype, shapes.hidden, device) if name in TABLES else dtype

    return state | {
        name: _converted([data[source]], in_graph(name, data[source].dtype), name)
        for name, source in names.items()
    }


def checkpoint_weights(
    tensors: Mapping[str, Weights],
    *,
    config: type[DecoderConfig],
    huggingface_config: Any,
    pipeline_config: PipelineConfig,
    **_: Any,
) -> State:
    """A decoder's weight adapter, as MAX calls it: `decoder_weights` with what MAX's configs say.

    Args:
        tensors: the checkpoint's tensors, by their names there.
        config: the decoder's configuration.
        huggingface_config: the checkpoint's.
        pipeline_config: MAX's.

    Raises:
        CheckpointError, SettingsError: as `decoder_weights`.
    """
    return decoder_weights(
        tensors,
        config=huggingface_config.to_dict(),
        dtype=supported_encoding_dtype(graph_encoding(pipeline_config.model)),
        settings=Settings.read(getattr(huggingface_config, "attnquant", None)),
        device=pipeline_config.model.device_specs[0].device_type,
        decoder=partial(config.initialize, pipeline_config, max_seq_len=SEQUENCE_TOKENS),
        files=pipeline_config.model.resolved_weight_paths(),
    )


def can_fuse(quantized: Sequence[bool]) -> bool:
    """Whether one matmul can serve blocks of which these are quantized: all of them or none."""
    return len(set(quantized)) == 1


def _prepare_bundles(
    data: dict[str, WeightData],
    stored: dict[str, StoredWeight],
    shapes: DecoderShapes,
    dtype: DType,
    plan: ThetaPlan,
) -> None:
    """Below passthrough, puts W_eff or bundles, as the plan says, where weights or bundles were."""
    held = any(isinstance(weight, StoredBundle) for weight in stored.values())
    if plan.path == "weights" or (held and plan.in_graph):
        return
    for group in bundles_of(data, stored, shapes, plan):
        if plan.in_graph:
            keep(data, stored, group)
        else:
            rebuild(data, stored, group, dtype)


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
