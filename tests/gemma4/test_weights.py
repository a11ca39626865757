"""What becomes of a checkpoint's tensors, without compiling anything."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from max.dtype import DType
from max.graph.weights import load_weights
from safetensors.numpy import load_file, save_file

from attnquant.checkpoint.verify import EMBEDDING, verify
from attnquant.gemma4.weight_adapters import VISION, convert_safetensors
from attnquant.nn.loaded import pipeline_config
from attnquant.nn.tensors import State, to_numpy
from tests.tiny.gemma4 import CASES, TinyGemma4


def adapted(case: TinyGemma4, directory: Path) -> State:
    """The graphs' weights in float32, as MAX's pipeline model gets them."""
    weights = load_weights(sorted(case.write(directory).glob("*.safetensors")))
    pipeline = pipeline_config(directory, max_length=512, max_batch_size=1)
    return convert_safetensors(
        dict(weights.items()),
        huggingface_config=pipeline.model.huggingface_config,
        pipeline_config=pipeline,
    )


def test_the_towers_weights_are_kept_apart_and_are_the_files(tmp_path: Path) -> None:
    case = CASES["gemma4-shared-values"]
    weights = adapted(case, tmp_path)
    tower = {name.removeprefix(VISION) for name in weights if name.startswith(VISION)}
    assert "patch_embedder.input_proj.weight" in tower
    assert "encoder.layers.0.self_attn.q_proj.weight" in tower
    assert "embed_vision.embedding_projection.weight" in tower
    assert "std_scale" in tower
    name = "encoder.layers.0.mlp.down_proj"
    expected = case.tensors()[f"model.vision_tower.{name}.linear.weight"]
    assert np.array_equal(to_numpy(weights[f"{VISION}{name}.weight"]), expected)


def test_the_tower_gets_the_graphs_dtype(tmp_path: Path) -> None:
    case = dataclasses.replace(CASES["gemma4-shared-values"], dtype="bfloat16")
    weights = adapted(case, tmp_path)
    # A CPU keeps the embedding as it is stored.
    assert weights.pop(EMBEDDING).dtype == DType.bfloat16
    assert {weight.dtype for weight in weights.values()} == {DType.float32}


def test_quantizing_at_load_packs_every_projection_and_nothing_of_the_tower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNQUANT_QUANT", "nvfp4")
    weights = adapted(CASES["gemma4-shared-values"], tmp_path)
    groups = {name.removesuffix(".codes") for name in weights if name.endswith(".codes")}
    sliding = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}
    full = sliding - {"self_attn.qkv_proj"} | {"self_attn.qk_proj"}
    kinds = enumerate([sliding, full, sliding, full])
    assert groups == {f"layers.{index}.{group}" for index, kind in kinds for group in kind}
    assert {w.dtype for name, w in weights.items() if name.startswith(VISION)} == {DType.float32}


@pytest.mark.parametrize("name", ["gemma4-own-values", "gemma4-unified"])
def test_a_text_only_checkpoint_has_no_tower(name: str, tmp_path: Path) -> None:
    assert not [w for w in adapted(CASES[name], tmp_path) if w.startswith(VISION)]


def test_full_layers_fuse_what_they_have(tmp_path: Path) -> None:
    weights = adapted(CASES["gemma4-shared-values"], tmp_path / "shared")
    roles = {n.split(".")[4] for n in weights if n.startswith("layers.1.self_attn.qk_proj.")}
    assert roles == {"q_proj", "k_proj"}
    roles = {n.split(".")[4] for n in weights if n.startswith("layers.0.self_attn.qkv_proj.")}
    assert roles == {"q_proj", "k_proj", "v_proj"}
    weights = adapted(CASES["gemma4-own-values"], tmp_path / "own")
    assert "layers.2.self_attn.qkv_proj.weight" in weights


def test_the_12b_lines_vision_embedder_belongs_to_nobody(tmp_path: Path) -> None:
    directory = CASES["gemma4-unified"].write(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    for name in ("vision_embedder.patch_ln1.weight", "embed_vision.embedding_projection.weight"):
        tensors[f"model.{name}"] = np.ones(8, np.float32)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    verify(directory)
    # A name that nobody knows is still refused.
    tensors["model.vision_decoder.weight"] = np.ones(8, np.float32)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"vision_decoder\.weight"):
        verify(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_shared_layers": 2}, "layers that share key-value projections"),
        ({"hidden_size_per_layer_input": 64}, "per-layer input embeddings"),
        ({"enable_moe_block": True}, "mixture-of-experts blocks"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    directory = CASES["gemma4-shared-values"].write(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= change
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        verify(directory)
