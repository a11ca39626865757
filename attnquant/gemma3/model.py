"""The pipeline model: loads the weights, compiles the graph, executes steps."""

from __future__ import annotations

from typing import Any, ClassVar

from attnquant.gemma3.batch_processor import Gemma3BatchProcessor
from attnquant.gemma3.gemma3 import build_gemma3
from attnquant.gemma3.model_config import Gemma3Config
from attnquant.nn.pipeline import DecoderModel


class Gemma3Model(DecoderModel):
    """Gemma 3 on one device."""

    model_config_cls: ClassVar[type[Any]] = Gemma3Config
    batch_processor_cls: ClassVar[type[Gemma3BatchProcessor]] = Gemma3BatchProcessor
    graph_name: ClassVar[str] = "gemma3"
    build = staticmethod(build_gemma3)
