"""Any served decoder as a text model in this process: its registration, loaded and driven."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attnquant
from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import CheckpointError

if TYPE_CHECKING:
    from max.pipelines.lib import SupportedArchitecture

    from attnquant.nn.loaded import LoadedText
    from attnquant.nn.tensors import State

MAX_LENGTH = 2048
"""Tokens of the longest sequence: one length for all that load a model so, and so one graph."""


def architecture_of(shapes: DecoderShapes) -> SupportedArchitecture:
    """The registration that serves a decoder."""
    return next(arch for arch in attnquant.ARCHITECTURES if arch.name == shapes.architecture)


def load_text(directory: Path, change: Callable[[State], State] | None = None) -> LoadedText:
    """Compiles a checkpoint's graph, on the CPU in float32, with every position's logits.

    Args:
        directory: the checkpoint; settings come from the environment and from its config.
        change: what is done to the graph's weights before they are bound.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        UnsupportedError: attnquant does not serve this architecture.
    """
    from attnquant.nn.loaded import LoadedText

    arch = architecture_of(DecoderShapes.from_config(Checkpoint.open(directory).config))
    return LoadedText(directory, arch, max_length=MAX_LENGTH, change=change)


def load_tokenizer(directory: Path) -> Callable[[str], list[int]]:
    """What makes token ids of a text, with the special tokens that the model wants in front.

    Raises:
        CheckpointError: the directory has no tokenizer that transformers reads.
    """
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers raises what it likes
        raise CheckpointError(
            f"{directory}: transformers cannot read its tokenizer ({first_line(error)}), expected "
            "tokenizer.json and tokenizer_config.json; add them from the original model"
        ) from error

    def encode(text: str) -> list[int]:
        ids: list[int] = loaded.encode(text)
        return ids

    return encode


def first_line(error: Exception) -> str:
    """Of another library's error: its kind, and what it says first."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:200]}"
