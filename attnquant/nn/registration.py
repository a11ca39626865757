"""What every text decoder's registration says alike, so that none forgets a part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max.graph.weights import WeightsFormat
from max.pipelines.context import TextContext
from max.pipelines.lib import SupportedArchitecture
from max.pipelines.modeling.types import PipelineTask

from attnquant.nn.config import DecoderConfig
from attnquant.nn.memory_planner import DecoderMemoryPlanner
from attnquant.nn.pipeline import DecoderModel
from attnquant.nn.tensors import State
from attnquant.nn.tokenizer import DecoderTokenizer


def text_architecture(
    name: str,
    *,
    examples: list[str],
    config: type[DecoderConfig],
    model: type[DecoderModel],
    batching: type[Any],
    adapter: Callable[..., State],
) -> SupportedArchitecture:
    """Registers a decoder of text on one device.

    Args:
        name: of the architecture, as config.json has it.
        examples: Hugging Face ids of such checkpoints.
        config: its configuration.
        model: its pipeline model.
        batching: its batch processor.
        adapter: its weight adapter.
    """
    return SupportedArchitecture(
        name=name,
        task=PipelineTask.TEXT_GENERATION,
        example_repo_ids=examples,
        default_weights_format=WeightsFormat.safetensors,
        default_encoding=config.DEFAULT_ENCODING,
        supported_encodings=config.SUPPORTED_ENCODINGS,
        config=config,
        pipeline_model=model,
        batching=batching,
        tokenizer=DecoderTokenizer,
        context_type=TextContext,
        weight_adapters={WeightsFormat.safetensors: adapter},
        memory_planner=DecoderMemoryPlanner,
        multi_gpu_supported=False,
        supports_overlap_scheduler=True,
        supports_device_graph_capture=True,
    )
