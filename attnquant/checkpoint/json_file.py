"""Small JSON files of a checkpoint (config.json, the shard index), read without trusting them.

`json.loads` alone lets a hostile file spend seconds and gigabytes: on nested lists, on integers of
a million digits, on recursion. The limits here are a hundred times what real files need.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from attnquant.errors import CheckpointError

MAX_JSON_BYTES = 16 << 20
MAX_JSON_CONTAINERS = 200_000
_MAX_DIGITS = 40
_MAX_QUOTED = 160


def quote(text: object) -> str:
    """Text from outside, fit for a one-line message: printable, escaped if need be, not too long.

    A path is shown whole: it is what the user must find.
    """
    shown = str(text)
    if len(shown) > _MAX_QUOTED and not isinstance(text, Path):
        shown = shown[:_MAX_QUOTED] + "..."
    return shown if shown.isprintable() and shown else ascii(shown)


def read_regular_file(path: Path, limit: int, *, offset: int = 0) -> tuple[bytes, int]:
    """Reads at most `limit` bytes from `offset`; returns them and the size of the file.

    Raises:
        CheckpointError: absent, unreadable, or not a regular file (a pipe would block for ever).
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            kind = "a directory" if path.is_dir() else "not a regular file"
            raise CheckpointError(f"{quote(path)}: found {kind}, expected a file; replace it")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(offset)
            return file.read(min(limit, max(size - offset, 0))), size
    except OSError as error:
        raise CheckpointError(
            f"{quote(path)}: cannot be read ({error.strerror}); check that it is there and readable"
        ) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a file that must hold one JSON object without duplicate keys.

    Raises:
        CheckpointError: one line that names the file and what is wrong with it.
    """
    data, size = read_regular_file(path, MAX_JSON_BYTES)
    if size > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{quote(path)}: found {size} bytes, expected at most {MAX_JSON_BYTES}; "
            "this is not a model's JSON file"
        )
    try:
        return parse_json_object(data)
    except ValueError as error:
        what = foreign_format(data)
        found = f"found {what}" if what else f"found no valid JSON object ({error})"
        raise CheckpointError(
            f"{quote(path)}: {found}, expected a JSON object; download the file again"
        ) from None


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Parses UTF-8 bytes that hold one JSON object.

    Raises:
        ValueError: not UTF-8, not JSON, not an object, a duplicate key, or beyond the limits.
    """
    if data.count(b"[") + data.count(b"{") > MAX_JSON_CONTAINERS:
        raise ValueError(f"more than {MAX_JSON_CONTAINERS} lists and objects")
    try:
        value = _DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} at the top")
    return value


def foreign_format(start: bytes) -> str | None:
    """What a file that begins with these bytes is, if it is one of the usual stand-ins."""
    text = start[:512].lstrip().lower()
    if not start:
        return "an empty file"
    if text.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer instead of the content (run `git lfs pull`)"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml", b"<error")):
        return "a web page instead of the content (a failed or unauthorized download)"
    if start.startswith(b"GGUF"):
        return "a GGUF file"
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")):
        return "a PyTorch pickle"
    if text.startswith(b'{"error'):
        return "a server's JSON error message instead of the content (a failed download)"
    if not start.strip(b"\0"):
        return "nothing but zero bytes (an interrupted download)"
    return None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {quote(key)}")
            seen.add(key)
    return result


def _short_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


# Made once: `json.loads` with hooks would make a decoder for each of a header's tensors.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_int=_short_int)
