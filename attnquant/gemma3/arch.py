"""The registration that takes over `Gemma3ForCausalLM`."""

from __future__ import annotations

from max.graph.weights import WeightsFormat
from max.pipelines.context import TextContext
from max.pipelines.lib import SupportedArchitecture
from max.pipelines.modeling.types import PipelineTask

from attnquant.gemma3.batch_processor import Gemma3BatchProcessor
from attnquant.gemma3.model import Gemma3Model
from attnquant.gemma3.model_config import Gemma3Config
from attnquant.gemma3.weight_adapters import convert_safetensors
from attnquant.nn.memory_planner import DecoderMemoryPlanner
from attnquant.nn.tokenizer import DecoderTokenizer

gemma3_arch = SupportedArchitecture(
    name="Gemma3ForCausalLM",
    task=PipelineTask.TEXT_GENERATION,
    example_repo_ids=["google/gemma-3-1b-it", "google/gemma-3-270m-it"],
    default_weights_format=WeightsFormat.safetensors,
    default_encoding=Gemma3Config.DEFAULT_ENCODING,
    supported_encodings=Gemma3Config.SUPPORTED_ENCODINGS,
    config=Gemma3Config,
    pipeline_model=Gemma3Model,
    batching=Gemma3BatchProcessor,
    tokenizer=DecoderTokenizer,
    context_type=TextContext,
    weight_adapters={WeightsFormat.safetensors: convert_safetensors},
    memory_planner=DecoderMemoryPlanner,
    multi_gpu_supported=False,
    supports_overlap_scheduler=True,
    supports_device_graph_capture=True,
)
