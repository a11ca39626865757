"""The safetensors container: strict reading, and writing, of one file's header.

A file is eight bytes of little-endian header length n, n bytes of JSON that map every tensor's name
to its dtype, shape and byte range, and then the data, which the ranges tile without gap or overlap.
(https://github.com/huggingface/safetensors, "Format".) MAX maps what the header says, so nothing
may reach MAX that was not checked here.

The JSON is scanned entry by entry, each within a bounded window, instead of being parsed as a
whole: a hostile header can then cost neither memory nor seconds beyond its own size, and that is
bounded before anything is allocated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from attnquant.checkpoint.json_file import (
    foreign_format,
    parse_json_object,
    quote,
    read_regular_file,
)
from attnquant.errors import CheckpointError

# Safetensors' own limit is 100 MB. These keep the worst file under two seconds; no Gemma has 5,000.
MAX_HEADER_BYTES = 8 << 20
MAX_TENSORS = 1 << 16
MAX_RANK = 8
_MAX_NAME = 4096
_MAX_ENTRY = 1024
_MAX_METADATA = 1 << 20
_PREFIX = 8

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
DTYPE_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}

# Unrolled loops: no two alternatives begin with the same character, so that matching is linear.
_WS = r"[ \t\n\r]*"
_STRING = r'"[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*"'
_PAIR = rf"{_STRING}{_WS}:{_WS}{_STRING}{_WS}"
_NAME = re.compile(rf"{_WS}({_STRING}){_WS}:{_WS}")
_ENTRY = re.compile(rf'\{{[^{{}}"]*(?:{_STRING}[^{{}}"]*)*\}}')
_METADATA = re.compile(rf"\{{{_WS}(?:{_PAIR}(?:,{_WS}{_PAIR})*)?\}}")
_NEXT = re.compile(rf"{_WS}([,}}])")
_EMPTY = re.compile(rf"\{{{_WS}\}}")

_AGAIN = "download or convert the file again"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a tensor is, wherever it lies: its safetensors dtype (`BF16`) and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class TensorInfo(TensorSpec):
    """Where one tensor lies: bytes `[start, end)` of `file`, counted from the file's beginning."""

    name: str
    start: int
    end: int
    file: Path

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype; bfloat16 and the float8 types are ml_dtypes'."""
        return DTYPES[self.dtype]


def where(name: str, spec: TensorSpec | None) -> str:
    """How an error names a tensor: with its file, where that is known."""
    file = f"{quote(spec.file)}: " if isinstance(spec, TensorInfo) else ""
    return f"{file}tensor {quote(name)}"


def directory_of(tensors: Mapping[str, TensorSpec]) -> str:
    """How an error on a tensor that is not there begins: where the others lie, if that is known."""
    spec = next(iter(tensors.values()), None)
    return f"{quote(spec.file.parent)}: " if isinstance(spec, TensorInfo) else ""


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Reads and checks the header of one safetensors file, in the order of its entries.

    Raises:
        CheckpointError: one line on whatever is not as the format demands: the file's kind or
            size, the header's length, encoding or entries, a dtype, a shape, a byte range.
    """
    start, size = read_regular_file(path, 512)
    length = int.from_bytes(start[:_PREFIX], "little")
    plausible = _PREFIX + 2 <= _PREFIX + length <= size and start[_PREFIX : _PREFIX + 1] == b"{"
    if not plausible or length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{quote(path)}: {_why_no_header(start, length, size)}")
    header, _ = read_regular_file(path, length, offset=_PREFIX)
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{quote(path)}: found a header that is not UTF-8 (byte {_PREFIX + error.start}), "
            f"expected UTF-8 JSON; {_AGAIN}"
        ) from None
    tensors: dict[str, TensorInfo] = {}
    for name, entry in _entries(path, text):
        if name in tensors:
            raise _bad(path, name, "found the name twice", "expected every name once")
        if len(tensors) == MAX_TENSORS:
            raise _bad(path, name, f"found more than {MAX_TENSORS} tensors", "expected a model's")
        tensors[name] = _tensor(path, name, entry, data_start=_PREFIX + length)
    _check_ranges(path, tensors.values(), _PREFIX + length, size)
    return tensors


def build_header(tensors: Mapping[str, TensorSpec]) -> bytes:
    """The header of a file that holds these tensors, in this order.

    The length prefix is included; the JSON is padded with spaces, so that data begins at a multiple
    of 64 bytes, the largest vector that a kernel loads.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in tensors.items():
        end = offset + spec.nbytes
        entries[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_PREFIX + len(text)) % 64)
    return len(text).to_bytes(_PREFIX, "little") + text


