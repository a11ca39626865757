"""What both fuzzers run: any bytes as a shard, an index or a config; only one kind of error.

The first byte of an input says which file the rest is; the other files are good ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from attnquant.checkpoint import Checkpoint
from attnquant.errors import CheckpointError
from tests.checkpoint.files import entry, raw, safetensors

SHARD, INDEX, CONFIG = range(3)
_INDEX_NAME = "model.safetensors.index.json"
_A = safetensors({"a": np.arange(4, dtype=np.float32), "b": np.arange(3, dtype=np.uint8)})
_C = safetensors({"c": np.ones((2, 2), np.int16)})
_LARGEST_VALUES = 1 << 20

_ESCAPED = b'{"\\u0061": {"shape":[2,1],"dtype":"BF16","data_offsets":[0,4]}}  '
_SPACED = {"__metadata__": {"k": "v"}, "x": entry("F32", [], 0, 4)}
_WEIGHT_MAP = {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"}

SEEDS: tuple[bytes, ...] = (
    bytes([SHARD]) + _A,
    bytes([SHARD]) + raw(_SPACED, bytes(4)),
    bytes([SHARD]) + raw(_ESCAPED, b"1234"),
    bytes([SHARD]) + raw({}),
    bytes([SHARD]) + b"version https://git-lfs.github.com/spec/v1\n",
    bytes([INDEX]) + json.dumps({"metadata": {}, "weight_map": _WEIGHT_MAP}).encode(),
    bytes([INDEX]) + b'{"weight_map": {"a": "../x.safetensors"}}',
    bytes([CONFIG]) + b'{"model_type": "gemma3_text", "n": [1, 2.5e3, null, true, {}]}',
)


def open_any(data: bytes, directory: Path) -> bool:
    """Opens a checkpoint that holds `data`; whether it was good. Any error but one escapes."""
    kind, content = (data[0] % 3, data[1:]) if data else (SHARD, b"")
    for path in directory.iterdir():
        path.unlink()
    (directory / "config.json").write_bytes(content if kind == CONFIG else b"{}")
    (directory / "x.safetensors").write_bytes(content if kind == SHARD else _A)
    if kind == INDEX:
        (directory / "y.safetensors").write_bytes(_C)
        (directory / _INDEX_NAME).write_bytes(content)
    try:
        checkpoint = Checkpoint.open(directory)
    except CheckpointError as error:
        message = str(error)
        assert message.isprintable() and len(message) < 2000, message
        return False
    for name, info in checkpoint.tensors.items():
        values = checkpoint.array(name)
        assert values.shape == info.shape and values.nbytes == info.nbytes <= _LARGEST_VALUES
    return True
