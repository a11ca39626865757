"""Gemma's tokenizer in Google's own library: a SentencePiece model from a table of tokens.

The model is a protocol buffer (sentencepiece_model.proto); the few fields that a BPE needs are
written by hand, so that no protobuf package has to agree with SentencePiece's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from sentencepiece import SentencePieceProcessor

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def processor(pieces: Iterable[tuple[str, float, int]]) -> SentencePieceProcessor:
    """A BPE with byte fallback and no normalization but " " to "▁".

    Args:
        pieces: text, score and kind by id; `<unk>`, `<bos>`, `<eos>` and `<pad>` are among them.
    """
    table = list(pieces)
    ids = {text: index for index, (text, _, _) in enumerate(table)}
    trainer = _integer(3, 2) + _integer(35, 1)  # model_type BPE, byte_fallback
    for number, text in ((40, "<unk>"), (41, "<bos>"), (42, "<eos>"), (43, "<pad>")):
        trainer += _integer(number, ids[text]) + _bytes(number + 5, text.encode())
    normalizer = _bytes(1, b"identity")
    normalizer += _integer(3, 0) + _integer(4, 0) + _integer(5, 1)  # prefix, trim, escape spaces
    model = b"".join(
        _bytes(1, _bytes(1, text.encode()) + _float(2, score) + _integer(3, kind))
        for text, score, kind in table
    )
    model += _bytes(2, trainer) + _bytes(3, normalizer)
    return SentencePieceProcessor(model_proto=model)


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
