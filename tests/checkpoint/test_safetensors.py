"""One file's header: everything good is read to the bit, everything else is one clear line."""

from __future__ import annotations

import math
import os
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as reference_load
from safetensors.numpy import save as reference_save

from attnquant.checkpoint.safetensors import (
    DTYPES,
    MAX_HEADER_BYTES,
    TensorSpec,
    build_header,
    read_header,
)
from attnquant.errors import CheckpointError
from tests.checkpoint.files import entry, raw

GOOD = {"a": entry("F32", [2, 2], 0, 16), "b": entry("BF16", [3], 16, 22)}
DATA = bytes(22)


def one(**changes: Any) -> bytes:
    return raw({"a": {**entry("F32", [2, 2], 0, 16), **changes}}, bytes(16))


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "an empty file"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "a file of 7 bytes"),
    "length only": (struct.pack("<Q", 2), "a file of 8 bytes"),
    "truncated header": (raw(GOOD)[:40], "truncated"),
    "truncated data": (raw(GOOD, DATA[:-1]), "the file is truncated"),
    "extended": (raw(GOOD, DATA + b"\0"), "extended by 1 bytes"),
    "absurd length": (raw(GOOD, DATA, length=2**63), "a header length of 9223372036854775808"),
    "zero length": (raw(GOOD, DATA, length=0), "a header length of 0"),
    "length beyond the file": (raw(GOOD, DATA, length=4096), "truncated"),
    "length one short": (raw(GOOD, DATA, length=len(raw(GOOD)) - 9), "not JSON of the safetensors"),
    "length one long": (raw(GOOD, DATA, length=len(raw(GOOD)) - 7), "after the header's JSON"),
    "not an object": (raw(b"[1, 2]"), "does not begin with '{'"),
    "unclosed": (raw(b'{"a": {"dtype": "F32"'), "not JSON of the safetensors form"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "not UTF-8 (byte 10)"),
    "entry is a number": (raw({"a": 1}), "not JSON of the safetensors form"),
    "trailing comma": (raw(b'{"__metadata__": {},}'), "not JSON of the safetensors form"),
    "nested bomb": (raw(b'{"a": ' + b"[" * 10_000 + b"}"), "not JSON of the safetensors form"),
    "list bomb": (
        raw(b'{"a": {"b": [' + b"[]," * 10_000 + b"0]}}"),
        "not JSON of the safetensors form",
    ),
    "digit bomb": (raw(b'{"a": {"shape": [' + b"9" * 900 + b"]}}"), "a number of 900 digits"),
    "lone surrogate": (raw(b'{"\\ud800": {}}'), "an impossible name"),
    "empty name": (raw({"": entry("U8", [1], 0, 1)}, b"\0"), "an impossible name"),
    "duplicate name": (
        raw(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"\\u0061":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            b"\0\0",
        ),
        "tensor a: found the name twice",
    ),
    "duplicate field": (
        raw(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"\0"),
        "duplicate key dtype",
    ),
    "field missing": (raw({"a": {"dtype": "U8", "shape": [1]}}), "found the fields dtype, shape"),
    "field unknown": (one(device="cuda"), "data_offsets, device"),
    "metadata of numbers": (
        raw({"__metadata__": {"format": 1}}),
        "__metadata__: found it twice, or not strings",
    ),
    "dtype unknown": (one(dtype="F4"), "found dtype F4, expected one of BOOL, U8"),
    "dtype with a newline": (one(dtype="F\n32"), r"found dtype 'F\n32'"),
    "dtype is a list": (one(dtype=["F32"]), "found dtype ['F32']"),
    "shape negative": (one(shape=[-2, -2]), "found shape [-2, -2]"),
    "shape fractional": (one(shape=[2.0, 2]), "found shape [2.0, 2]"),
    "shape boolean": (one(shape=[True, 4]), "found shape [True, 4]"),
    "shape is a number": (one(shape=4), "found shape 4"),
    "shape of nine": (one(shape=[1] * 8 + [4]), "expected at most 8 whole numbers"),
    "shape wraps around": (one(shape=[2**62 + 1, 4]), "found 16 bytes of data, expected 737869762"),
    "shape too large": (one(shape=[2, 3]), "expected 24 for F32 [2, 3]"),
    "zero size": (
        raw({"a": entry("F32", [0, 4], 0, 0)}),
        "tensor a: found shape [0, 4], without elements",
    ),
    "offsets reversed": (one(data_offsets=[16, 0]), "found data_offsets [16, 0]"),
    "offsets negative": (one(data_offsets=[-16, 0]), "found data_offsets [-16, 0]"),
    "offsets of three": (one(data_offsets=[0, 8, 16]), "found data_offsets [0, 8, 16]"),
    "offsets null": (one(data_offsets=None), "found data_offsets None"),
    "overlap": (
        raw({"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 4, 12)}, bytes(12)),
        "tensor b: found an overlap of 4 bytes after a",
    ),
    "same bytes twice": (
        raw({"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 0, 8)}, bytes(8)),
        "an overlap of 8 bytes",
    ),
    "gap": (
        raw({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 8, 12)}, bytes(12)),
        "tensor b: found a gap of 4 bytes after a",
    ),
    "gap at the start": (raw({"a": entry("U8", [4], 4, 8)}, bytes(8)), "after the header"),
    "git lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "a Git LFS pointer instead of the content (run `git lfs pull`)",
    ),
    "web page": (b"\n<!DOCTYPE html><html><body>404</body></html>", "a web page instead of"),
    "xml error": (b"<?xml version='1.0'?><Error>AccessDenied</Error>", "a web page instead of"),
    "json error": (b'{"error":"Repository not found"}', "a server's JSON error message"),
    "pickle": (b"PK\x03\x04" + bytes(60), "a PyTorch pickle"),
    "gguf": (b"GGUF\3\0\0\0" + bytes(60), "a GGUF file"),
    "zeros": (bytes(4096), "nothing but zero bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_header_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, words = BROKEN[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert words in message
    assert str(path) in message
    assert message.isprintable() and len(message) < 800


def test_good_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    content = raw({"__metadata__": {"note": 'a "}{" b'}, **GOOD}, DATA)
    path.write_bytes(content)
    tensors = read_header(path)
    data = len(content) - len(DATA)
    assert list(tensors) == ["a", "b"]
    a, b = tensors.values()
    assert (a.dtype, a.shape, a.start, a.end) == ("F32", (2, 2), data, data + 16)
    assert (b.dtype, b.shape, b.start, b.end, b.nbytes) == ("BF16", (3,), data + 16, data + 22, 6)


@pytest.mark.parametrize(
    "header", [b"{}", b"{ }  ", b'{"__metadata__":{}}', b'{"__metadata__":{ }}']
)
def test_header_without_tensors(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw(header))
    assert read_header(path) == {}


def test_directory_and_absent_file_and_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name, words in (
        ("", "found a directory, expected a file"),
        ("absent.safetensors", "cannot be read (No such file or directory)"),
        ("pipe.safetensors", "not a regular file"),
    ):
        with pytest.raises(CheckpointError) as caught:
            read_header(tmp_path / name)
        assert words in str(caught.value)


def test_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 4 << 30) + b"{")
        file.truncate(8 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="a header length of 4294967296"):
        read_header(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


@pytest.mark.parametrize(
    "pattern",
    [b" ", b"[],", b'"",', b'"":{},', b'"a":{"b":"', b"\\", b'{"a":', b'"\\"', b'"a" :{ "b" '],
)
@pytest.mark.parametrize("name", [b"a", b"__metadata__"])
def test_longest_hostile_header_takes_under_two_seconds(
    name: bytes, pattern: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    body = b'{"' + name + b'":{' + pattern * (MAX_HEADER_BYTES // len(pattern) - 99)
    path.write_bytes(raw(body))
    start = time.process_time()
    with pytest.raises(CheckpointError):
        read_header(path)
    assert time.process_time() - start < 2


arrays = st.tuples(
    st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 5), max_size=4), st.randoms()
)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(min_size=1), arrays, max_size=6))
def test_build_header_and_read_header_are_inverse(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Any]
) -> None:
    tensors.pop("__metadata__", None)
    tensors = {name: spec for name, spec in tensors.items() if _utf8(name)}
    specs = {
        name: TensorSpec(dtype=dtype, shape=tuple(shape))
        for name, (dtype, shape, _) in tensors.items()
    }
    sizes = [math.prod(spec.shape) * DTYPES[spec.dtype].itemsize for spec in specs.values()]
    header = build_header(specs)
    assert len(header) % 64 == 0
    path = tmp_path_factory.getbasetemp() / "round-trip.safetensors"
    path.write_bytes(header + bytes(sum(sizes)))
    found = read_header(path)
    assert list(found) == list(specs)
    assert all(
        (found[name].dtype, found[name].shape) == (s.dtype, s.shape) for name, s in specs.items()
    )
    assert [info.nbytes for info in found.values()] == sizes


def test_agrees_with_the_reference_library(tmp_path: Path) -> None:
    tensors = {
        "scalar": np.full((), 3.5, np.float32),
        "matrix": np.arange(12, dtype=np.int16).reshape(3, 4),
        "bytes": np.arange(7, dtype=np.uint8),
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(reference_save(tensors, metadata={"format": "pt"}))
    found = read_header(path)
    content = path.read_bytes()
    assert set(found) == set(tensors)
    for name, info in found.items():
        values = np.frombuffer(content[info.start : info.end], info.numpy_dtype)
        assert np.array_equal(values.reshape(info.shape), tensors[name])

    ours = build_header(found) + b"".join(content[i.start : i.end] for i in found.values())
    loaded = reference_load(ours)
    assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)


def _utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
