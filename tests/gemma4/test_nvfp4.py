"""NVFP4, at load and from checkpoints: a packed graph's logits are its own weights'."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.checkpoint.export import export_nvfp4
from attnquant.kernels.codec import encode
from attnquant.projections import BLOCK_OF_ROLE, ProjectionKey
from tests.checkpoint.test_nvfp4_layouts import COMPRESSED
from tests.dequantized import dequantize
from tests.gemma4.pipeline import Pipeline
from tests.gemma4.test_logits import VISION, assert_equal
from tests.golden.data import load_tiny, relative_error
from tests.tiny.gemma4 import IMAGES

# Of the two with one graph, the one that loads no vision tower.
CASE = "gemma4-unified"
PROMPTS = [prompt.tokens for prompt in load_tiny(CASE).prompts]
AT_LOAD = {"ATTNQUANT_QUANT": "nvfp4"}


def logits(directory: Path, settings: Mapping[str, str] | None = None) -> NDArray[np.float32]:
    """`[prompts, vocab]`: each prompt's next-token logits."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (settings or {}).items():
            environment.setenv(name, value)
        return Pipeline(directory).logits(PROMPTS)


def image_logits(directory: Path, settings: Mapping[str, str] | None = None) -> NDArray[np.float32]:
    """`[1, vocab]`: the next-token logits of a prompt with two images."""
    prompt = load_tiny(VISION).image
    assert prompt is not None
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (settings or {}).items():
            environment.setenv(name, value)
        pipeline = Pipeline(directory)
    outputs = pipeline.step([pipeline.context(prompt.tokens, IMAGES)])
    return np.array(outputs.next_token_logits.to_numpy())


def is_mlp(key: ProjectionKey) -> bool:
    return BLOCK_OF_ROLE[key.role] == "mlp"


@pytest.fixture(scope="module")
def packed(tiny_directory: Callable[[str], Path]) -> NDArray[np.float32]:
    return logits(tiny_directory(CASE), AT_LOAD)


def test_packed_logits_equal_the_dequantized_models(
    packed: NDArray[np.float32], tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = logits(dequantize(tiny_directory(CASE), tmp_path / "reference"))
    for row, expected in zip(packed, reference, strict=True):
        assert_equal(row, expected)
    # The weights are other weights: without quantization the logits are far from these.
    dense = np.stack([prompt.last for prompt in load_tiny(CASE).prompts])
    assert relative_error(packed, dense) > 1e-2


def test_a_modelopt_checkpoint_gives_the_logits_of_quantizing_at_load(
    packed: NDArray[np.float32], tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    export_nvfp4(tiny_directory(CASE), tmp_path / "exported", encode=encode, recipe={})
    assert np.array_equal(logits(tmp_path / "exported"), packed)


def test_a_compressed_tensors_checkpoint_gives_them_too(
    packed: NDArray[np.float32], tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    export_nvfp4(tiny_directory(CASE), tmp_path / "exported", encode=encode, recipe={})
    compressed = to_compressed_tensors(tmp_path / "exported", tmp_path / "compressed")
    # Its global scales are reciprocals, so the weights differ by float32's rounding.
    assert relative_error(logits(compressed), packed) < 1e-4


def test_what_a_checkpoint_leaves_dense_is_quantized_at_load(
    packed: NDArray[np.float32], tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    export_nvfp4(
        tiny_directory(CASE), tmp_path / "mlp", encode=encode, recipe={}, ignore=["self_attn"]
    )
    assert np.array_equal(logits(tmp_path / "mlp", AT_LOAD), packed)


def test_images_are_seen_by_packed_weights(
    tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    source, exported = tiny_directory(VISION), tmp_path / "exported"
    reference = image_logits(dequantize(source, tmp_path / "reference"))
    packed = image_logits(source, AT_LOAD)
    assert_equal(packed, reference)
    export_nvfp4(source, exported, encode=encode, recipe={})
    assert np.array_equal(image_logits(exported), packed)
    compressed = to_compressed_tensors(exported, tmp_path / "compressed")
    assert_equal(image_logits(compressed), reference)


@pytest.mark.slow
def test_attention_may_stay_dense(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """NVIDIA's coverage: as such a checkpoint is, and by a setting."""
    source = tiny_directory(CASE)
    export_nvfp4(source, tmp_path / "mlp", encode=encode, recipe={}, ignore=["self_attn"])
    found = logits(tmp_path / "mlp")
    reference = logits(dequantize(source, tmp_path / "reference", is_mlp))
    for row, expected in zip(found, reference, strict=True):
        assert_equal(row, expected)
    ignored = AT_LOAD | {"ATTNQUANT_QUANT_IGNORE": "self_attn"}
    assert np.array_equal(logits(source, ignored), found)


def to_compressed_tensors(source: Path, target: Path) -> Path:
    """Writes a ModelOpt checkpoint again in compressed-tensors' layout."""
    checkpoint = Checkpoint.open(source)
    tensors: dict[str, NDArray[Any]] = {}
    for name in checkpoint.tensors:
        array = checkpoint.array(name)
        module, _, tensor = name.rpartition(".")
        packed = f"{module}.weight_scale_2" in checkpoint.tensors
        if packed and tensor == "weight":
            tensors[f"{module}.weight_packed"] = array
        elif tensor == "weight_scale_2":
            tensors[f"{module}.weight_global_scale"] = (1 / array).reshape(1)
        elif tensor != "input_scale":
            tensors[name] = array
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    for path in source.glob("*.json"):
        if path.name not in ("hf_quant_config.json", "model.safetensors.index.json"):
            (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | COMPRESSED))
    return target
