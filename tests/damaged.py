"""Checkpoints with one thing wrong in them."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.numpy import save_file


def flip_row(source: Path, target: Path, tensor: str, row: int) -> Path:
    """Copies a checkpoint; the copy has one row of one weight with its sign turned around.

    Raises:
        ValueError: the checkpoint has no such tensor.
    """
    import ml_dtypes  # noqa: F401  (numpy then knows bfloat16)

    shutil.copytree(source, target)
    for path in sorted(target.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            if tensor not in names:
                continue
            tensors = {name: file.get_tensor(name) for name in names}
            metadata = file.metadata()
        flipped = tensors[tensor].copy()
        flipped[row] = -flipped[row]
        save_file(tensors | {tensor: flipped}, path, metadata)
        return target
    raise ValueError(f"{source} has no tensor {tensor}")
