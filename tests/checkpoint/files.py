"""Builds good and broken checkpoint files byte by byte, without the code under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file's bytes: `header` is JSON to be dumped, or bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def safetensors(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        begin = len(data)
        data += np.ascontiguousarray(array).tobytes()
        header[name] = entry(NAMES[array.dtype.name], list(array.shape), begin, len(data))
    return raw(header, data)


def write(directory: Path, files: Mapping[str, Any]) -> Path:
    """Writes files: dicts of arrays as safetensors, bytes as they are, everything else as JSON."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if name.endswith(".safetensors") and isinstance(content, dict):
            content = safetensors(content)
        elif not isinstance(content, bytes):
            content = json.dumps(content).encode()
        (directory / name).write_bytes(content)
    return directory
