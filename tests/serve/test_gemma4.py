"""Tiny Gemma 4 behind MAX's HTTP API on the CPU: every kind of checkpoint, images, refusals."""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from attnquant.checkpoint.export import export_nvfp4
from attnquant.decoder_shapes import DecoderShapes
from attnquant.kernels.ops import NVFP4Kernel
from attnquant.nvfp4.format import NVFP4Weight
from attnquant.nvfp4.reference import encode
from tests.dequantized import dequantize
from tests.gemma4.pipeline import Pipeline
from tests.gemma4.requests import png
from tests.gemma4.test_logits import log_probabilities
from tests.gemma4.test_nvfp4 import to_compressed_tensors
from tests.models import MAX_LENGTH
from tests.serve.server import serve
from tests.tiny import prompts
from tests.tiny.gemma4 import CASES, IMAGES, video

CASE = "gemma4-shared-values"
TOKENS = 8
TOLERANCE = 1e-4
"""Of a log-probability."""
# As real ones are stored.
BFLOAT16 = dataclasses.replace(CASES[CASE], dtype="bfloat16")


@contextmanager
def served(directory: Path, log: Path, **variables: str) -> Iterator[openai.OpenAI]:
    """A client of `run_max.py serve`, which must be there at the end as it was at the start."""
    arguments = ("--model", str(directory), "--served-model-name", "tiny")
    with serve(log, *arguments, "--max-length", str(MAX_LENGTH), **variables) as server:
        yield openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=300)
        assert server.process.poll() is None


@pytest.fixture(scope="module")
def client(
    tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    log = tmp_path_factory.mktemp("serve") / "server.log"
    with served(tiny_directory(CASE), log) as found:
        yield found


def own_scales(weight: NDArray[Any], *, amax: float, name: str) -> NVFP4Weight:
    """Scales as other tools choose them: a global one for each projection, and none searched.

    Packed at load, a fused group has one global scale, and block scales of the least error.
    """
    return encode(weight, scales="absmax", name=name)


def as_it_is(source: Path, target: Path) -> Path:
    return source


def modelopt(source: Path, target: Path) -> Path:
    export_nvfp4(source, target, encode=own_scales, recipe={"scales": "own"})
    return target


def compressed_tensors(source: Path, target: Path) -> Path:
    return to_compressed_tensors(modelopt(source, target.with_name("modelopt")), target)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of checkpoint, made of a dense one.

    Attributes:
        weights: which of `references` has the weights that its server multiplies by.
        write: makes it; returns its directory.
        variables: of the server.
        said: lines of the log about NVFP4: of how many projections, with which error if they were
            packed at load, and whose scales.
    """

    weights: str
    write: Callable[[Path, Path], Path] = as_it_is
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    said: tuple[str, ...] = ()


PACKED_BEFORE = (r"all +{count} +0", "bytes per token: .*; scales: the checkpoint's; .*")
KINDS = {
    "bfloat16": Kind(weights="stored"),
    "nvfp4-at-load": Kind(
        weights="packed at load",
        variables={"ATTNQUANT_QUANT": "nvfp4"},
        said=(r"all +{count} +0 +0\.08\d\d +0\.08\d\d", "bytes per token: .*; scales: mse; .*"),
    ),
    "modelopt": Kind(weights="packed before", write=modelopt, said=PACKED_BEFORE),
    "compressed-tensors": Kind(
        weights="packed before", write=compressed_tensors, said=PACKED_BEFORE
    ),
}


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BFLOAT16.write(tmp_path_factory.mktemp("bfloat16") / "tiny")


@pytest.fixture(scope="module")
def references(bfloat16: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pipeline]:
    """Each kind's weights in float32, in the graph that test_logits.py holds to transformers'."""
    folder = tmp_path_factory.mktemp("references")
    return {
        "stored": Pipeline(dequantize(bfloat16, folder / "stored", lambda key: False)),
        "packed at load": Pipeline(dequantize(bfloat16, folder / "load")),
        "packed before": Pipeline(dequantize(bfloat16, folder / "before", encode=own_scales)),
    }


def continuation(
    client: openai.OpenAI, prompt: str | list[int], expected: Sequence[int]
) -> tuple[list[int], NDArray[np.float64]]:
    """The greedy tokens after a prompt, of these tokens, and their log-probabilities."""
    choice = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        logprobs=1,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    ).choices[0]
    assert choice.model_extra is not None and choice.logprobs is not None
    assert choice.model_extra["prompt_token_ids"] == list(expected)
    tokens, found = choice.model_extra["token_ids"], choice.logprobs.token_logprobs
    assert found is not None and len(tokens) == len(found) == TOKENS
    return tokens, np.array(found, np.float64)


def following(reference: Pipeline, prompt: list[int], tokens: list[int]) -> NDArray[np.float64]:
    """`[TOKENS, vocab]`: log-probabilities after the prompt and none, one, ... of the tokens."""
    return log_probabilities(reference.logits([prompt + tokens[:n] for n in range(TOKENS)]))


# First, so that no other server of this module runs meanwhile.
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_checkpoint_is_served(
    kind: Kind, bfloat16: Path, references: dict[str, Pipeline], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(bfloat16 / "tokenizer.json"))
    asked: list[tuple[str | list[int], list[int]]] = [
        (text, tokenizer.encode(text).ids) for text in prompts.TEXTS
    ]
    for length in prompts.GREEDY_LENGTHS:
        tokens = prompts.prompt(BFLOAT16.ordinary_vocab, length)
        asked.append((tokens, tokens))
    directory, log = kind.write(bfloat16, tmp_path / "checkpoint"), tmp_path / "server.log"
    with served(directory, log, **kind.variables) as client:
        answers = [continuation(client, prompt, tokens) for prompt, tokens in asked]

    clear, others = 0, dict.fromkeys(references.keys() - {kind.weights}, 0.0)
    for (_, prompt), (tokens, found) in zip(asked, answers, strict=True):
        rows = following(references[kind.weights], prompt, tokens)
        chosen = rows[np.arange(TOKENS), tokens]
        assert np.abs(chosen - found).max() < TOLERANCE
        # Each is the best, or another's lead is less than the tolerance explains.
        second, first = np.sort(rows)[:, -2:].T
        assert (first - chosen).max() < 2 * TOLERANCE
        clear += int((first - second > 2 * TOLERANCE).sum())
        for name in others:
            rows = following(references[name], prompt, tokens)
            difference = np.abs(rows[np.arange(TOKENS), tokens] - found).max()
            others[name] = max(others[name], float(difference))
    assert clear > 0.9 * TOKENS * len(asked)
    # No other kind's weights give this.
    assert min(others.values()) > 100 * TOLERANCE

    said = log.read_text(encoding="utf-8")
    assert ("NVFP4" in said) == bool(kind.said)
    assert (f"NVFP4 projections run on {NVFP4Kernel.CPU.value}" in said) == bool(kind.said)
    count = len(DecoderShapes.from_config(BFLOAT16.config()).projections)
    for line in kind.said:
        assert re.search(f"^{line.format(count=count)}$", said, re.MULTILINE), line


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
