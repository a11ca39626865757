"""A checkpoint directory: config.json and safetensors shards, checked as a whole, read-only.

Everything is decided from names and headers, so opening 60 GB takes milliseconds. What is refused
here is whatever MAX, transformers and we could read differently: a shard beside the index, a tensor
in two shards, a link out of the directory.

Tensors are views of the mapped file: nothing is copied, and the pages belong to the page cache.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnquant.checkpoint.json_file import quote, read_json_object
from attnquant.checkpoint.safetensors import MAX_TENSORS, TensorInfo, read_header
from attnquant.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
QUANT_CONFIG_FILE = "hf_quant_config.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""A Hugging Face id: one or two names of letters, digits, dots, dashes and underscores."""

_SHARD_OF = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_LISTED = 5

# Directories of weights below a checkpoint's that MAX does not take for more shards of it.
_NOT_SHARDS = re.compile(r"consolidated|(^|/)checkpoint-\d+(/|$)")


class Checkpoint:
    """An open checkpoint. `Checkpoint.open` makes one; nothing here ever writes.

    Attributes:
        directory: where it lies.
        config: config.json's object.
        hf_quant_config: hf_quant_config.json's object, if there is one (ModelOpt writes it).
        tensors: what every tensor is and where it lies, by name, in the order of the files.
    """

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        hf_quant_config: dict[str, Any] | None,
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        self.directory = directory
        self.config = config
        self.hf_quant_config = hf_quant_config
        self.tensors = MappingProxyType(dict(tensors))
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Checkpoint:
        """Opens a directory and checks config.json, the index and all headers against each other.

        Raises:
            CheckpointError: one line on the first thing that is wrong.
        """
        root = Path(directory)
        try:
            config = cls.read_config(root)
            _check_below(root)
            quant = contained(root, QUANT_CONFIG_FILE)
            hf_quant_config = read_json_object(quant) if os.path.lexists(quant) else None
            indexed = os.path.lexists(root / INDEX_FILE)
            tensors = _read_indexed(root) if indexed else _read_unindexed(root)
        except OSError as error:
            raise CheckpointError(
                f"{quote(root)}: cannot be listed ({error.strerror}); check that it may be read"
            ) from None
        if not tensors:
            raise CheckpointError(
                f"{quote(root)}: found no tensor in its safetensors files, expected a model's "
                "weights; download them again"
            )
        return cls(root, config, hf_quant_config, tensors)

    @staticmethod
    def read_config(root: Path) -> dict[str, Any]:
        """config.json of a checkpoint's directory.

        Raises:
            CheckpointError: this is no directory, or it has no config.json that can be read.
        """
        if not root.is_dir():
            found = "a file" if root.exists() else "nothing"
            raise CheckpointError(
                f"{quote(root)}: found {found}, expected a checkpoint's directory; give the "
                f"directory that holds {CONFIG_FILE}"
            )
        return read_json_object(contained(root, CONFIG_FILE))

    def info(self, name: str) -> TensorInfo:
        """The tensor's place.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        if name in self.tensors:
            return self.tensors[name]
        raise CheckpointError(
            f"{quote(self.directory)}: tensor {quote(name)} is absent from its "
            f"{len(self.tensors)} tensors; download or convert the checkpoint again"
        )

    def array(self, name: str) -> NDArray[Any]:
        """The tensor's values: a read-only view of the mapped file, of the checkpoint's dtype.

        Raises:
            CheckpointError: the tensor is absent, or its file changed since `open`.
        """
        info = self.info(name)
        values = np.frombuffer(
            self._map(info.file),
            dtype=info.numpy_dtype,
            count=info.nbytes // info.numpy_dtype.itemsize,
            offset=info.start,
        )
        return values.reshape(info.shape)

    def release(self, name: str) -> None:
        """Drops the tensor's pages from this process; views stay valid and read the file again."""
        info = self.info(name)
        if info.file in self._maps:
            start = info.start - info.start % mmap.PAGESIZE
            self._maps[info.file].madvise(mmap.MADV_DONTNEED, start, info.end - start)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            # A file that shrank since its header was read would end the process by SIGBUS.
            expected = max(info.end for info in self.tensors.values() if info.file == file)
            try:
                with open(file, "rb") as handle:
                    if os.fstat(handle.fileno()).st_size != expected:
                        raise CheckpointError(
                            f"{quote(file)}: its size changed while the checkpoint was open, "
                            f"expected {expected} bytes; start again when nothing writes to it"
                        )
                    self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise CheckpointError(
                    f"{quote(file)}: cannot be mapped ({error.strerror}); check that it may be read"
                ) from None
        return self._maps[file]


