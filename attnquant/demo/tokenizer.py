"""Gemma's tokenizer, from the token table of a GGUF file to the files that transformers reads.

Gemma's tokenizer is a SentencePiece BPE: it merges, again and again, the adjacent pair whose
joined piece has the best score. GGUF keeps pieces and scores but no merges, and `tokenizer.json`
wants merges, in order. They follow: every split of a normal piece into two normal pieces is a
merge, and the score of the whole ranks it. Pieces of other kinds never take part: SentencePiece
cuts user-defined pieces (runs of newlines, spaces and tabs, HTML tags) out of the text before it
merges anything, and control pieces stand for no text at all. Both become added tokens, which the
`tokenizers` library cuts out first too.

Two pairs of equal score make the same piece. SentencePiece then takes the leftmost, which a list
of merges cannot say; it matters only where the two overlap. Here the longer left part goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Kinds of token in `tokenizer.ggml.token_type` (llama.cpp's llama_token_type).
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

SPACE = "▁"
BOS, EOS, PAD, UNKNOWN = "<bos>", "<eos>", "<pad>", "<unk>"
END_OF_TURN = "<end_of_turn>"

# GGUF calls these two user-defined; they are as special as the turn marks.
_IMAGE_MARKS = ("<start_of_image>", "<end_of_image>")

# The turn format of Google's prompt documentation (https://ai.google.dev/gemma/docs/core/
# prompt-structure). There is no system role: what the system says opens the first user turn.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content | trim -}}
    {%- else -%}
        {%- for part in content or [] -%}
            {%- if part.type != 'text' -%}
                {{- raise_exception('found a content part of type ' ~ part.type
                    ~ ', expected text: this model reads nothing else') -}}
            {%- endif -%}
            {{- part.text | trim -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set next = namespace(role='user', prefix='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' and loop.first -%}
        {%- set next.prefix = text(message.content) + '\\n\\n' -%}
    {%- elif message.role != next.role -%}
        {{- raise_exception('message ' ~ loop.index ~ ' has role ' ~ message.role ~ ', expected '
            ~ next.role ~ ': user and assistant take turns, after at most one system message') -}}
    {%- elif message.role == 'user' -%}
        {{- '<start_of_turn>user\\n' + next.prefix + text(message.content) -}}
        {{- '<end_of_turn>\\n' -}}
        {%- set next.role = 'assistant' -%}
        {%- set next.prefix = '' -%}
    {%- else -%}
        {{- '<start_of_turn>model\\n' + text(message.content) + '<end_of_turn>\\n' -}}
        {%- set next.role = 'user' -%}
    {%- endif -%}
{%- endfor -%}
{%- if next.prefix -%}
    {{- raise_exception('found only a system message, expected a user message after it') -}}
{%- endif -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""


def merges(pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[str]:
    """The merges of a SentencePiece BPE, best first, each as "left right"."""
    normal = {
        piece: score
        for piece, score, kind in zip(pieces, scores, kinds, strict=True)
        if kind == NORMAL
    }
    ranked = [
        (-score, -cut, piece)
        for piece, score in normal.items()
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    ranked.sort()
    return [f"{piece[:-cut]} {piece[-cut:]}" for _, cut, piece in ranked]


def tokenizer_json(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> dict[str, Any]:
    """The content of `tokenizer.json`.

    Args:
        tokens: by id, `tokenizer.ggml.tokens`; a space is "▁" in normal tokens, but plain in
            user-defined ones.
        scores: by id, `tokenizer.ggml.scores`; the greater merges first.
        kinds: by id, `tokenizer.ggml.token_type`.
    """
    pieces = [token.replace(" ", SPACE) for token in tokens]
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": piece,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                # True looks for the piece in normalized text, where spaces have become "▁".
                "normalized": kind == USER_DEFINED,
                "special": kind == CONTROL or piece in _IMAGE_MARKS,
            }
            for index, (piece, kind) in enumerate(zip(pieces, kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, *({"Sequence": {"id": name, "type_id": 0}} for name in "AB")],
            "special_tokens": {BOS: {"id": BOS, "ids": [pieces.index(BOS)], "tokens": [BOS]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": UNKNOWN,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": merges(pieces, scores, kinds),
        },
    }


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """The content of `tokenizer_config.json`.

    transformers 5 builds GemmaTokenizer from the vocabulary, merges and added tokens in
    tokenizer.json, in less than half the time that it takes to load the file as it stands.
    """
    return {
        "tokenizer_class": "GemmaTokenizer",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "add_bos_token": True,
        "add_eos_token": False,
        "model_max_length": max_length,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
