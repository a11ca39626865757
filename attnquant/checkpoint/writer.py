"""Writes a checkpoint directory: streamed, resumable, and there as a whole or not at all.

Everything is made in `.<name>.partial` beside the target and renamed once it is complete. Shapes
are known beforehand, so every shard's header is written first and its tensors are streamed behind
it, one group of tensors in memory at a time. A finished shard is renamed into place and entered,
with its digest, in a journal; a second run of the same recipe keeps the shards whose digests still
hold, and a run of another recipe starts afresh. The kernel drops the lock of a process that dies,
however it dies, so what a killed run leaves never blocks the next one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnquant.checkpoint.checkpoint import INDEX_FILE, SINGLE_FILE
from attnquant.checkpoint.json_file import quote, read_json_object
from attnquant.checkpoint.safetensors import DTYPE_NAMES, TensorSpec, build_header
from attnquant.errors import CheckpointError

SHARD_BYTES = 5_000_000_000
_CHUNK = 64 << 20
_JOURNAL = "journal.json"

Content = bytes | Path


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorGroup:
    """Tensors that are made together and stay in one shard.

    Attributes:
        specs: dtype and shape of each tensor, by name.
        make: yields every tensor's name and values, in the order of `specs`.
    """

    specs: Mapping[str, TensorSpec]
    make: Callable[[], Iterable[tuple[str, NDArray[Any]]]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())


def write_checkpoint(
    target: Path,
    groups: Sequence[TensorGroup],
    *,
    files: Mapping[str, Content],
    recipe: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], object] = lambda _: None,
) -> None:
    """Writes `target`, which must not exist, or resumes where a killed run of the recipe stopped.

    Args:
        target: the new directory; its parents are created.
        groups: all tensors, in the order in which they are to lie in the shards.
        files: everything else, by name: the bytes, or a file to copy.
        recipe: what decides the tensors' values (source, options, version); plain JSON values.
        shard_bytes: no shard grows beyond this, except for a single group that is larger.
        progress: told the bytes of every tensor that is in place.

    Raises:
        CheckpointError: the target exists; another process writes it; the disk is full or
            read-only. One line; what was finished is kept for the next run.
    """
    target = Path(os.path.abspath(target))
    staging = target.with_name(f".{target.name}.partial")
    shards = _plan(groups, shard_bytes)
    if len(shards) > 1:
        files = {**files, INDEX_FILE: _index(shards)}
    identity = _identity(shards, files, recipe)
    if os.path.lexists(target) and not staging.is_dir():
        raise _exists(target)
    with _clear_errors(target), _locked(staging):
        data, journal = staging / "data", _read_journal(staging)
        same = journal.get("identity") == identity
        if os.path.lexists(target):
            if same and not data.exists():  # killed between the rename and the removal
                shutil.rmtree(staging)
                return
            raise _exists(target)
        finished: dict[str, str] = journal["shards"] if same else {}
        finished = {name: finished[name] for name in shards if name in finished}
        finished = {
            name: known for name, known in finished.items() if known == _digest(data / name)
        }
        try:
            _remove_all_but(data, finished)
            _check_space(staging, [shard for name, shard in shards.items() if name not in finished])
            for name, shard in shards.items():
                if name in finished:
                    progress(sum(group.nbytes for group in shard))
                    continue
                finished[name] = _write_shard(data / name, shard, progress)
                _write_journal(staging, {"identity": identity, "shards": finished})
            for name, content in files.items():
                _write_file(data / name, content)
            _sync(data)
            data.rename(target)
            _sync(target.parent)
        except BaseException:
            if not finished:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        shutil.rmtree(staging, ignore_errors=True)


def _plan(groups: Sequence[TensorGroup], shard_bytes: int) -> dict[str, list[TensorGroup]]:
    """The groups of every shard, by its file's name; a new shard where the next group overflows."""
    shards: list[list[TensorGroup]] = [[]]
    size = 0
    for group in groups:
        if size and size + group.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += group.nbytes
    count = len(shards)
    if count == 1:
        return {SINGLE_FILE: shards[0]}
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }


def _specs(shard: Iterable[TensorGroup]) -> dict[str, TensorSpec]:
    return {name: spec for group in shard for name, spec in group.specs.items()}


