"""Every tiny checkpoint, by name."""

from __future__ import annotations

from tests.tiny import gemma3, gemma4, qwen3
from tests.tiny.checkpoint import TinyCheckpoint

CASES: dict[str, TinyCheckpoint] = {**gemma3.CASES, **gemma4.CASES, **qwen3.CASES}
