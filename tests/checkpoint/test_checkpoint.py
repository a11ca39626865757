"""Whole directories: what is read, and the one line that each broken one gets."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attnquant.checkpoint import Checkpoint
from attnquant.errors import CheckpointError
from tests.checkpoint.files import safetensors, write

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(4, dtype=np.float32).astype(ml_dtypes.bfloat16)
CONFIG = {"config.json": {"model_type": "gemma3_text"}}


def index(**weight_map: Any) -> dict[str, Any]:
    return {"metadata": {"total_size": 32}, "weight_map": weight_map}


def sharded() -> dict[str, Any]:
    return {**CONFIG, INDEX: index(a=ONE, b=TWO), ONE: {"a": A}, TWO: {"b": B}}


@pytest.mark.parametrize(
    "files",
    [
        {**CONFIG, "model.safetensors": {"a": A, "b": B}},
        sharded(),
        {**CONFIG, ONE: {"a": A}, TWO: {"b": B}},
        {**CONFIG, "x.safetensors": {"a": A}, "y.safetensors": {"b": B}, "._x.safetensors": b"?"},
    ],
    ids=["single", "indexed", "numbered", "unnumbered"],
)
def test_good_checkpoints(files: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "model", files))
    assert checkpoint.config == {"model_type": "gemma3_text"}
    assert set(checkpoint.tensors) == {"a", "b"}
    for name, expected in (("a", A), ("b", B)):
        found = checkpoint.array(name)
        assert found.dtype == expected.dtype and np.array_equal(found, expected)
        assert not found.flags.writeable and not found.flags.owndata
        checkpoint.release(name)
        assert np.array_equal(found, expected)


def test_scalars_and_float8(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "scalar": np.full((), 2.5, np.float32),
        "scales": np.array([[1.0, 448.0]], ml_dtypes.float8_e4m3fn),
    }
    checkpoint = Checkpoint.open(write(tmp_path / "model", {**CONFIG, "model.safetensors": values}))
    for name, expected in values.items():
        found = checkpoint.array(name)
        assert found.shape == expected.shape and found.tobytes() == expected.tobytes()


def _change(**changes: Any) -> dict[str, Any]:
    files = {**sharded(), **{name.replace("INDEX", INDEX): v for name, v in changes.items()}}
    return {name: content for name, content in files.items() if content is not None}


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no config": (
        {"model.safetensors": {"a": A}},
        "config.json: cannot be read (No such file or directory)",
    ),
    "config is a list": ({**sharded(), "config.json": [1]}, "(a list at the top)"),
    "config is cut off": ({**sharded(), "config.json": b'{"a": '}, "config.json: found no valid"),
    "config is empty": ({**sharded(), "config.json": b""}, "config.json: found an empty file"),
    "config twice": (
        {**sharded(), "config.json": b'{"head_dim": 1, "head_dim": 2}'},
        "duplicate key head_dim",
    ),
    "config not UTF-8": ({**sharded(), "config.json": b'{"a": "\xff"}'}, "not UTF-8 at byte 7"),
    "config nested": ({**sharded(), "config.json": b'{"a":' + b"[" * 99_999}, "nested too deeply"),
    "config bomb": ({**sharded(), "config.json": b"[]," * 300_000}, "more than 200000 lists"),
    "config digits": ({**sharded(), "config.json": b'{"a":' + b"1" * 5000 + b"}"}, "5000 digits"),
    "config is a pointer": (
        {**sharded(), "config.json": b"version https://git-lfs.github.com/spec/v1\n"},
        "config.json: found a Git LFS pointer",
    ),
    "no weights": (CONFIG, "found no weights, expected model.safetensors or model.safetensors.ind"),
    "other weights": (
        {**CONFIG, "pytorch_model.bin": b"PK"},
        "found weights as pytorch_model.bin, expected model.safetensors",
    ),
    "no tensor": ({**CONFIG, "model.safetensors": {}}, "found no tensor"),
    "index without a map": (_change(INDEX={"metadata": {}}), "found no weight_map"),
    "index with an empty map": (_change(INDEX=index()), "found no weight_map"),
    "index with a list": (_change(INDEX={"weight_map": ["a"]}), "found no weight_map"),
    "index is a web page": (_change(INDEX=b"<html></html>"), "index.json: found a web page"),
    "index with a number": (_change(INDEX=index(a=3, b=TWO)), "tensor a: found shard 3"),
    "index leads up": (
        _change(INDEX=index(a="../x.safetensors", b=TWO)),
        "tensor a: found shard ../x.safetensors",
    ),
    "index leads to the root": (_change(INDEX=index(a="/x.safetensors", b=TWO)), "without a path"),
    "index leads down": (_change(INDEX=index(a="y/x.safetensors", b=TWO)), "without a path"),
    "index with a backslash": (_change(INDEX=index(a="..\\x.safetensors")), "without a path"),
    "index with a zero byte": (_change(INDEX=index(a="\0.safetensors")), "without a path"),
    "index names a pickle": (_change(INDEX=index(a="model.bin", b=TWO)), "without a path"),
    "shard is empty": ({**sharded(), ONE: b""}, f"{ONE}: found an empty file"),
    "shard is not there": (
        {name: content for name, content in sharded().items() if name != TWO},
        f"names 1 absent shards, {TWO}; download them",
    ),
    "tensor is absent": (
        _change(INDEX=index(a=ONE, b=TWO, c=TWO)),
        f"tensor c: the index places it in {TWO}, absent there",
    ),
    "tensor in the other shard": (
        _change(INDEX=index(a=TWO, b=TWO)),
        f"stray shard that {INDEX} does not name",
    ),
    "tensors swapped": (
        _change(INDEX=index(a=TWO, b=ONE)),
        f"tensor a: the index places it in {TWO}, found it in {ONE}",
    ),
    "tensor not in the index": (
        {**sharded(), TWO: {"b": B, "c": A}},
        f"{TWO}: tensor c: found it in the shard but not in {INDEX}",
    ),
    "tensor in two shards": (
        {**sharded(), TWO: {"b": B, "a": A}},
        f"{TWO}: tensor a: found it in {ONE} too",
    ),
    "stray shard": (
        {**sharded(), "model.safetensors": {"a": A}},
        f"model.safetensors: found a stray shard that {INDEX} does not name",
    ),
    "same tensor, no index": (
        {**CONFIG, "x.safetensors": {"a": A}, "y.safetensors": {"a": A}},
        "y.safetensors: tensor a: found it in x.safetensors too",
    ),
    "series with a hole": (
        {**CONFIG, ONE: {"a": A}},
        "found 1 of the 2 shards model-*-of-00002.safetensors",
    ),
    "broken shard": (
        {**sharded(), TWO: safetensors({"b": B})[:-1]},
        f"{TWO}: found 7",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    files, words = BROKEN[name]
    directory = write(tmp_path / "model", files)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    assert time.process_time() - start < 2
    message = str(caught.value)
    assert words in message
    assert str(directory) in message
    assert message.isprintable()
    assert before == {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
    "path", ["original/consolidated.safetensors", "checkpoint-5/a.safetensors", ".cache/a.bin"]
)
def test_weights_that_max_leaves_alone(path: str, tmp_path: Path) -> None:
    model = write(tmp_path / "model", sharded())
    write((model / path).parent, {Path(path).name: b"?"})
    assert set(Checkpoint.open(model).tensors) == {"a", "b"}


def test_weights_below_are_no_part_of_the_model(tmp_path: Path) -> None:
    model = write(tmp_path / "model", sharded())
    write(model / "a" / "b", {"x.safetensors": {"c": A}})
    with pytest.raises(CheckpointError, match=r"a/b/x\.safetensors: found weights below the check"):
        Checkpoint.open(model)


def test_a_circle_of_directories_is_not_followed(tmp_path: Path) -> None:
    model = write(tmp_path / "model", sharded())
    for name in ("a", "b"):
        (model / name).symlink_to(".")
    with pytest.raises(CheckpointError, match="model/a: found a link to a directory"):
        Checkpoint.open(model)


def test_tensors_of_all_shards_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnquant.checkpoint.checkpoint.MAX_TENSORS", 1)
    with pytest.raises(CheckpointError, match="found more than 1 tensors in all"):
        Checkpoint.open(write(tmp_path / "model", sharded()))


def test_a_file_or_nothing_instead_of_a_directory(tmp_path: Path) -> None:
    file = write(tmp_path, {"model.safetensors": {"a": A}}) / "model.safetensors"
    with pytest.raises(CheckpointError, match="found a file, expected a checkpoint's directory"):
        Checkpoint.open(file)
    with pytest.raises(CheckpointError, match="found nothing, expected a checkpoint's directory"):
        Checkpoint.open(tmp_path / "absent")


def _snapshot(root: Path) -> Path:
    """A Hugging Face cache entry: links from snapshots/ into blobs/."""
    snapshot = root / "models--a--b" / "snapshots" / "0123"
    write(snapshot.parent.parent / "blobs", {"beef": safetensors({"a": A}), "cafe": {"x": 1}})
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/beef")
    (snapshot / "config.json").symlink_to("../../blobs/cafe")
    return snapshot


def _plain_cache(root: Path) -> Path:
    snapshot = _snapshot(root)
    snapshot.parent.parent.rename(root / "elsewhere")
    return root / "elsewhere" / "snapshots" / "0123"


def _linked_into_the_cache(root: Path) -> Path:
    snapshot = _snapshot(root)
    local = write(root / "local", CONFIG)
    (local / "model.safetensors").symlink_to(snapshot.parent.parent / "blobs" / "beef")
    return local


def _linked_within(root: Path) -> Path:
    model = write(root / "model", {**CONFIG, "weights.dat": safetensors({"a": A})})
    (model / "model.safetensors").symlink_to("weights.dat")
    return model


def _linked_directory(root: Path) -> Path:
    write(root / "model", {**CONFIG, "model.safetensors": {"a": A}})
    (root / "link").symlink_to("model")
    return root / "link"


@pytest.mark.parametrize(
    "make",
    [_snapshot, _plain_cache, _linked_into_the_cache, _linked_within, _linked_directory],
)
def test_links_that_are_followed(make: Callable[[Path], Path], tmp_path: Path) -> None:
    assert np.array_equal(Checkpoint.open(make(tmp_path)).array("a"), A)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", INDEX])
@pytest.mark.parametrize("to", ["../secret/file", "loop"])
def test_links_out_of_the_directory_are_refused(name: str, to: str, tmp_path: Path) -> None:
    content = {"model.safetensors": safetensors({"a": A}), "config.json": b"{}", INDEX: b"{}"}
    write(tmp_path / "secret", {"file": content[name]})
    model = write(tmp_path / "model", {**CONFIG, "model.safetensors": {"a": A}})
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(name if to == "loop" else to)
    words = "out of the directory|cannot be read|Too many levels"
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(model)


def test_a_file_that_changes_while_open(tmp_path: Path) -> None:
    model = write(tmp_path / "model", {**CONFIG, "model.safetensors": {"a": A}})
    checkpoint = Checkpoint.open(model)
    os.truncate(model / "model.safetensors", 100)
    with pytest.raises(CheckpointError, match="its size changed while the checkpoint was open"):
        checkpoint.array("a")


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "model", sharded()))
    with pytest.raises(CheckpointError, match="tensor c is absent from its 2 tensors"):
        checkpoint.array("c")


def test_reading_copies_nothing_and_release_gives_pages_back(tmp_path: Path) -> None:
    rows = np.zeros((64, 1 << 20), np.uint8)
    model = write(tmp_path / "model", {**CONFIG, "model.safetensors": {"a": rows, "b": rows}})
    del rows
    checkpoint = Checkpoint.open(model)
    page = resource.getpagesize()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    start = resident()
    for name in ("a", "b"):
        assert int(checkpoint.array(name).sum()) == 0
        assert resident() - start > 48 << 20
        checkpoint.release(name)
        assert resident() - start < 16 << 20
