"""A Gemma tokenizer in small: byte-fallback BPE with the real file format and special tokens.

Ids: 0 `<pad>`, 1 `<eos>`, 2 `<bos>`, 3 `<unk>`, 4 `<mask>`, 5 `<start_of_turn>`, 6 `<end_of_turn>`,
then 256 byte tokens, `▁` and the printable ASCII characters, then pieces of common words, and
`<unused…>` up to the size asked for. Any text survives encoding and decoding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAD, EOS, BOS, UNK, MASK, START_OF_TURN, END_OF_TURN = range(7)
SPECIAL_TOKENS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "<start_of_turn>",
    "<end_of_turn>",
)
FIRST_ORDINARY_ID = len(SPECIAL_TOKENS)

# Every prefix of these becomes a token, so that text has tokens of one to seven characters.
_WORDS = [
    "▁the",
    "▁of",
    "▁and",
    "▁to",
    "▁in",
    "▁is",
    "▁it",
    "▁that",
    "▁for",
    "▁was",
    "▁on",
    "▁with",
    "▁as",
    "▁are",
    "▁user",
    "▁model",
    "▁capital",
    "▁France",
    "er",
    "ing",
    "ed",
    "ion",
    "ly",
    "al",
    "est",
]

CHAT_TEMPLATE = """{{ bos_token }}
{%- for message in messages -%}
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
{{ message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""


def _vocabulary(size: int, special: Sequence[str]) -> tuple[dict[str, int], list[list[str]]]:
    tokens = list(SPECIAL_TOKENS)
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += ["▁", "\n", *map(chr, range(33, 127))]
    merges = []
    for word in _WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append([word[: end - 1], word[end - 1]])
    needed = len(tokens) + len(special)
    if needed > size:
        raise ValueError(f"a tiny tokenizer needs {needed} tokens or more, not {size}")
    tokens += [f"<unused{index}>" for index in range(size - needed)]
    tokens += special
    return {token: index for index, token in enumerate(tokens)}, merges


def write_tokenizer(
    directory: Path,
    vocab_size: int,
    special: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    """Writes tokenizer.json and tokenizer_config.json, as `AutoTokenizer` reads them.

    Args:
        directory: where to.
        vocab_size: how many tokens there are.
        special: more special tokens; the last ids are theirs.
        chat_template: what makes a prompt of messages.
    """
    vocab, merges = _vocabulary(vocab_size, special)
    added = [
        {
            "id": vocab[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in (*SPECIAL_TOKENS, *special)
    ]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<bos>", "type_id": 1}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<bos>",
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<eos>",
        "mask_token": "<mask>",
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<pad>",
        "tokenizer_class": "GemmaTokenizer",
        "unk_token": "<unk>",
    }
    _write_json(directory / "tokenizer.json", tokenizer)
    _write_json(directory / "tokenizer_config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
