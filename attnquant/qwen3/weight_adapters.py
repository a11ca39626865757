"""Qwen3's checkpoints to the graph's weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from max.graph.weights import WeightData, Weights
from max.pipelines.lib import PipelineConfig
from max.pipelines.modeling.config_enums import supported_encoding_dtype

from attnquant.nn.config import graph_encoding
from attnquant.nn.weights import decoder_weights
from attnquant.nvfp4.profile import SEQUENCE_TOKENS
from attnquant.qwen3.model_config import Qwen3Config
from attnquant.settings import Settings


def convert_safetensors(
    state_dict: dict[str, Weights],
    *,
    huggingface_config: Any,
    pipeline_config: PipelineConfig,
    **_: Any,
) -> dict[str, WeightData]:
    """MAX's weight adapter: a safetensors checkpoint's tensors to the graph's, by name."""
    return decoder_weights(
        state_dict,
        config=huggingface_config.to_dict(),
        dtype=supported_encoding_dtype(graph_encoding(pipeline_config.model)),
        settings=Settings.read(getattr(huggingface_config, "attnquant", None)),
        device=pipeline_config.model.device_specs[0].device_type,
        decoder=partial(Qwen3Config.initialize, pipeline_config, max_seq_len=SEQUENCE_TOKENS),
        files=pipeline_config.model.resolved_weight_paths(),
    )
