"""MAX's tokenizer on tiny checkpoints: where images go, and where they are refused."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from max.pipelines import PipelineArgs, PipelineConfig
from max.pipelines.architectures.gemma4.context import Gemma4Context
from max.pipelines.context.exceptions import InputError
from max.pipelines.modeling.types import (
    RequestID,
    TextGenerationRequest,
    TextGenerationRequestMessage,
)
from PIL import Image

from attnquant.gemma4.tokenizer import TextOrVisionTokenizer
from tests.models import MAX_LENGTH
from tests.tiny.gemma4 import BEGIN_IMAGE, CASES, END_IMAGE, IMAGE, IMAGES, SOFT_TOKENS, patches

TEXT = "The capital of France"


def context(directory: Path, *, images: bool) -> Gemma4Context:
    config = PipelineConfig.from_args(
        PipelineArgs.from_flat_kwargs(
            model_path=str(directory),
            custom_architectures=["attnquant"],
            device_specs="cpu",
            quantization_encoding="float32",
            max_length=MAX_LENGTH,
        )
    )
    tokenizer = TextOrVisionTokenizer(str(directory), config, max_length=MAX_LENGTH)
    content: list[dict[str, str]] = [{"type": "text", "text": TEXT}]
    if images:
        content.insert(0, {"type": "image"})
    request = TextGenerationRequest(
        request_id=RequestID(),
        model_name="tiny",
        messages=[TextGenerationRequestMessage(role="user", content=content)],
        images=[_png()] if images else [],
    )
    return asyncio.run(tokenizer.new_context(request))


def _png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(file, "PNG")
    return file.getvalue()


def test_an_image_becomes_its_soft_tokens(tiny_directory: Callable[[str], Path]) -> None:
    case = CASES["gemma4-shared-values"]
    found = context(tiny_directory(case.name), images=True)
    tokens = found.tokens.all.tolist()
    begin, end = tokens.index(case.token(BEGIN_IMAGE)), tokens.index(case.token(END_IMAGE))
    assert tokens[begin + 1 : end] == [case.token(IMAGE)] * SOFT_TOKENS
    (image,) = found.images
    assert (image.start_idx, image.end_idx) == (begin + 1, end)
    values, positions = patches(IMAGES[0])
    assert np.allclose(image.pixel_values, values, rtol=0, atol=1e-6)
    assert found.pixel_position_ids[0].tolist() == positions.tolist()


@pytest.mark.parametrize("name", ["gemma4-own-values", "gemma4-unified"])
def test_text_only_checkpoints_refuse_images_and_take_text(
    name: str, tiny_directory: Callable[[str], Path]
) -> None:
    with pytest.raises(InputError, match="no vision tower"):
        context(tiny_directory(name), images=True)
    assert not context(tiny_directory(name), images=False).images
