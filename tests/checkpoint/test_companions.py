"""The files beside the weights: what a clone without Git LFS or a cut download leaves is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnquant.checkpoint.companions import check_companions
from attnquant.errors import CheckpointError
from tests.checkpoint.files import write

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 33384570\n"
TOKENIZER = b'{"version": "1.0", "model": {"type": "BPE"}}\n'
GOOD = {"tokenizer.json": TOKENIZER, "tokenizer_config.json": b"{}", "chat_template.jinja": b""}


@pytest.mark.parametrize(
    "files",
    [
        GOOD,
        {"tokenizer.json": TOKENIZER},
        {"tokenizer.model": b"\x0a\x0e"},
        GOOD | {"README.md": LFS, "generation_config.json": b'{"eos_token_id": [1, 106]}'},
    ],
    ids=["usual", "alone", "sentencepiece", "more"],
)
def test_good(files: dict[str, bytes], tmp_path: Path) -> None:
    check_companions(write(tmp_path, files))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", LFS, "a Git LFS pointer"),
        ("tokenizer.json", b"", "an empty file"),
        ("tokenizer.json", TOKENIZER[:-9], "36 bytes that are no whole JSON object"),
        ("tokenizer.json", b"[]", "2 bytes that are no whole JSON object"),
        ("tokenizer.json", b"{}", 'no "model"'),
        ("tokenizer.model", LFS, "a Git LFS pointer"),
        ("tokenizer.model", bytes(99), "nothing but zero bytes"),
        ("chat_template.jinja", b"<!DOCTYPE html>", "a web page"),
        ("generation_config.json", b"[]", "a list at the top"),
        ("generation_config.json", b'{"a": 1', "no valid JSON object"),
        ("tokenizer_config.json", LFS, "a Git LFS pointer"),
        ("special_tokens_map.json", b"", "an empty file"),
        ("processor_config.json", b'{"a": 1, "a": 2}', "duplicate key a"),
    ],
)
def test_bad(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_companions(write(tmp_path, {**GOOD, name: content}))
    assert str(caught.value).startswith(f"{tmp_path / name}: found ") and words in str(caught.value)
    assert str(caught.value).isprintable()


def test_none_at_all_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"found no tokenizer, expected tokenizer\.json or"):
        check_companions(write(tmp_path, {"tokenizer_config.json": b"{}"}))


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("to", ["/etc/hostname", "nowhere", "."])
def test_links_and_directories(name: str, to: str, tmp_path: Path) -> None:
    os.unlink(write(tmp_path / "model", GOOD) / name)
    (tmp_path / "model" / name).symlink_to(to)
    with pytest.raises(CheckpointError, match=r"a link out of the dir|cannot be read|a directory"):
        check_companions(tmp_path / "model")