def _why_no_header(start: bytes, length: int, size: int) -> str:
    what = foreign_format(start)
    if what is not None:
        return f"found {what}, expected safetensors; download the real file"
    if size < _PREFIX + 2:
        return f"found a file of {size} bytes, expected a safetensors header; {_AGAIN}"
    if length < 2 or length > MAX_HEADER_BYTES:
        return (
            f"found a header length of {length} bytes, expected 2 to {MAX_HEADER_BYTES}; "
            f"this is not safetensors or it is damaged: {_AGAIN}"
        )
    if length > size - _PREFIX:
        return (
            f"found a header length of {length} bytes in a file of {size}, expected the file to "
            f"be longer; it is truncated: {_AGAIN}"
        )
    return f"found a header that does not begin with '{{', expected JSON; {_AGAIN}"


def _entries(path: Path, text: str) -> Iterable[tuple[str, str]]:
    """Yields every tensor's name and the JSON text of its entry."""
    position, closed, metadata_seen = 1, False, False
    if match := _EMPTY.match(text):
        position, closed = match.end(), True
    while not closed:
        match = _NAME.match(text, position, position + _MAX_NAME)
        if match is None:
            raise _malformed(path, text, position)
        name = json.loads(match[1]) if "\\" in match[1] else match[1][1:-1]
        if not name or not _encodable(name):
            raise _bad(path, name, "found an impossible name", "expected Unicode text")
        position = match.end()
        if name == "__metadata__":
            match = _METADATA.match(text, position, position + _MAX_METADATA)
            if match is None or metadata_seen:
                found = "found it twice, or not strings by name"
                raise _bad(path, name, found, f"expected at most {_MAX_METADATA} bytes of them")
            metadata_seen = True
        else:
            match = _ENTRY.match(text, position, position + _MAX_ENTRY)
            if match is None:
                raise _malformed(path, text, position)
            yield name, match[0]
        match = _NEXT.match(text, match.end())
        if match is None:
            raise _malformed(path, text, position)
        position, closed = match.end(), match[1] == "}"
    if text[position:].strip():
        raise CheckpointError(
            f"{quote(path)}: found {quote(text[position : position + 40])} after the header's JSON,"
            f" expected spaces only; {_AGAIN}"
        )


def _malformed(path: Path, text: str, position: int) -> CheckpointError:
    return CheckpointError(
        f"{quote(path)}: found a header that is not JSON of the safetensors form at character "
        f"{position} ({quote(text[position : position + 40])}), expected "
        f'"name": {{"dtype", "shape", "data_offsets"}}; {_AGAIN}'
    )


def _tensor(path: Path, name: str, entry: str, data_start: int) -> TensorInfo:
    try:
        fields = parse_json_object(entry.encode())
    except ValueError as error:
        raise _bad(path, name, f"found a malformed entry ({error})", "expected JSON") from None
    if set(fields) != {"dtype", "shape", "data_offsets"}:
        found = ", ".join(map(quote, fields)) or "nothing"
        raise _bad(path, name, f"found the fields {found}", "expected dtype, shape, data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise _bad(path, name, f"found dtype {quote(dtype)}", f"expected one of {known}")
    if not _naturals(shape) or len(shape) > MAX_RANK:
        expected = f"expected at most {MAX_RANK} whole numbers"
        raise _bad(path, name, f"found shape {quote(shape)}", expected)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        expected = "expected [begin, end] with begin <= end"
        raise _bad(path, name, f"found data_offsets {quote(offsets)}", expected)
    if 0 in shape:
        raise _bad(path, name, f"found shape {shape}, without elements", "expected at least one")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if nbytes != offsets[1] - offsets[0]:
        raise _bad(
            path,
            name,
            f"found {offsets[1] - offsets[0]} bytes of data",
            f"expected {quote(nbytes)} for {dtype} {shape}",
        )
    return TensorInfo(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        start=data_start + offsets[0],
        end=data_start + offsets[1],
        file=path,
    )


def _check_ranges(path: Path, tensors: Iterable[TensorInfo], data_start: int, size: int) -> None:
    """The ranges must tile the data: each begins where its predecessor ends, the last at `size`."""
    end, before = data_start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != end:
            kind = "an overlap of" if tensor.start < end else "a gap of"
            found = f"found {kind} {abs(tensor.start - end)} bytes after {quote(before)}"
            raise _bad(path, tensor.name, found, "expected data without gap or overlap")
        end, before = tensor.end, tensor.name
    if end > size:
        raise CheckpointError(
            f"{quote(path)}: found {size} bytes, expected {end} to hold {quote(before)}; "
            f"the file is truncated: {_AGAIN}"
        )
    if end < size:
        raise CheckpointError(
            f"{quote(path)}: found {size} bytes, expected {end}; the file is extended by "
            f"{size - end} bytes that no tensor owns: {_AGAIN}"
        )


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _encodable(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _bad(path: Path, name: str, found: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{quote(path)}: tensor {quote(name)}: {found}, {expected}; {_AGAIN}")
