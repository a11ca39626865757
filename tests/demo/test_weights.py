"""Names, config and weights, from a tiny GGUF file."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AutoConfig

pytest.importorskip("gguf", reason="needs the demo extra: pip install -e '.[demo]'")

from gguf import GGUFReader

from attnquant.checkpoint import Checkpoint
from attnquant.demo import weights
from attnquant.demo.prepare import DemoError, write_checkpoint
from attnquant.errors import CheckpointError
from tests.demo import tiny_gguf


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("weights")
    source = directory / "source.gguf"
    tiny_gguf.write(source)
    write_checkpoint(GGUFReader(source), directory)
    source.unlink()
    return Checkpoint.open(directory)


def q8_0(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values as Q8_0 keeps them: per 32 along a row, 8-bit integers times a float16 scale."""
    blocks = values.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    scaled = blocks * inverse
    # Halves away from zero.
    integers = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    return (integers * scale.astype(np.float16).astype(np.float32)).reshape(values.shape)


def test_every_tensor_has_its_name_shape_and_values(checkpoint: Checkpoint) -> None:
    expected = tiny_gguf.tensors()
    assert len(checkpoint.tensors) == len(expected) == 2 + 13 * tiny_gguf.LAYERS
    for name, values in expected.items():
        if not name.endswith("_norm.weight"):
            values = q8_0(values)
        ours = checkpoint.array(weights.tensor_name(name))
        assert ours.dtype == ml_dtypes.bfloat16
        assert ours.shape == values.shape
        np.testing.assert_array_equal(ours, values.astype(ml_dtypes.bfloat16))


def test_rounding_is_to_nearest_even(tmp_path: Path) -> None:
    """bfloat16 has 8 bits of precision: 257 and 259 lie halfway between neighbours."""
    from gguf import GGUFWriter

    values = np.array([[257, 259, 256, 258, -257, -259, 257.001, 3e38]], np.float32)
    writer = GGUFWriter(tmp_path / "x.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = GGUFReader(tmp_path / "x.gguf")
    done: list[int] = []
    weights.write_safetensors(tmp_path / "model.safetensors", reader.tensors, done.append)
    assert sum(done) == 2 * values.size
    (tmp_path / "config.json").write_text("{}")
    ours = Checkpoint.open(tmp_path).array("model.embed_tokens.weight").astype(np.float32)
    assert ours[0, :7].tolist() == [256, 260, 256, 258, -256, -260, 258]


def test_large_tensors_are_written_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint
) -> None:
    monkeypatch.setattr(weights, "_ROWS_AT_ONCE", 5)
    tiny_gguf.write(tmp_path / "x.gguf")
    path = tmp_path / "model.safetensors"
    weights.write_safetensors(path, GGUFReader(tmp_path / "x.gguf").tensors, lambda nbytes: None)
    assert path.read_bytes() == (checkpoint.directory / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("blk.17.attn_output.weight", "model.layers.17.self_attn.o_proj.weight"),
        ("blk.3.attn_q_norm.weight", "model.layers.3.self_attn.q_norm.weight"),
        ("blk.3.ffn_norm.weight", "model.layers.3.pre_feedforward_layernorm.weight"),
        ("blk.3.post_ffw_norm.weight", "model.layers.3.post_feedforward_layernorm.weight"),
        ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight"),
    ],
)
def test_names(name: str, ours: str) -> None:
    assert weights.tensor_name(name) == ours


@pytest.mark.parametrize(
    "name", ["output.weight", "blk.3.attn_q.bias", "blk.x.attn_q.weight", "blk.3.weight", "v.blk.0"]
)
def test_other_names_are_an_error(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        weights.tensor_name(name)


def test_a_foreign_tensor_is_an_error(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "x.gguf", extra="blk.0.ffn_gate_inp.weight")
    with pytest.raises(CheckpointError, match="ffn_gate_inp"):
        write_checkpoint(GGUFReader(tmp_path / "x.gguf"), tmp_path)


@pytest.mark.parametrize("key", ["gemma3.rope.freq_base", "gemma3.block_count"])
def test_a_missing_key_is_an_error(tmp_path: Path, key: str) -> None:
    tiny_gguf.write(tmp_path / "x.gguf", leave_out=key)
    with pytest.raises(DemoError, match=key):
        write_checkpoint(GGUFReader(tmp_path / "x.gguf"), tmp_path)


def test_transformers_reads_the_config(checkpoint: Checkpoint) -> None:
    config = AutoConfig.from_pretrained(checkpoint.directory)
    assert type(config).__name__ == "Gemma3TextConfig"
    assert config.architectures == ["Gemma3ForCausalLM"]
    assert config.num_hidden_layers == tiny_gguf.LAYERS
    assert config.layer_types == [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    assert config.hidden_size == tiny_gguf.HIDDEN
    assert config.intermediate_size == tiny_gguf.INTERMEDIATE
    assert config.num_attention_heads == tiny_gguf.HEADS
    assert config.num_key_value_heads == 1
    assert config.head_dim == config.query_pre_attn_scalar == tiny_gguf.HEAD_DIM
    assert config.rms_norm_eps == 1e-6
    assert config.sliding_window == 128
    assert config.max_position_embeddings == 256
    assert config.vocab_size == len(tiny_gguf.TOKENS)
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (2, 1, 0)
    assert config.tie_word_embeddings


def test_older_readers_find_the_flat_fields(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["rope_scaling"] is None
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["sliding_window_pattern"] == config["_sliding_window_pattern"] == 6
