"""The registrations that take over Gemma 4: with images, the text-only 12B line, with a drafter."""

from __future__ import annotations

import dataclasses

from max.graph.weights import WeightsFormat
from max.pipelines.architectures.gemma4.context import Gemma4Context
from max.pipelines.lib import Speculator, SupportedArchitecture
from max.pipelines.modeling.types import InputModality, PipelineTask

from attnquant.drafter_shapes import DRAFTER
from attnquant.gemma4.batch_processor import Gemma4BatchProcessor
from attnquant.gemma4.drafted import DraftedGemma4BatchProcessor, DraftedGemma4Model
from attnquant.gemma4.model import Gemma4Model
from attnquant.gemma4.model_config import Gemma4Config
from attnquant.gemma4.tokenizer import TextOrVisionTokenizer
from attnquant.gemma4.weight_adapters import convert_safetensors
from attnquant.nn.memory_planner import DecoderMemoryPlanner

gemma4_arch = SupportedArchitecture(
    name="Gemma4ForConditionalGeneration",
    task=PipelineTask.TEXT_GENERATION,
    example_repo_ids=["google/gemma-4-31B-it", "nvidia/Gemma-4-31B-IT-NVFP4"],
    default_weights_format=WeightsFormat.safetensors,
    default_encoding=Gemma4Config.DEFAULT_ENCODING,
    supported_encodings=Gemma4Config.SUPPORTED_ENCODINGS,
    config=Gemma4Config,
    pipeline_model=Gemma4Model,
    batching=Gemma4BatchProcessor,
    tokenizer=TextOrVisionTokenizer,
    context_type=Gemma4Context,
    input_modalities={InputModality.TEXT, InputModality.IMAGE, InputModality.VIDEO},
    # MAX's own; importing its tokenizer registers both.
    tool_parser="gemma4",
    reasoning_parser="gemma4",
    weight_adapters={WeightsFormat.safetensors: convert_safetensors},
    memory_planner=DecoderMemoryPlanner,
    multi_gpu_supported=False,
    supports_overlap_scheduler=True,
    # MAX captures the decoder's graph and replays it for decoding batches only. Images arrive with
    # prefill, which runs eagerly; to a decoding step they are an input of no rows.
    supports_device_graph_capture=True,
)

gemma4_unified_arch = dataclasses.replace(
    gemma4_arch,
    name="Gemma4UnifiedForConditionalGeneration",
    example_repo_ids=["google/gemma-4-12B-it"],
    input_modalities={InputModality.TEXT},
)

# What MAX takes in the first one's place where a drafter is given; without it, MAX would serve the
# two by an architecture of its own.
gemma4_speculator = Speculator(
    name="DraftedGemma4ForConditionalGeneration",
    base=gemma4_arch,
    draft_arch=DRAFTER,
    method="mtp",
    pipeline_model=DraftedGemma4Model,
    batching=DraftedGemma4BatchProcessor,
    # Each row of a batch is verified and drafted for by itself.
    supports_spec_decode_mixed_batches=True,
)
