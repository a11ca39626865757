"""Requests that would end MAX's server are refused before its worker sees them."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from max.pipelines import PipelineArgs, PipelineConfig
from max.pipelines.context import SamplingParams
from max.pipelines.context.exceptions import InputError
from max.pipelines.lib import SupportedArchitecture
from max.pipelines.modeling.types import RequestID, TextGenerationRequest
from transformers import AutoTokenizer

import attnquant
from attnquant.nn.tokenizer import CheckedRequests, DecoderTokenizer
from tests.models import MAX_LENGTH

CASE, VOCAB = "pattern2-scalar", 640


@pytest.fixture(scope="module")
def tokenizer(tiny_directory: Callable[[str], Path]) -> DecoderTokenizer:
    directory = str(tiny_directory(CASE))
    config = PipelineConfig.from_args(
        PipelineArgs.from_flat_kwargs(
            model_path=directory,
            custom_architectures=["attnquant"],
            device_specs="cpu",
            quantization_encoding="float32",
            max_length=MAX_LENGTH,
        )
    )
    return DecoderTokenizer(directory, config, max_length=MAX_LENGTH)


def ask(
    tokenizer: DecoderTokenizer,
    prompt: str | list[int],
    *,
    echo: bool = False,
    logprobs: int = 0,
    **sampling: Any,
) -> list[int]:
    """The tokens that a request's context holds."""
    request = TextGenerationRequest(
        request_id=RequestID(),
        model_name="tiny",
        prompt=prompt,
        echo=echo,
        logprobs=logprobs,
        sampling_params=SamplingParams(**sampling),
    )
    return list(asyncio.run(tokenizer.new_context(request)).tokens.all)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_k": VOCAB}, {"top_k": -1, "top_p": 0.0}, {"seed": -1}, {"stop_token_ids": [10**9]}],
)
def test_what_is_possible_is_taken(tokenizer: DecoderTokenizer, sampling: dict[str, Any]) -> None:
    assert ask(tokenizer, [0, VOCAB - 1], **sampling) == [0, VOCAB - 1]
    assert len(ask(tokenizer, "the of", **sampling)) > 1
    assert ask(tokenizer, [5], echo=True, **sampling) == [5]
    assert ask(tokenizer, [5], logprobs=3, **sampling) == [5]


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "a prompt without tokens"),
        ([5, VOCAB], {}, "found token 640 in the prompt, expected 0 to 639"),
        ([-1, 5], {}, "found token -1 in the prompt"),
        ([10**30], {}, "found token 1000000000000000000000000000000"),
        ([5], {"top_k": VOCAB + 1}, "top_k is 641, expected at most 640"),
        ([5], {"top_p": float("nan")}, "top_p is nan, expected 0 to 1"),
        ([5], {"seed": 2**64}, "seed is 18446744073709551616, expected"),
        ([5], {"max_new_tokens": 10**30}, "max_new_tokens is 10000"),
        ([5], {"stop_token_ids": [1, 10**30]}, r"stop_token_ids is \[1, 1000"),
        ([5], {"echo": True, "logprobs": 2}, "found echo beside logprobs"),
    ],
)
def test_what_is_not_is_the_clients_error(
    tokenizer: DecoderTokenizer, prompt: list[int], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        ask(tokenizer, prompt, **options)


def test_a_special_token_that_the_embedding_has_not(
    tokenizer: DecoderTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(ask(tokenizer, "the of"))
    monkeypatch.setattr(tokenizer, "_vocab", largest)
    with pytest.raises(InputError, match=f"found token {largest} in the prompt"):
        ask(tokenizer, "the of")


def test_what_transformers_built_its_tokenizer_from_is_not_held(
    tokenizer: DecoderTokenizer, tiny_directory: Callable[[str], Path]
) -> None:
    fresh = AutoTokenizer.from_pretrained(tiny_directory(CASE))
    assert largest_container(fresh) >= len(fresh) > largest_container(tokenizer.delegate)
    worker = pickle.loads(pickle.dumps(tokenizer))  # as MAX's server hands it on
    for served in (tokenizer.delegate, worker.delegate):
        assert served.get_vocab() == fresh.get_vocab()
        assert served.encode("the of and") == fresh.encode("the of and")


def largest_container(tokenizer: Any) -> int:
    """Length of the longest list or dict that a tokenizer of transformers has as an attribute."""
    held = vars(tokenizer).values()
    return max(len(value) for value in held if isinstance(value, list | dict))


def test_no_architecture_lets_requests_pass_unchecked() -> None:
    served = [arch for arch in attnquant.ARCHITECTURES if isinstance(arch, SupportedArchitecture)]
    assert {arch.name for arch in served} == set(attnquant.SERVED)
    assert all(issubclass(arch.tokenizer, CheckedRequests) for arch in served)
