"""Gemma 4's checkpoints to the graphs' weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from max.dtype import DType
from max.graph.weights import WeightData, Weights
from max.pipelines.lib import PipelineConfig
from max.pipelines.modeling.config_enums import supported_encoding_dtype

from attnquant.gemma4.model_config import Gemma4Config, vision_config
from attnquant.nn.config import graph_encoding
from attnquant.nn.tensors import State, from_numpy, numpy_dtype, to_numpy
from attnquant.nn.weights import checkpoint_weights
from attnquant.projections import PREFIXES

VISION = "vision."
"""What stands before the names of the vision tower's weights."""

# Where a checkpoint has them, below its prefix, and where MAX's tower does.
_TOWER_NAMES = {"vision_tower.": "", "embed_vision.": "embed_vision."}


def convert_safetensors(
    state_dict: dict[str, Weights],
    *,
    huggingface_config: Any,
    pipeline_config: PipelineConfig,
    **_: Any,
) -> dict[str, WeightData]:
    """MAX's weight adapter: a safetensors checkpoint's tensors to the graphs', by name."""
    weights = checkpoint_weights(
        state_dict,
        config=Gemma4Config,
        huggingface_config=huggingface_config,
        pipeline_config=pipeline_config,
    )
    if vision_config(huggingface_config) is not None:
        dtype = supported_encoding_dtype(graph_encoding(pipeline_config.model))
        weights |= _vision_weights(state_dict, dtype)
    return weights


def _vision_weights(tensors: Mapping[str, Weights], dtype: DType) -> State:
    weights: State = {}
    for name, tensor in tensors.items():
        if (short := _tower_name(name)) is None:
            continue
        data = tensor.data()
        if data.dtype != dtype:
            data = from_numpy(to_numpy(data).astype(numpy_dtype(dtype)), dtype, VISION + short)
        weights[VISION + short] = data
    return weights


def _tower_name(name: str) -> str | None:
    """What MAX's tower calls a tensor, or None if it is none of the tower's."""
    for prefix in PREFIXES:
        rest = name.removeprefix(prefix)
        for below, tower in _TOWER_NAMES.items():
            if rest.startswith(below):
                # A linear layer that could clip its input wraps the one with the weight.
                return tower + rest.removeprefix(below).replace(".linear.", ".")
    return None
