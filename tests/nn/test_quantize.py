"""What quantizing at load stores, keeps and says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from max.dtype import DType
from max.graph.weights import WeightData, load_weights
from safetensors.numpy import save_file

from attnquant.checkpoint.export import export_nvfp4
from attnquant.errors import CheckpointError, SettingsError
from attnquant.nn.tensors import to_numpy
from attnquant.nn.weights import decoder_weights
from attnquant.nvfp4.reference import encode, largest_magnitude
from attnquant.settings import Settings
from tests.tiny.gemma3 import CASES

CASE = CASES["pattern2-scalar"]
NVFP4 = Settings(quant="nvfp4")


def load(directory: Path, settings: Settings = NVFP4) -> dict[str, WeightData]:
    weights = load_weights(sorted(directory.glob("*.safetensors")))
    return decoder_weights(
        dict(weights.items()), config=CASE.config(), dtype=DType.bfloat16, settings=settings
    )


def test_a_fused_group_is_encoded_with_one_global_scale(
    tiny_directory: Callable[[str], Path],
) -> None:
    state = load(tiny_directory(CASE.name))
    tensors = CASE.tensors()
    parts = [tensors[f"model.layers.0.self_attn.{role}_proj.weight"] for role in "qkv"]
    amax = float(max(map(largest_magnitude, parts)))
    expected = [encode(part, amax=amax) for part in parts]
    module = "layers.0.self_attn.qkv_proj"
    codes = np.concatenate([part.codes for part in expected])
    scales = np.concatenate([part.block_scales for part in expected])
    assert np.array_equal(to_numpy(state[f"{module}.codes"]), codes)
    assert np.array_equal(to_numpy(state[f"{module}.block_scales"]), scales.view(np.uint8))
    assert to_numpy(state[f"{module}.global_scales"]).tolist() == [
        part.global_scales[0] for part in expected
    ]


def test_everything_but_projections_stays_as_it_is(tiny_directory: Callable[[str], Path]) -> None:
    packed, dense = load(tiny_directory(CASE.name)), load(tiny_directory(CASE.name), Settings())
    for name in ("embed_tokens.weight", "norm.weight", "layers.3.self_attn.q_norm.weight"):
        assert to_numpy(packed[name]).tobytes() == to_numpy(dense[name]).tobytes()
    assert not any(name.endswith("_proj.weight") for name in packed)


def test_ignored_attention_stays_dense(tiny_directory: Callable[[str], Path]) -> None:
    state = load(tiny_directory(CASE.name), Settings(quant="nvfp4", quant_ignore=("self_attn",)))
    assert "layers.0.self_attn.qkv_proj.q_proj.weight" in state
    assert "layers.0.mlp.gate_up_proj.codes" in state
    assert not any("self_attn" in name and name.endswith(".codes") for name in state)


def test_the_tied_head_gets_a_packed_copy(tiny_directory: Callable[[str], Path]) -> None:
    state = load(tiny_directory(CASE.name), Settings(quant="nvfp4", quant_lm_head="nvfp4"))
    expected = encode(CASE.tensors()["model.embed_tokens.weight"])
    assert np.array_equal(to_numpy(state["lm_head.codes"]), expected.codes)
    assert "embed_tokens.weight" in state


def test_an_nvfp4_checkpoint_keeps_its_bits(
    tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    # Other scales than ours would be, and q, k and v each with its own.
    def foreign(weight: np.ndarray, *, amax: float, name: str):
        return encode(weight, scales="absmax", name=name)

    source = tiny_directory(CASE.name)
    export_nvfp4(source, tmp_path / "foreign", encode=foreign, recipe={}, ignore=["o_proj"])
    state = load(tmp_path / "foreign")
    scales = to_numpy(state["layers.0.self_attn.qkv_proj.global_scales"])
    assert len(set(scales.tolist())) == 3
    stored = encode(CASE.tensors()["model.layers.0.self_attn.q_proj.weight"], scales="absmax")
    rows = len(stored.codes)
    assert np.array_equal(to_numpy(state["layers.0.self_attn.qkv_proj.codes"])[:rows], stored.codes)
    # What the file left dense is quantized as it loads.
    assert "layers.0.self_attn.o_proj.codes" in state
    assert "layers.0.self_attn.o_proj.weight" in load(tmp_path / "foreign", Settings())


def test_the_report_names_the_worst_projection(
    tiny_directory: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    load(tiny_directory(CASE.name))
    report = capsys.readouterr().err
    for words in ("projection", "worst: layers.", "bytes per token:", "before", "after"):
        assert words in report
    load(tiny_directory(CASE.name), Settings())
    assert capsys.readouterr().err == ""


def test_a_nan_is_named_with_its_place(tmp_path: Path) -> None:
    tensors = CASE.tensors()
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 17] = ml_dtypes.bfloat16("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}: found nan at \[3, 17\]"):
        load(tmp_path)


def test_a_pattern_that_matches_nothing_lists_what_exists(
    tiny_directory: Callable[[str], Path],
) -> None:
    settings = Settings(quant="nvfp4", quant_ignore=("qkv_proj",))
    with pytest.raises(SettingsError, match="ATTNQUANT_QUANT_IGNORE: 'qkv_proj' matches no"):
        load(tiny_directory(CASE.name), settings)


def test_a_checkpoint_with_every_projection_in_nvfp4_loads(
    tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    export_nvfp4(tiny_directory(CASE.name), tmp_path / "all", encode=encode, recipe={})
    at_load, exported = load(tiny_directory(CASE.name)), load(tmp_path / "all", Settings())
    assert exported.keys() == at_load.keys()
    for name, tensor in at_load.items():
        assert to_numpy(exported[name]).tobytes() == to_numpy(tensor).tobytes(), name
