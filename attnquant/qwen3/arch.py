"""The registration that takes over `Qwen3ForCausalLM`."""

from __future__ import annotations

from attnquant.nn.registration import text_architecture
from attnquant.qwen3.batch_processor import Qwen3BatchProcessor
from attnquant.qwen3.model import Qwen3Model
from attnquant.qwen3.model_config import Qwen3Config
from attnquant.qwen3.weight_adapters import convert_safetensors

qwen3_arch = text_architecture(
    "Qwen3ForCausalLM",
    examples=["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"],
    config=Qwen3Config,
    model=Qwen3Model,
    batching=Qwen3BatchProcessor,
    adapter=convert_safetensors,
)
