"""The real Gemma 3 270M: its tokenizer against Google's SentencePiece, its config and tensors."""

from __future__ import annotations

import inspect
import json
import random
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from attnquant.checkpoint import Checkpoint
from tests.demo import sentencepiece_model as sp

WORDS = """
The quick brown fox, naïve café, Füße, ΑΒΓ αβγ, Привет мир, שלום עולם, مرحبا بالعالم, नमस्ते दुनिया,
こんにちは世界, 你好，世界, 안녕하세요, สวัสดีชาวโลก, 👩‍👩‍👧‍👦 🇫🇷 🤽🏽‍♀️ ✅, e\u0301 ñ, ﬁ, Ⅷ, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢,
1,234,567.89, 2^10=1024, don't, I'll, "quoted", C:\\path\\x, https://example.org/a?b=c&d=%20,
<b>bold</b>, </blockquote>, [multimodal], snake_case, CamelCase, x+=1;, #include <stdio.h>,
no\u00a0break, zero\u200bwidth, \ufeffbom
"""
SPACES = [
    "",
    " ",
    "  ",
    "   ",
    " " * 31,
    " " * 32,
    " " * 67,
    "\t",
    "\t\t\t",
    "\n",
    "\n" * 33,
    "\r\n",
]
FIXED = [
    "",
    "The capital of France is",
    "▁ literal ▁▁ marks",
    "\0\x01\x1b[0m\x7f",
    "\U0010ffff\ue000\ufffd",
    "a" * 500,
    "ab" * 300,
    "=" * 100 + "-" * 101 + "#" * 7,
    "def f(x):\n    return {\n\t'a': [x ** 2 for _ in range(3)],\n    }\n",
    *SPACES,
]


def texts() -> list[str]:
    """A few hundred: words, code, spaces, and random mixtures of all."""
    source = inspect.getsource(json) + inspect.getsource(textwrap)
    lines = source.splitlines(keepends=True)
    paragraphs = ["".join(lines[start : start + 8]) for start in range(0, len(lines), 8)]
    words = WORDS.split()
    mix = random.Random(3)
    mixed = [
        "".join(mix.choice(words) + mix.choice(SPACES) for _ in range(mix.randrange(1, 12)))
        for _ in range(200)
    ]
    noise = [
        "".join(
            chr(mix.choice((0x7F, 0x7FF, 0xD7FF)) * mix.randrange(1000) // 1000) for _ in "x" * 40
        )
        for _ in range(50)
    ]
    return FIXED + words + paragraphs + mixed + noise


@pytest.fixture(scope="module")
def raw(demo_directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer(demo_directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_directory)


@pytest.fixture(scope="module")
def reference(raw: Tokenizer) -> Any:
    """Gemma numbers its normal tokens in the order of their scores, so -id serves as score."""
    added = raw.get_added_tokens_decoder()
    image_marks = ("<start_of_image>", "<end_of_image>")

    def kind(index: int, piece: str) -> int:
        if piece == "<unk>":
            return sp.UNKNOWN
        if index in added:
            user_defined = not added[index].special or piece in image_marks
            return sp.USER_DEFINED if user_defined else sp.CONTROL
        return sp.BYTE if piece.startswith("<0x") and len(piece) == 6 else sp.NORMAL

    pieces = ((index, raw.id_to_token(index)) for index in range(raw.get_vocab_size()))
    return sp.processor((piece, -float(index), kind(index, piece)) for index, piece in pieces)


def test_the_known_ids(raw: Tokenizer, tokenizer: Any) -> None:
    text, ids = "The capital of France is", [2, 818, 5279, 529, 7001, 563]
    assert raw.encode(text).ids == ids
    assert tokenizer(text).input_ids == ids


def test_hundreds_of_texts_have_sentencepieces_ids(
    raw: Tokenizer, tokenizer: Any, reference: Any
) -> None:
    samples = texts()
    assert len(samples) > 300
    for text in samples:
        expected = reference.encode(text)
        assert raw.encode(text, add_special_tokens=False).ids == expected, text
        assert tokenizer(text).input_ids == [2, *expected], text


@settings(max_examples=300)
@given(st.text())
def test_any_text_has_sentencepieces_ids_and_comes_back(
    raw: Tokenizer, reference: Any, text: str
) -> None:
    ids = raw.encode(text, add_special_tokens=False).ids
    assert ids == reference.encode(text)
    assert raw.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")


def test_texts_come_back(tokenizer: Any) -> None:
    for text in texts():
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("▁", " ")


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("<pad>", 0),
        ("<eos>", 1),
        ("<bos>", 2),
        ("<unk>", 3),
        ("<mask>", 4),
        ("<start_of_turn>", 105),
        ("<end_of_turn>", 106),
        ("<start_of_image>", 255999),
        ("<end_of_image>", 256000),
        ("<unused99>", 256001),
    ],
)
def test_special_tokens_are_one_id_and_are_skipped(
    raw: Tokenizer, tokenizer: Any, text: str, index: int
) -> None:
    x = tokenizer.convert_tokens_to_ids("x")
    assert raw.encode(f"x{text}x").ids == [2, x, index, x]
    assert tokenizer(f"x{text}x").input_ids == [2, x, index, x]
    assert tokenizer.decode([x, index, x], skip_special_tokens=True) == "xx"
    assert tokenizer.decode([x, index, x]) == f"x{text}x"


def test_a_chat(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids[:4] == [2, 105, 2364, 107]
    assert ids[-5:] == [106, 107, 105, 4368, 107]
    expected = "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert tokenizer.decode(ids) == expected


def test_the_config_and_tensors_are_gemma_3_270ms(demo_directory: Path) -> None:
    checkpoint = Checkpoint.open(demo_directory)
    config = AutoConfig.from_pretrained(demo_directory)
    layers, hidden, inner, head = 18, 640, 2048, 256
    assert config.num_hidden_layers == layers
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [
        5,
        11,
        17,
    ]
    assert config.sliding_window == 512
    assert config.query_pre_attn_scalar == config.head_dim == head
    assert config.max_position_embeddings == 32768
    shapes = {
        "self_attn.q_proj": (4 * head, hidden),
        "self_attn.k_proj": (head, hidden),
        "self_attn.v_proj": (head, hidden),
        "self_attn.o_proj": (hidden, 4 * head),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "pre_feedforward_layernorm": (hidden,),
        "post_feedforward_layernorm": (hidden,),
    }
    expected = {"model.embed_tokens.weight": (262144, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        expected |= {f"model.layers.{layer}.{name}.weight": s for name, s in shapes.items()}
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == expected
    for name, shape in expected.items():
        values = checkpoint.array(name)[:1000]
        assert values.dtype == ml_dtypes.bfloat16
        assert np.isfinite(values.astype(np.float32)).all(), name
        assert len(shape) == 1 or 1e-3 < values.astype(np.float32).std() < 1, name


def test_generation_ends_at_the_end_of_the_text_or_turn(demo_directory: Path) -> None:
    assert GenerationConfig.from_pretrained(demo_directory).eos_token_id == [1, 106]
