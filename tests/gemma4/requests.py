"""Requests as MAX's server hands them to the tokenizer, and the contexts that it makes of them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from max.pipelines.architectures.gemma4.context import Gemma4Context
from max.pipelines.modeling.types import (
    RequestID,
    TextGenerationRequest,
    TextGenerationRequestMessage,
)
from numpy.typing import NDArray
from PIL import Image

from attnquant.gemma4.tokenizer import TextOrVisionTokenizer
from attnquant.nn.loaded import pipeline_config
from tests.models import MAX_LENGTH

TEXT = "The capital of France"


def png(image: NDArray[np.uint8]) -> bytes:
    """An image file of `[height, width, 3]` pixels."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def context(
    directory: Path, *, images: Sequence[bytes] = (), videos: Sequence[bytes] = ()
) -> Gemma4Context:
    """What the tokenizer makes of a message: images, videos, `TEXT`."""
    config = pipeline_config(directory, max_length=MAX_LENGTH, max_batch_size=1)
    tokenizer = TextOrVisionTokenizer(str(directory), config, max_length=MAX_LENGTH)
    content = [{"type": "image"} for _ in images] + [{"type": "video"} for _ in videos]
    content.append({"type": "text", "text": TEXT})
    request = TextGenerationRequest(
        request_id=RequestID(),
        model_name="tiny",
        messages=[TextGenerationRequestMessage(role="user", content=content)],
        images=list(images),
        videos=list(videos),
    )
    return asyncio.run(tokenizer.new_context(request))
