"""The demo checkpoint behind MAX's HTTP API, as the real `openai` client sees it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.golden.data import load_demo
from tests.models import MAX_LENGTH

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "The three primary colours are",
    "In 1969, two astronauts",
    "Dear Sir or Madam,",
    "1, 2, 3, 4, 5,",
]
TOKENS = 24


def complete(client: openai.OpenAI, prompt: str | list[int], **options: object) -> str:
    options = {"max_tokens": TOKENS, "temperature": 0, **options}
    answer = client.completions.create(model="demo", prompt=prompt, **options)
    return answer.choices[0].text


def test_the_model_has_its_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == ["demo"]


def test_a_completion_is_the_references_greedy_text(client: openai.OpenAI) -> None:
    text = complete(client, "The capital of France is")
    assert text.startswith(
        " the capital of the country of France. It is the largest city in France"
    )


def test_token_prompts_are_taken(client: openai.OpenAI) -> None:
    prompt = load_demo().prompts[0]
    assert complete(client, prompt.tokens)


def test_streaming_gives_the_same_text(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len(pieces) > 1
    assert "".join(pieces) == complete(client, PROMPTS[0])


def test_chat_and_chat_streaming_agree(client: openai.OpenAI) -> None:
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    options = {"model": "demo", "messages": messages, "max_tokens": TOKENS, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.completion_tokens <= TOKENS
    stream = client.chat.completions.create(**options, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content


def test_eight_at_once_equal_one_after_the_other(client: openai.OpenAI) -> None:
    alone = [complete(client, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: complete(client, prompt), PROMPTS))
    assert together == alone
    assert len(set(alone)) == len(PROMPTS)


def test_a_stop_token_ends_the_reply(client: openai.OpenAI) -> None:
    # " France" is one token of the greedy reply; it ends it and is not part of it.
    whole = complete(client, PROMPTS[0])
    answer = client.completions.create(
        model="demo",
        prompt=PROMPTS[0],
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"stop_token_ids": [7001]},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert whole.startswith(answer.choices[0].text)
    assert answer.usage.completion_tokens < TOKENS


def test_a_prompt_that_is_too_long_is_refused_and_the_next_is_served(
    client: openai.OpenAI,
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        complete(client, [2] + [818] * (MAX_LENGTH + 1))
    assert 400 <= caught.value.status_code < 500
    assert complete(client, PROMPTS[0])
