"""The tokenizer's files, from a tiny table of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

pytest.importorskip("gguf", reason="needs the demo extra: pip install -e '.[demo]'")

from attnquant.demo.tokenizer import merges, tokenizer_config, tokenizer_json
from tests.demo import sentencepiece_model as sp
from tests.demo.tiny_gguf import KINDS, SCORES, TOKENS

USER = {"role": "user", "content": " the \n"}
ASSISTANT = {"role": "assistant", "content": "hello"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    for name, content in (
        ("tokenizer.json", tokenizer_json(TOKENS, SCORES, KINDS)),
        ("tokenizer_config.json", tokenizer_config(256)),
        ("config.json", {"model_type": "gemma3_text", "transformers_version": "4.50.0"}),
    ):
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def raw(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference() -> Any:
    table = zip(TOKENS, SCORES, KINDS, strict=True)
    return sp.processor(
        (text.replace(" ", "▁"), score, sp.UNKNOWN if text == "<unk>" else kind)
        for text, score, kind in table
    )


def test_merges_are_the_splits_into_normal_tokens_in_order_of_score() -> None:
    assert merges(TOKENS, SCORES, KINDS) == [
        "h e",
        "▁ t",
        "t h",
        "▁t he",
        "▁ the",
        "th e",
        "t he",
        "e l",
        "l o",
        "he l",
        "h el",
        "el lo",
        "hel lo",
        "h ello",
    ]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello the", ["hello", "▁the"]),
        ("ello lotta", ["ello", "▁", "lo", "t", "t", "a"]),
        ("the  the", ["the", "  ", "the"]),
        ("x\n\n\n   y", ["x", "\n\n", "\n", "   ", "y"]),
        ("a<b>a", ["a", "<b>", "a"]),
        ("é€", ["é", "<0xE2>", "<0x82>", "<0xAC>"]),
        ("<start_of_turn>a<end_of_turn><eos>", ["<start_of_turn>", "a", "<end_of_turn>", "<eos>"]),
        ("<start_of_image>", ["<start_of_image>"]),
        ("", []),
    ],
)
def test_pieces(tokenizer: Any, raw: Tokenizer, text: str, pieces: list[str]) -> None:
    expected = [TOKENS.index(piece) for piece in ("<bos>", *pieces)]
    assert raw.encode(text).ids == expected
    assert tokenizer(text).input_ids == expected
    assert tokenizer.decode(expected[1:]) == text
    assert tokenizer.decode(expected) == "<bos>" + text


def test_special_tokens_are_skipped_and_user_defined_ones_are_text(tokenizer: Any) -> None:
    ids = tokenizer("<b>\n\n<start_of_turn>the<end_of_turn><start_of_image>").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<b>\n\nthe"


@given(st.lists(st.sampled_from([*"ahelot \n\r€é▁\0", "the", " the", "hello", "<b>"])))
def test_ids_are_sentencepieces(raw: Tokenizer, reference: Any, parts: list[str]) -> None:
    text = "".join(parts)
    assert raw.encode(text, add_special_tokens=False).ids == reference.encode(text)


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], "<start_of_turn>user\nthe<end_of_turn>\n"),
        (
            [{"role": "system", "content": "Be brief."}, USER],
            "<start_of_turn>user\nBe brief.\n\nthe<end_of_turn>\n",
        ),
        (
            [USER, ASSISTANT, USER],
            "<start_of_turn>user\nthe<end_of_turn>\n<start_of_turn>model\nhello<end_of_turn>\n"
            "<start_of_turn>user\nthe<end_of_turn>\n",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]}],
            "<start_of_turn>user\nab<end_of_turn>\n",
        ),
    ],
)
def test_chat(
    tokenizer: Any, messages: list[dict[str, Any]], expected: str, generate: bool
) -> None:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    assert text == "<bos>" + expected + "<start_of_turn>model\n" * generate


def test_a_chat_has_one_bos(tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template([USER], return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([ASSISTANT], "message 1 has role assistant, expected user"),
        ([USER, USER], "message 2 has role user, expected assistant"),
        ([USER, {"role": "system", "content": "x"}], "message 2 has role system"),
        ([{"role": "system", "content": "x"}], "found only a system message"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a content part of type image"),
    ],
)
def test_a_chat_out_of_order_is_an_error(
    tokenizer: Any, messages: list[dict[str, Any]], found: str
) -> None:
    with pytest.raises(TemplateError, match=found):
        tokenizer.apply_chat_template(messages, tokenize=False)
