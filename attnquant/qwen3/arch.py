"""The registration that takes over `Qwen3ForCausalLM`."""

from __future__ import annotations

from max.graph.weights import WeightsFormat
from max.pipelines.context import TextContext
from max.pipelines.lib import SupportedArchitecture, TextTokenizer
from max.pipelines.modeling.types import PipelineTask

from attnquant.nn.memory_planner import DecoderMemoryPlanner
from attnquant.qwen3.batch_processor import Qwen3BatchProcessor
from attnquant.qwen3.model import Qwen3Model
from attnquant.qwen3.model_config import Qwen3Config
from attnquant.qwen3.weight_adapters import convert_safetensors

qwen3_arch = SupportedArchitecture(
    name="Qwen3ForCausalLM",
    task=PipelineTask.TEXT_GENERATION,
    example_repo_ids=["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"],
    default_weights_format=WeightsFormat.safetensors,
    default_encoding=Qwen3Config.DEFAULT_ENCODING,
    supported_encodings=Qwen3Config.SUPPORTED_ENCODINGS,
    config=Qwen3Config,
    pipeline_model=Qwen3Model,
    batching=Qwen3BatchProcessor,
    tokenizer=TextTokenizer,
    context_type=TextContext,
    weight_adapters={WeightsFormat.safetensors: convert_safetensors},
    memory_planner=DecoderMemoryPlanner,
    multi_gpu_supported=False,
    supports_overlap_scheduler=True,
    supports_device_graph_capture=True,
)
