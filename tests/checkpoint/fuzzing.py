"""What both fuzzers run: any bytes as a file of a checkpoint; only one kind of error.

The first byte of an input says which file the rest is; the other files are good ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from attnquant.checkpoint import Checkpoint
from attnquant.errors import AttnquantError
from attnquant.preflight import check_model
from tests.checkpoint.decoder import CONFIG as DECODER
from tests.checkpoint.decoder import GEMMA4, weights
from tests.checkpoint.files import entry, raw, safetensors, write

SHARD, INDEX, CONFIG, DECODER_CONFIG, GEMMA4_CONFIG, TOKENIZER = range(6)
_INDEX_NAME = "model.safetensors.index.json"
_A = safetensors({"a": np.arange(4, dtype=np.float32), "b": np.arange(3, dtype=np.uint8)})
_C = safetensors({"c": np.ones((2, 2), np.int16)})
_LARGEST_VALUES = 1 << 20
_TOKENIZER = b'{"model": {}}'

_ESCAPED = b'{"\\u0061": {"shape":[2,1],"dtype":"BF16","data_offsets":[0,4]}}  '
_SPACED = {"__metadata__": {"k": "v"}, "x": entry("F32", [], 0, 4)}
_WEIGHT_MAP = {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"}
_ROPES = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["re:.*mlp.*", "lm*", "*"]}
_SECTION = {"blocks": 1, "rank": 2, "quant": "nvfp4", "quant_ignore": ["self_attn"]}


def _json(kind: int, value: object) -> bytes:
    return bytes([kind]) + json.dumps(value).encode()


SEEDS: tuple[bytes, ...] = (
    bytes([SHARD]) + _A,
    bytes([SHARD]) + raw(_SPACED, bytes(4)),
    bytes([SHARD]) + raw(_ESCAPED, b"1234"),
    bytes([SHARD]) + raw({}),
    bytes([SHARD]) + b"version https://git-lfs.github.com/spec/v1\n",
    _json(INDEX, {"metadata": {}, "weight_map": _WEIGHT_MAP}),
    _json(INDEX, {"weight_map": {"a": "../x.safetensors"}}),
    _json(CONFIG, {"model_type": "gemma3_text", "n": [1, 2.5e3, None, True, {}]}),
    _json(DECODER_CONFIG, DECODER),
    _json(DECODER_CONFIG, DECODER | {"quantization_config": _NVFP4, "rope_parameters": _ROPES}),
    _json(DECODER_CONFIG, DECODER | {"attnquant": _SECTION}),
    _json(GEMMA4_CONFIG, GEMMA4),
    bytes([TOKENIZER]) + _TOKENIZER,
)
BAD_SEEDS = (3, 4, 6)
"""By their places: those that must be refused."""


class Directories:
    """Where inputs are put: a small checkpoint, and the good decoders that stay."""

    def __init__(self, root: Path) -> None:
        self.small = root / "small"
        self.decoders = {
            kind: write(
                root / str(kind),
                {
                    "config.json": config,
                    "tokenizer.json": _TOKENIZER,
                    "model.safetensors": weights(gemma4=config is GEMMA4),
                },
            )
            for kind, config in (
                (DECODER_CONFIG, DECODER),
                (GEMMA4_CONFIG, GEMMA4),
                (TOKENIZER, DECODER),
            )
        }
        self.small.mkdir()


def open_any(data: bytes, directories: Directories) -> bool:
    """Opens a checkpoint that holds `data`; whether it was good. Any error but ours escapes."""
    kind, content = (data[0] % 6, data[1:]) if data else (SHARD, b"")
    try:
        if kind in directories.decoders:
            directory = directories.decoders[kind]
            name = "tokenizer.json" if kind == TOKENIZER else "config.json"
            (directory / name).write_bytes(content)
            check_model(str(directory))
        else:
            _open_small(kind, content, directories.small)
    except AttnquantError as error:
        message = str(error)
        assert message.isprintable() and len(message) < 4000, message
        return False
    return True


def _open_small(kind: int, content: bytes, directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    (directory / "config.json").write_bytes(content if kind == CONFIG else b"{}")
    (directory / "x.safetensors").write_bytes(content if kind == SHARD else _A)
    if kind == INDEX:
        (directory / "y.safetensors").write_bytes(_C)
        (directory / _INDEX_NAME).write_bytes(content)
    checkpoint = Checkpoint.open(directory)
    for name, info in checkpoint.tensors.items():
        values = checkpoint.array(name)
        assert values.shape == info.shape and values.nbytes == info.nbytes <= _LARGEST_VALUES
