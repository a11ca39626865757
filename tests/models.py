"""Models that tests load through MAX's own in-process API, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from max.pipelines.lib.auto_model import AutoModel

MAX_LENGTH = 2048


def load_model(directory: Path, **overrides: Any) -> AutoModel:
    """Compiles the checkpoint's graph; attnquant's settings come from the environment."""
    options: dict[str, Any] = {
        "custom_architectures": ["attnquant"],
        "devices": "cpu",
        "quantization_encoding": "float32",
        "max_length": MAX_LENGTH,
        "max_batch_size": 8,
    }
    return AutoModel(str(directory), **(options | overrides))
