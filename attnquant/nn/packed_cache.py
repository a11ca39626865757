"""Packed weights, kept on disk, so that the next start with the same checkpoint encodes nothing.

One file for each checkpoint and way of quantizing it. A checkpoint is known by what the file system
says of its files (device, inode, size, times), which any write changes, and by their headers: a
change that keeps all of that goes unseen, one that changes any of it encodes again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
from platformdirs import user_cache_path

from attnquant.checkpoint.safetensors import build_header, read_header
from attnquant.errors import CheckpointError
from attnquant.kernels import extensions
from attnquant.log import log
from attnquant.nn.tensors import State, from_numpy, max_dtype, specs_of, to_numpy
from attnquant.whole_file import write_whole

_FORMAT = 1
_ERRORS = ".relative_errors"


class PackedCache:
    """The packed weights of one checkpoint, quantized in one way.

    Args:
        files: the checkpoint's safetensors files.
        how: everything else that the packed bytes depend on; each must have a `repr` of its own.
        limit: bytes that all kept files may take together; 0 keeps and reads nothing.
    """

    def __init__(self, files: Sequence[Path], how: Sequence[object], limit: int) -> None:
        self._limit = limit
        digest = sha256(repr((_FORMAT, extensions().parent.name, *how)).encode())
        for file in files:
            stat = os.stat(file)
            times = (stat.st_mtime_ns, stat.st_ctime_ns)
            place = (os.path.realpath(file), stat.st_dev, stat.st_ino, stat.st_size, *times)
            digest.update(repr((place, read_header(file))).encode())
        name = f"{digest.hexdigest()[:32]}.safetensors"
        self._path = user_cache_path("attnquant") / "packed" / name
        self._tensors = self._read() if limit else {}

    @property
    def is_filled(self) -> bool:
        """Whether the weights are there."""
        return bool(self._tensors)

    def group(self, module: str) -> tuple[State, list[float | None]]:
        """A fused group's tensors, mapped, and the relative error of each of its parts: None for
        one that was not encoded.

        Raises:
            KeyError: it is not there.
        """
        errors = to_numpy(self._tensors[module + _ERRORS])
        start = f"{module}."
        state = {
            name: tensor
            for name, tensor in self._tensors.items()
            if name.startswith(start) and not name.endswith(_ERRORS)
        }
        return state, [None if np.isnan(error) else float(error) for error in errors]

    def keep(self, state: State, errors: Mapping[str, Sequence[float | None]]) -> None:
        """Writes the packed tensors of all groups, and their parts' errors by module.

        What cannot be kept, for want of space or permission, is a line in the log. Files that were
        not used for the longest time make room.
        """
        tensors = dict(state)
        for module, of_parts in errors.items():
            values = np.array([np.nan if e is None else e for e in of_parts], np.float64)
            name = module + _ERRORS
            tensors[name] = from_numpy(values, max_dtype(values.dtype), name)
        specs = specs_of(tensors)
        header = build_header(specs)
        size = len(header) + sum(spec.nbytes for spec in specs.values())

        def write(path: Path) -> None:
            with open(path, "wb") as file:
                file.write(header)
                for tensor in tensors.values():
                    file.write(
                        np.ascontiguousarray(to_numpy(tensor)).reshape(-1).view(np.uint8).data
                    )

        try:
            self._make_room(size)
            write_whole(self._path, write)
        except OSError as error:
            log.warning("The packed weights are not kept for the next start: %s", error)

    def _make_room(self, size: int) -> None:
        """Removes files until another one fits; raises OSError if it cannot."""
        directory = self._path.parent
        directory.mkdir(parents=True, exist_ok=True)
        if size > self._limit:
            raise OSError(f"they take {size} bytes, and all kept may take {self._limit}")
        kept = sorted(directory.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        total = sum(path.stat().st_size for path in kept)
        for path in kept:
            if total + size <= self._limit:
                break
            total -= path.stat().st_size
            path.unlink(missing_ok=True)
        if (free := shutil.disk_usage(directory).free) < 2 * size:
            raise OSError(f"they take {size} bytes, and {directory} has {free} free")

    def _read(self) -> State:
        try:
            header = read_header(self._path)
        except CheckpointError:
            # Nothing is there, or nothing whole.
            with suppress(OSError):
                self._path.unlink()
            return {}
        with suppress(OSError):
            os.utime(self._path)
        mapped = np.memmap(self._path, np.uint8, "c")  # MAX takes no read-only array
        state = {}
        for name, info in header.items():
            array = mapped[info.start : info.end].view(info.numpy_dtype).reshape(info.shape)
            state[name] = from_numpy(array, max_dtype(info.numpy_dtype), name)
        return state
