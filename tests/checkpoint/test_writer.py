"""Writing: what is written reads back, and no fault leaves anything half made under the name."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from attnquant.checkpoint import Checkpoint, writer
from attnquant.checkpoint.safetensors import DTYPE_NAMES, TensorSpec
from attnquant.checkpoint.writer import TensorGroup, write_checkpoint
from attnquant.errors import CheckpointError

Values = dict[str, NDArray[Any]]
CONFIG = b'{"model_type": "gemma3_text"}'


def group(values: Values, made: list[str] | None = None) -> TensorGroup:
    def make() -> Iterator[tuple[str, NDArray[Any]]]:
        for name, array in values.items():
            if made is not None:
                made.append(name)
            yield name, array

    specs = {n: TensorSpec(dtype=DTYPE_NAMES[a.dtype], shape=a.shape) for n, a in values.items()}
    return TensorGroup(specs=specs, make=make)


def values(count: int = 4) -> list[Values]:
    """`count` groups of 80 bytes or so, of several dtypes."""
    return [
        {
            f"layer.{index}.weight": np.full((4, 4), index, np.float32),
            f"layer.{index}.bias": np.full(4, -index).astype(ml_dtypes.bfloat16),
            f"layer.{index}.scale": np.full((), index + 0.5, np.float32),
        }
        for index in range(count)
    ]


def write(target: Path, content: list[Values], **options: Any) -> None:
    made = options.pop("made", None)
    arguments: dict[str, Any] = {"files": {"config.json": CONFIG}, "recipe": {"version": 1}}
    write_checkpoint(target, [group(v, made) for v in content], **{**arguments, **options})


def assert_holds(target: Path, content: list[Values]) -> None:
    checkpoint = Checkpoint.open(target)
    expected = {name: array for group in content for name, array in group.items()}
    assert set(checkpoint.tensors) == set(expected)
    for name, array in expected.items():
        found = checkpoint.array(name)
        assert found.dtype == array.dtype and found.shape == array.shape
        assert found.tobytes() == array.tobytes()


def only(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


@pytest.mark.parametrize(("shard_bytes", "shards"), [(10_000, 1), (160, 2), (80, 4), (1, 4)])
def test_round_trip(shard_bytes: int, shards: int, tmp_path: Path) -> None:
    target, told = tmp_path / "deep" / "out", []
    extra = tmp_path / "tokenizer.json"
    extra.write_text("{}")
    files = {"config.json": CONFIG, "tokenizer.json": extra, "sub/chat.jinja": b"hi"}
    write(target, values(), shard_bytes=shard_bytes, files=files, progress=told.append)
    assert_holds(target, values())
    assert len(list(target.glob("*.safetensors"))) == shards
    assert (target / "tokenizer.json").read_text() == "{}"
    assert (target / "sub" / "chat.jinja").read_bytes() == b"hi"
    assert only(target.parent) == ["out"]
    assert sum(told) == sum(array.nbytes for group in values() for array in group.values())
    for path in target.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as handle:
            assert handle.metadata() == {"format": "pt"}
    if shards > 1:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(told)


def test_never_over_an_existing_directory(tmp_path: Path) -> None:
    for name in ("directory", "file", "dangling"):
        target = tmp_path / name
        if name == "directory":
            target.mkdir()
        elif name == "file":
            target.write_text("precious")
        else:
            target.symlink_to("nowhere")
        with pytest.raises(CheckpointError, match="exists already, expected a new directory"):
            write(target, values())
    assert only(tmp_path) == ["dangling", "directory", "file"]


def test_resumes_and_keeps_finished_shards(tmp_path: Path) -> None:
    target, made = tmp_path / "out", []

    class Killed(BaseException):
        pass

    def stop(_: int) -> None:
        if made and made[-1].startswith("layer.2"):
            raise Killed

    with pytest.raises(Killed):
        write(target, values(), shard_bytes=80, made=made, progress=stop)
    assert only(tmp_path) == [".out.partial"]
    # A shard that was damaged meanwhile is made again.
    damaged = tmp_path / ".out.partial" / "data" / "model-00002-of-00004.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x77")
    made.clear()
    write(target, values(), shard_bytes=80, made=made)
    assert {name.split(".")[1] for name in made} == {"1", "2", "3"}
    assert_holds(target, values())
    assert only(tmp_path) == ["out"]


@pytest.mark.parametrize("change", ["recipe", "files", "shapes", "journal"])
def test_another_recipe_starts_afresh(change: str, tmp_path: Path) -> None:
    target, made = tmp_path / "out", []

    def stop(_: int) -> None:
        if made and made[-1].startswith("layer.3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(target, values(), shard_bytes=80, made=made, progress=stop)
    options: dict[str, Any] = {"shard_bytes": 80}
    content = values()
    if change == "recipe":
        options["recipe"] = {"version": 2}
    elif change == "files":
        options["files"] = {"config.json": b'{"model_type": "other"}'}
    elif change == "shapes":
        content[3]["layer.3.weight"] = np.zeros((2, 8), np.float32)
    else:
        (tmp_path / ".out.partial" / "journal.json").write_bytes(b'{"shards": [')
    made.clear()
    write(target, content, made=made, **options)
    assert {name.split(".")[1] for name in made} == {"0", "1", "2", "3"}
    assert_holds(target, content)
    assert only(tmp_path) == ["out"]


def test_killed_between_the_rename_and_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, made = tmp_path / "out", []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        write(target, values())
    assert only(tmp_path) == [".out.partial", "out"]
    write(target, values(), made=made)
    assert made == [] and only(tmp_path) == ["out"]
    with pytest.raises(CheckpointError, match="exists already"):
        write(target, values())


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device); free space and run the same command again"),
        (errno.EROFS, "Read-only file system); choose a directory that may be written"),
        (errno.EIO, "Input/output error); mend it and run the same command again"),
    ],
)
def test_write_errors_are_one_line_and_lose_nothing(
    number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, calls = tmp_path / "out", 0

    def fsync(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(CheckpointError) as caught:
            write(target, values(), shard_bytes=80)
    assert words in str(caught.value) and str(target) in str(caught.value)
    assert str(caught.value).isprintable()
    assert not target.exists()
    made: list[str] = []
    write(target, values(), shard_bytes=80, made=made)
    assert 0 < len(made) < 12
    assert_holds(target, values())


def test_too_small_a_disk_is_seen_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(
        CheckpointError, match=r"No space left on device, 304 bytes needed, 10 free"
    ):
        write(tmp_path / "out", values(), made=[])
    assert only(tmp_path) == []


def test_two_processes_at_once(tmp_path: Path) -> None:
    def second(_: int) -> None:
        with pytest.raises(CheckpointError, match="another process writes this checkpoint"):
            write(tmp_path / "out", values())

    write(tmp_path / "out", values(), progress=second)
    assert_holds(tmp_path / "out", values())


def test_values_that_differ_from_their_announcement(tmp_path: Path) -> None:
    good = group({"a": np.zeros(3, np.float32)})
    for array in (np.zeros(4, np.float32), np.zeros(3, np.float16)):
        lying = TensorGroup(specs=good.specs, make=lambda array=array: [("a", array)])
        with pytest.raises(ValueError, match="announced a"):
            write_checkpoint(tmp_path / "out", [lying], files={}, recipe={})
    assert only(tmp_path) == []


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    target, seed, killed = tmp_path / "out", random.Random(7), 0
    content = values(24)
    for _ in range(25):
        child = os.fork()
        if child == 0:
            try:
                write(target, content, shard_bytes=160, progress=lambda _: time.sleep(0.0005))
            finally:
                os._exit(0)
        time.sleep(seed.uniform(0, 0.2))
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if target.exists():
            assert_holds(target, content)
            shutil.rmtree(target)
    assert killed > 5
    write(target, content, shard_bytes=160)
    assert_holds(target, content)
    assert only(tmp_path) == ["out"]
