"""A tiny Gemma 4 behind MAX's HTTP API on the CPU: text, images, and what it refuses."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.gemma4.pipeline import Pipeline
from tests.gemma4.requests import png
from tests.models import MAX_LENGTH
from tests.serve.server import serve
from tests.tiny import prompts
from tests.tiny.gemma4 import IMAGES, video

CASE = "gemma4-shared-values"
TOKENS = 8


@pytest.fixture(scope="module")
def client(
    tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    log = tmp_path_factory.mktemp("serve") / "server.log"
    arguments = ("--model", str(tiny_directory(CASE)), "--served-model-name", "tiny")
    with serve(log, *arguments, "--max-length", str(MAX_LENGTH)) as server:
        yield openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=300)
        assert server.process.poll() is None


def message(*parts: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "it is raining"}, *parts]}]


def picture(index: int) -> dict[str, Any]:
    data = base64.b64encode(png(IMAGES[index])).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def clip(data: bytes) -> dict[str, Any]:
    url = f"data:video/x-msvideo;base64,{base64.b64encode(data).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def reply(client: openai.OpenAI, messages: list[Any]) -> str:
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0
    )
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    return answer.choices[0].message.content or ""


@pytest.mark.slow
def test_a_completion_is_the_graphs_greedy_text(
    client: openai.OpenAI, tiny_directory: Callable[[str], Path]
) -> None:
    """Which tests/gemma4/test_logits.py holds to transformers'."""
    pipeline = Pipeline(tiny_directory(CASE))
    tokenizer = Tokenizer.from_file(str(tiny_directory(CASE) / "tokenizer.json"))
    compared = 0
    for text in prompts.TEXTS:
        tokens = tokenizer.encode(text).ids
        chosen = pipeline.greedy(pipeline.context(tokens), TOKENS)
        # Bytes of characters are shown in one way or another, where they make none.
        pieces = [
            tokenizer.decode([token], skip_special_tokens=False).strip()
            for token in chosen
            if not tokenizer.id_to_token(token).startswith("<0x")
        ]
        answers = [
            client.completions.create(
                model="tiny", prompt=prompt, max_tokens=TOKENS, temperature=0
            ).choices[0]
            for prompt in (text, tokens)
        ]
        assert answers[0].text == answers[1].text
        pattern = ".*".join(map(re.escape, pieces))
        assert re.fullmatch(f".*{pattern}.*", answers[0].text, re.DOTALL)
        compared += sum(map(len, pieces))
    assert compared > 20


@pytest.mark.slow
def test_images_are_seen(client: openai.OpenAI) -> None:
    first, second = (reply(client, message(picture(index))) for index in range(2))
    assert len({first, second, reply(client, message())}) == 3
    assert reply(client, message(picture(0))) == first


@pytest.mark.slow
def test_a_video_is_seen_and_a_broken_one_refused(client: openai.OpenAI) -> None:
    whole = reply(client, message(clip(video())))
    assert whole not in (reply(client, message()), reply(client, message(picture(0))))
    with pytest.raises(openai.BadRequestError, match="video"):
        reply(client, message(clip(b"not a video")))
    assert reply(client, message(clip(video()))) == whole


@pytest.mark.slow
def test_a_broken_image_is_refused_and_the_next_request_is_served(client: openai.OpenAI) -> None:
    whole = reply(client, message(picture(0)))
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.APIStatusError) as caught:
        reply(client, message(broken))
    assert 400 <= caught.value.status_code < 500
    assert reply(client, message(picture(0))) == whole