def _identity(
    shards: Mapping[str, list[TensorGroup]], files: Mapping[str, Content], recipe: Mapping[str, Any]
) -> str:
    """A digest of everything that decides the shards' bytes."""
    tensors = {
        shard: {name: [spec.dtype, *spec.shape] for name, spec in _specs(groups).items()}
        for shard, groups in shards.items()
    }
    contents = {
        name: str(content) if isinstance(content, Path) else content.hex()
        for name, content in files.items()
    }
    text = json.dumps([dict(recipe), tensors, contents])
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _index(shards: Mapping[str, list[TensorGroup]]) -> bytes:
    weight_map = {name: shard for shard, groups in shards.items() for name in _specs(groups)}
    total = sum(group.nbytes for groups in shards.values() for group in groups)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def _write_shard(
    path: Path, shard: Sequence[TensorGroup], progress: Callable[[int], object]
) -> str:
    """Writes one shard under a temporary name, puts it on the disk, renames it; its digest."""
    digest = hashlib.blake2b(digest_size=32)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        header = build_header(_specs(shard))
        file.write(header)
        digest.update(header)
        for group in shard:
            made = group.make()
            for (name, spec), (found, array) in zip(group.specs.items(), made, strict=True):
                if (name, spec.dtype, spec.shape) != (
                    found,
                    DTYPE_NAMES[array.dtype],
                    array.shape,
                ):
                    raise ValueError(
                        f"{found}: made {array.dtype} {array.shape}, announced {name}: {spec}"
                    )
                raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                for start in range(0, raw.size, _CHUNK):
                    chunk = raw[start : start + _CHUNK].data
                    file.write(chunk)
                    digest.update(chunk)
                progress(raw.size)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    _sync(path.parent)
    return digest.hexdigest()


def _write_file(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path):
        shutil.copyfile(content, path)
    else:
        path.write_bytes(content)
    _sync(path)


def _digest(path: Path) -> str | None:
    """The digest of a shard that an earlier run finished, or None if it is not there."""
    digest = hashlib.blake2b(digest_size=32)
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def _read_journal(staging: Path) -> dict[str, Any]:
    """What an earlier run recorded; nothing if there was none, or if it cannot be understood."""
    try:
        journal = read_json_object(staging / _JOURNAL)
    except CheckpointError:
        return {}
    return journal if isinstance(journal.get("shards"), dict) else {}


def _write_journal(staging: Path, journal: Mapping[str, Any]) -> None:
    temporary = staging / f"{_JOURNAL}.tmp"
    _write_file(temporary, json.dumps(journal).encode())
    temporary.rename(staging / _JOURNAL)


def _remove_all_but(data: Path, names: Iterable[str]) -> None:
    """What a killed run left half made goes."""
    data.mkdir(exist_ok=True)
    for path in set(data.iterdir()) - {data / name for name in names}:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _check_space(staging: Path, missing: Iterable[Iterable[TensorGroup]]) -> None:
    needed = sum(group.nbytes for shard in missing for group in shard)
    free = shutil.disk_usage(staging).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed} bytes needed, {free} free")


def _sync(path: Path) -> None:
    """Puts a file or directory on the disk, lest a power cut keep a name and lose the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(staging: Path) -> Iterator[None]:
    """Holds the staging directory for this process; made if need be, and left as it then is."""
    staging.mkdir(parents=True, exist_ok=True)
    lock = staging / "lock"
    with open(lock, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A process that finished in between has removed the directory with this very file.
            ours = os.fstat(file.fileno()).st_ino == os.stat(lock).st_ino
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:
            raise CheckpointError(
                f"{quote(staging)}: another process writes this checkpoint; wait until it is done"
            )
        yield


@contextlib.contextmanager
def _clear_errors(target: Path) -> Iterator[None]:
    """Turns what the file system refuses into one line that says what is kept and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free space and run the same command again: finished shards are kept"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            advice = "choose a directory that may be written"
        else:
            advice = "mend it and run the same command again: finished shards are kept"
        reason = os.strerror(error.errno) if error.errno else str(error)
        detail = f", {error.strerror}" if error.strerror not in (None, reason) else ""
        raise CheckpointError(
            f"{quote(target)}: cannot be written ({reason}{detail}); {advice}"
        ) from None


def _exists(target: Path) -> CheckpointError:
    return CheckpointError(
        f"{quote(target)}: exists already, expected a new directory; remove it or name another"
    )