def contained(root: Path, name: str) -> Path:
    """`root / name`, if that file really lies in `root`, or in the blobs of its Hugging Face cache.

    A Hugging Face snapshot, `models--x/snapshots/<commit>/`, consists of links into
    `models--x/blobs/`; any other link out of the directory is refused.

    Raises:
        CheckpointError: the link leads elsewhere.
    """
    path = root / name
    if not path.is_symlink():
        return path
    home, target = Path(os.path.realpath(root)), Path(os.path.realpath(path))
    inside = target.is_relative_to(home)
    in_cache = target.parent.name == "blobs" and (
        home.parent.name == "snapshots" and target.parent.parent == home.parent.parent
    )
    # `hf download --local-dir` of older versions links into the cache from anywhere.
    in_user_cache = target.parent.name == "blobs" and target.parent.parent.name.startswith(
        "models--"
    )
    if inside or in_cache or in_user_cache:
        return path
    raise CheckpointError(
        f"{quote(path)}: found a link out of the directory, to {quote(target)}, expected the file "
        "itself; copy it here"
    )


def _read_unindexed(root: Path) -> dict[str, TensorInfo]:
    names = _shard_names(root)
    if not names:
        raise CheckpointError(f"{quote(root)}: {_why_no_weights(root)}")
    _check_series(root, names)
    tensors: dict[str, TensorInfo] = {}
    for name in names:
        for info in read_header(contained(root, name)).values():
            _add(tensors, info)
    return tensors


def _read_indexed(root: Path) -> dict[str, TensorInfo]:
    path = contained(root, INDEX_FILE)
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{quote(path)}: found no weight_map, expected an object that maps tensors to shards; "
            "download it again"
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_shard(shard):
            raise CheckpointError(
                f"{quote(path)}: tensor {quote(name)}: found shard {quote(shard)}, expected the "
                "name of a .safetensors file in the same directory, without a path; download the "
                "index again"
            )
    shards = sorted(set(weight_map.values()))
    present = _shard_names(root)
    if absent := [shard for shard in shards if shard not in present]:
        raise CheckpointError(
            f"{quote(path)}: names {len(absent)} absent shards, {_some(absent)}; download them"
        )
    if stray := [name for name in present if name not in shards]:
        raise CheckpointError(
            f"{quote(root / stray[0])}: found a stray shard that {INDEX_FILE} does not name, "
            "expected none; remove it, or the index if it is the stale one"
        )
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for info in read_header(contained(root, shard)).values():
            _add(tensors, info)
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            where = f"found it in {tensors[name].file.name}" if name in tensors else "absent there"
            raise CheckpointError(
                f"{quote(path)}: tensor {quote(name)}: the index places it in {quote(shard)}, "
                f"{where}; download the shard or the index again"
            )
    for name, info in tensors.items():
        if name not in weight_map:
            raise CheckpointError(
                f"{quote(info.file)}: tensor {quote(name)}: found it in the shard but not in "
                f"{INDEX_FILE}, expected both to agree; download the shard or the index again"
            )
    return tensors


def _add(tensors: dict[str, TensorInfo], info: TensorInfo) -> None:
    if len(tensors) == MAX_TENSORS:
        raise CheckpointError(
            f"{quote(info.file)}: found more than {MAX_TENSORS} tensors in all, expected a "
            "model's; download it again"
        )
    if info.name in tensors:
        raise CheckpointError(
            f"{quote(info.file)}: tensor {quote(info.name)}: found it in "
            f"{tensors[info.name].file.name} too, expected it in one file; remove the stale file"
        )
    tensors[info.name] = info


def _is_plain_shard(name: str) -> bool:
    plain = name.isprintable() and not set(name) & set("/\\") and not name.startswith(".")
    return plain and name.endswith(".safetensors")


def _shard_names(root: Path) -> list[str]:
    """The directory's safetensors files, but for hidden ones (macOS' `._x`, partial downloads)."""
    names = (path.name for path in root.glob("*.safetensors"))
    return sorted(name for name in names if not name.startswith("."))


def _check_below(root: Path) -> None:
    """Refuses weights in directories below, which MAX would load as more shards of the model."""
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if (folder := Path(parent) / name).is_symlink():
                raise CheckpointError(
                    f"{quote(folder)}: found a link to a directory, expected files; MAX would look "
                    "for weights where it leads: remove it"
                )
        below = Path(parent).relative_to(root).as_posix()
        for name in sorted(names) if below != "." else ():
            path = f"{below}/{name}"
            if _is_plain_shard(name) and not _NOT_SHARDS.search(path):
                raise CheckpointError(
                    f"{quote(root / path)}: found weights below the checkpoint's directory, which "
                    "MAX would load as a part of it; move them elsewhere"
                )


def _check_series(root: Path, names: list[str]) -> None:
    """Without an index, `x-00001-of-00003` still tells how many shards there should be."""
    series: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(_SHARD_OF.fullmatch, names)):
        if len(match[3]) <= 6:
            series.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), found in series.items():
        if len(found) != count:
            raise CheckpointError(
                f"{quote(root)}: found {len(found)} of the {count} shards {quote(stem)}-*-of-"
                f"{count:05d}.safetensors, expected all; download those that are absent"
            )


def _why_no_weights(root: Path) -> str:
    others = sorted(
        path.name for path in root.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file()
    )
    if others:
        return (
            f"found weights as {_some(others)}, expected {SINGLE_FILE} or {INDEX_FILE} with its "
            "shards; convert them to safetensors"
        )
    return (
        f"found no weights, expected {SINGLE_FILE} or {INDEX_FILE} with its shards; download them"
    )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return ", ".join(map(quote, listed[:_LISTED])) + more
