"""The pipeline model: loads the weights, compiles the graph, executes steps."""

from __future__ import annotations

from typing import Any, ClassVar

from attnquant.nn.pipeline import DecoderModel
from attnquant.qwen3.batch_processor import Qwen3BatchProcessor
from attnquant.qwen3.model_config import Qwen3Config
from attnquant.qwen3.qwen3 import build_qwen3


class Qwen3Model(DecoderModel):
    """Qwen3 on one device."""

    model_config_cls: ClassVar[type[Any]] = Qwen3Config
    batch_processor_cls: ClassVar[type[Qwen3BatchProcessor]] = Qwen3BatchProcessor
    graph_name: ClassVar[str] = "qwen3"
    build = staticmethod(build_qwen3)
