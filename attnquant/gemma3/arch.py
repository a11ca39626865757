"""The registration that takes over `Gemma3ForCausalLM`."""

from __future__ import annotations

from attnquant.gemma3.batch_processor import Gemma3BatchProcessor
from attnquant.gemma3.model import Gemma3Model
from attnquant.gemma3.model_config import Gemma3Config
from attnquant.gemma3.weight_adapters import convert_safetensors
from attnquant.nn.registration import text_architecture

gemma3_arch = text_architecture(
    "Gemma3ForCausalLM",
    examples=["google/gemma-3-1b-it", "google/gemma-3-270m-it"],
    config=Gemma3Config,
    model=Gemma3Model,
    batching=Gemma3BatchProcessor,
    adapter=convert_safetensors,
)
