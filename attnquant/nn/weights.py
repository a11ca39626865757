"""From a checkpoint's tensors to the tensors that a decoder's graph binds.

Every decoder's weight adapter is this function with that decoder's shapes. Names lose their
checkpoint prefix, every projection becomes a theta bundle and its W_eff again, and each fused group
is stored in one of the ways that `attnquant.nn.projection` describes. At passthrough, where the
graph's dtype is the file's, that is the mapped file's own memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from max.driver import is_virtual_device_mode
from max.dtype import DType
from max.graph.weights import WeightData, Weights

from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import CheckpointError
from attnquant.nn.quantize import Quantizer, coverage_of
from attnquant.nn.tensors import State, from_numpy, to_numpy
from attnquant.nvfp4.coverage import Coverage
from attnquant.projections import ProjectionKey, fused_groups, group_module, strip_prefix
from attnquant.settings import Settings

# Checkpoints may carry these, and no graph needs them.
_DERIVED = ".rotary_emb.inv_freq"

Parts = Mapping[ProjectionKey, WeightData]

_NUMPY_DTYPES: dict[DType, Any] = {
    DType.bfloat16: ml_dtypes.bfloat16,
    DType.float16: np.float16,
    DType.float32: np.float32,
}


def decoder_weights(
    tensors: Mapping[str, Weights], *, shapes: DecoderShapes, dtype: DType, settings: Settings
) -> State:
    """Prepares a decoder's weights.

    Args:
        tensors: the checkpoint's tensors, by their names in the checkpoint.
        shapes: what the configuration says they must be.
        dtype: the graph's dtype; unquantized tensors are converted to it.
        settings: blocks and quantization.

    Returns:
        The graph's tensors, by their names in the graph.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of the wrong shape or dtype.
    """
    data = _checked(tensors, shapes)
    coverage = coverage_of(settings, shapes)
    state: State = {}
    with Quantizer(coverage, shapes, settings.quant_scales) as quantizer:
        for layer, layer_shapes in enumerate(shapes.layers):
            for roles in fused_groups(tuple(layer_shapes.projections)):
                keys = [ProjectionKey(layer=layer, role=role) for role in roles]
                parts = {key: data.pop(f"{key.module}.weight") for key in keys}
                state |= _group(group_module(layer, roles), parts, dtype, coverage, quantizer)
        if coverage.lm_head:
            state |= quantizer.head(data.pop("lm_head.weight", data["embed_tokens.weight"]))
    return state | {name: _converted([weight], dtype, name) for name, weight in data.items()}


def _group(
    module: str,
    parts: Parts,
    dtype: DType,
    coverage: Coverage,
    quantizer: Quantizer,
) -> State:
    """One fused group: packed, dense, or member by member where the coverage splits it."""
    answers = {coverage.is_quantized(key) for key in parts}
    if len(answers) > 1:
        state: State = {}
        for key, part in parts.items():
            state |= _group(f"{module}.{key.role}", {key: part}, dtype, coverage, quantizer)
        return state
    if answers == {True}:
        return quantizer.group(module, parts)
    if len(parts) > 1 and all(part.dtype == dtype for part in parts.values()):
        return {f"{module}.{key.role}.weight": part for key, part in parts.items()}
    name = f"{module}.weight"
    return {name: _converted(list(parts.values()), dtype, name)}


def _checked(tensors: Mapping[str, Weights], shapes: DecoderShapes) -> State:
    """The decoder's tensors without their prefix, each of the shape that config.json implies."""
    expected = shapes.tensors
    data: State = {}
    for name, weights in tensors.items():
        short = strip_prefix(name)
        if short.endswith(_DERIVED) or (short == "lm_head.weight" and shapes.tied):
            # Some writers store the tied head again; as in transformers, the embedding counts.
            continue
        weight = weights.data()
        found = list(map(int, weight.shape))
        if short not in expected:
            problem = f"not a tensor of {shapes.architecture} with this config.json"
        elif short in data:
            problem = "found twice, under two prefixes"
        elif found != list(expected[short]):
            problem = f"found shape {found}, config.json implies {list(expected[short])}"
        elif weight.dtype not in _NUMPY_DTYPES:
            problem = f"found dtype {weight.dtype}, expected bfloat16, float16 or float32"
        else:
            data[short] = weight
            continue
        raise CheckpointError(f"tensor {name}: {problem}; download or convert the checkpoint again")
    if missing := sorted(expected.keys() - data.keys()):
        raise CheckpointError(
            f"tensor {missing[0]} is missing, and {len(missing) - 1} more; download the checkpoint "
            "again"
        )
    return data


def _converted(parts: list[WeightData], dtype: DType, name: str) -> WeightData:
    """The parts' rows in one array of the graph's dtype; a single part of that dtype is itself."""
    if len(parts) == 1 and parts[0].dtype == dtype:
        return parts[0]
    rows = [int(part.shape[0]) for part in parts]
    stacked = np.empty((sum(rows), *map(int, parts[0].shape[1:])), _NUMPY_DTYPES[dtype])
    # Compiling for a device that is elsewhere needs the shapes only.
    if not is_virtual_device_mode():
        for part, end in zip(parts, np.cumsum(rows), strict=True):
            stacked[end - int(part.shape[0]) : end] = to_numpy(part)
    return from_numpy(stacked, dtype, name)
