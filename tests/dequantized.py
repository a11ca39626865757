"""Writes a checkpoint whose projections are what a quantized load computes with, in float32.

Its logits, through the unquantized graph, are the reference for the packed one: what differs is
only how the packed weights are multiplied.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.checkpoint.export import Encode
from attnquant.decoder_shapes import DecoderShapes
from attnquant.nvfp4.reference import decode, encode, largest_magnitude
from attnquant.projections import ProjectionKey, fused_groups, strip_prefix


def dequantize(
    source: Path,
    target: Path,
    quantized: Callable[[ProjectionKey], bool] = lambda key: True,
    encode: Encode = encode,
) -> Path:
    """Writes `target`: `source` in float32, its quantized projections encoded and decoded."""
    checkpoint = Checkpoint.open(source)
    tensors: dict[str, NDArray[Any]] = {
        name: checkpoint.array(name).astype(np.float32) for name in checkpoint.tensors
    }
    stored_name = {strip_prefix(name): name for name in tensors}
    for layer, shapes in enumerate(DecoderShapes.from_config(checkpoint.config).layers):
        for roles in fused_groups(tuple(shapes.projections)):
            keys = [ProjectionKey(layer=layer, role=role) for role in roles]
            answers = [quantized(key) for key in keys]
            groups = [keys] if all(answers) else [[key] for key in keys if quantized(key)]
            for group in groups:
                names = [stored_name[f"{key.module}.weight"] for key in group]
                amax = float(max(largest_magnitude(checkpoint.array(name)) for name in names))
                for name in names:
                    tensors[name] = decode(encode(checkpoint.array(name), amax=amax, name=name))
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    for path in source.glob("*.json"):
        if path.name != "model.safetensors.index.json":
            (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part |= {"torch_dtype": "float32", "dtype": "float32"}
    (target / "config.json").write_text(json.dumps(config))
    return target
