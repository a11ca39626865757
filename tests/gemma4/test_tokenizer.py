"""MAX's tokenizer on tiny checkpoints: where images and videos go, and where they are refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from max.pipelines.context.exceptions import InputError

from tests.gemma4.requests import context, png
from tests.tiny.gemma4 import (
    BEGIN_IMAGE,
    CASES,
    END_IMAGE,
    FRAMES,
    IMAGE,
    IMAGES,
    SOFT_TOKENS,
    VIDEO,
    patches,
    video,
)


def test_an_image_becomes_its_soft_tokens(tiny_directory: Callable[[str], Path]) -> None:
    case = CASES["gemma4-shared-values"]
    found = context(tiny_directory(case.name), images=[png(IMAGES[0])])
    tokens = found.tokens.all.tolist()
    begin, end = tokens.index(case.token(BEGIN_IMAGE)), tokens.index(case.token(END_IMAGE))
    assert tokens[begin + 1 : end] == [case.token(IMAGE)] * SOFT_TOKENS
    (image,) = found.images
    assert (image.start_idx, image.end_idx) == (begin + 1, end)
    values, positions = patches(IMAGES[0])
    assert np.allclose(image.pixel_values, values, rtol=0, atol=1e-6)
    assert found.pixel_position_ids[0].tolist() == positions.tolist()


def test_a_video_becomes_its_frames_soft_tokens(tiny_directory: Callable[[str], Path]) -> None:
    case = CASES["gemma4-shared-values"]
    found = context(tiny_directory(case.name), videos=[video()])
    tokens = found.tokens.all.tolist()
    places = [index for index, token in enumerate(tokens) if token == case.token(VIDEO)]
    assert len(places) == len(FRAMES) * SOFT_TOKENS
    # Between two frames stands the time of the second.
    assert sum(second - first > 1 for first, second in pairwise(places)) == len(FRAMES) - 1
    for frame, metadata, positions in zip(
        FRAMES, found.images, found.pixel_position_ids, strict=True
    ):
        assert tokens[metadata.start_idx - 1] == case.token(BEGIN_IMAGE)
        assert tokens[metadata.start_idx : metadata.end_idx] == [case.token(VIDEO)] * SOFT_TOKENS
        assert tokens[metadata.end_idx] == case.token(END_IMAGE)
        values, expected = patches(frame)
        assert np.allclose(metadata.pixel_values, values, rtol=0, atol=1e-6)
        assert positions.tolist() == expected.tolist()


def test_a_broken_video_is_refused(tiny_directory: Callable[[str], Path]) -> None:
    directory = tiny_directory("gemma4-shared-values")
    for broken in (b"", b"not a video", video()[:40]):
        with pytest.raises(InputError, match="a video cannot be decoded"):
            context(directory, videos=[broken])


@pytest.mark.parametrize("name", ["gemma4-own-values", "gemma4-unified"])
def test_text_only_checkpoints_refuse_images_and_take_text(
    name: str, tiny_directory: Callable[[str], Path]
) -> None:
    with pytest.raises(InputError, match="no vision tower"):
        context(tiny_directory(name), images=[png(IMAGES[0])])
    with pytest.raises(InputError, match="no vision tower"):
        context(tiny_directory(name), videos=[video()])
    assert not context(tiny_directory(name)).images
