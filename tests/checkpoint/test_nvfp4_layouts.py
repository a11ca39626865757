"""NVFP4 on disk: bits are kept, and what does not fit together is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attnquant.checkpoint.nvfp4_layouts import (
    is_cache_scale,
    load_nvfp4,
    modelopt_specs,
    modelopt_tensors,
    stored_weights,
)
from attnquant.checkpoint.safetensors import DTYPE_NAMES, TensorSpec
from attnquant.errors import CheckpointError, UnsupportedError
from attnquant.nvfp4.format import NVFP4Weight
from attnquant.nvfp4.reference import decode

Values = dict[str, NDArray[Any]]
MODELOPT: dict[str, Any] = {
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}
}
COMPRESSED: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "group_size": 16, "type": "float"},
            }
        },
    }
}
PREFIX = "model.layers.0."
Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.up_proj"


def codes_and_scales(out: int, columns: int, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 256, (out, columns // 2), dtype=np.uint8)
    scales = random.integers(0, 127, (out, columns // 16), dtype=np.uint8)
    return codes, scales.view(ml_dtypes.float8_e4m3fn)


def modelopt(module: str = Q, out: int = 4, columns: int = 32, scale: float = 0.01) -> Values:
    codes, scales = codes_and_scales(out, columns)
    return {
        f"{module}.weight": codes,
        f"{module}.weight_scale": scales,
        f"{module}.weight_scale_2": np.full((), scale, np.float32),
        f"{module}.input_scale": np.full((), 0.25, np.float32),
    }


def compressed(module: str = Q, out: int = 4, columns: int = 32, scale: float = 96.0) -> Values:
    codes, scales = codes_and_scales(out, columns)
    return {
        f"{module}.weight_packed": codes,
        f"{module}.weight_scale": scales,
        f"{module}.weight_global_scale": np.full(1, scale, np.float32),
        f"{module}.input_global_scale": np.full(1, 4.0, np.float32),
    }


def dense(module: str = UP, out: int = 4, columns: int = 32) -> Values:
    return {f"{module}.weight": np.ones((out, columns), ml_dtypes.bfloat16)}


def specs(values: Values) -> dict[str, TensorSpec]:
    return {n: TensorSpec(dtype=DTYPE_NAMES[a.dtype], shape=a.shape) for n, a in values.items()}


CODE_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def exact(codes: NDArray[Any], scales: NDArray[Any]) -> NDArray[np.float64]:
    """code · block_scale, straight from the format's definition."""
    values = CODE_VALUES[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(len(codes), -1)
    return np.asarray(values * np.repeat(scales.astype(np.float64), 16, axis=1))


shapes = st.tuples(st.integers(1, 5), st.integers(1, 4).map(lambda n: 16 * n), st.integers(0, 99))
positive = st.floats(2.0**-100, 2.0**100, width=32)


@settings(deadline=None, max_examples=50)
@given(shapes, positive)
def test_modelopt_is_exact_both_ways(shape: tuple[int, int, int], scale: float) -> None:
    values = modelopt(out=shape[0], columns=shape[1], scale=scale)
    stored = stored_weights(specs(values), MODELOPT)["layers.0.self_attn.q_proj"]
    assert (stored.module, stored.layout, stored.shape) == (Q, "modelopt", shape[:2])
    assert stored.names == tuple(values)
    weight = load_nvfp4(stored, values.__getitem__)
    assert weight.codes is values[f"{Q}.weight"]
    expected = exact(values[f"{Q}.weight"], values[f"{Q}.weight_scale"]) * np.float64(scale)
    assert np.array_equal(decode(weight), expected.astype(np.float32))
    again = dict(modelopt_tensors(Q, weight))
    assert specs(again) == modelopt_specs(Q, shape[:2]) == specs(values)
    again.pop(f"{Q}.input_scale")
    assert all(again[name].tobytes() == values[name].tobytes() for name in again)


@settings(deadline=None, max_examples=50)
@given(shapes, positive)
def test_compressed_tensors_divides(shape: tuple[int, int, int], scale: float) -> None:
    values = compressed(out=shape[0], columns=shape[1], scale=scale)
    stored = stored_weights(specs(values), COMPRESSED)["layers.0.self_attn.q_proj"]
    assert (stored.layout, stored.shape) == ("compressed-tensors", shape[:2])
    weight = load_nvfp4(stored, values.__getitem__)
    assert weight.codes is values[f"{Q}.weight_packed"]
    assert weight.block_scales is values[f"{Q}.weight_scale"]
    assert weight.global_scales[0] == np.float32(1) / np.float32(scale)
    expected = exact(weight.codes, weight.block_scales) / np.float64(scale)
    assert np.allclose(decode(weight), expected, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("exponent", [-20, 0, 7, 40])
def test_compressed_tensors_is_exact_where_the_reciprocal_is(exponent: int) -> None:
    values = compressed(scale=2.0**exponent)
    stored = stored_weights(specs(values), COMPRESSED)["layers.0.self_attn.q_proj"]
    weight = load_nvfp4(stored, values.__getitem__)
    expected = exact(weight.codes, weight.block_scales) / 2.0**exponent
    assert np.array_equal(decode(weight), expected.astype(np.float32))


def test_fused_parts_keep_their_own_global_scales() -> None:
    parts = []
    for role, scale in (("q_proj", 0.5), ("k_proj", 0.01), ("v_proj", 3.0)):
        module = f"{PREFIX}self_attn.{role}"
        values = modelopt(module, scale=scale)
        stored = stored_weights(specs(values), MODELOPT)[f"layers.0.self_attn.{role}"]
        parts.append(load_nvfp4(stored, values.__getitem__))
    fused = NVFP4Weight.stack(parts)
    assert np.array_equal(decode(fused), np.concatenate([decode(part) for part in parts]))


@pytest.mark.parametrize(
    "prefix", ["model.", "", "language_model.model.", "model.language_model.", "language_model."]
)
def test_every_prefix_is_the_same_weight(prefix: str) -> None:
    module = f"{prefix}layers.7.mlp.down_proj"
    stored = stored_weights(specs(modelopt(module)), {})
    assert stored["layers.7.mlp.down_proj"].module == module


def test_what_is_no_projection_is_left_alone() -> None:
    values = {
        **dense(),
        **dense("lm_head"),
        "model.embed_tokens.weight": np.ones((2, 3), np.float32),
        "model.vision_tower.encoder.layers.0.mlp.up_proj.weight": np.ones(2, np.int8),
        "model.layers.0.self_attn.k_proj.k_scale": np.ones(1, np.float32),
        "model.layers.0.self_attn.v_scale": np.ones((), np.float32),
    }
    stored = stored_weights(specs(values), {})
    assert set(stored) == {"layers.0.mlp.up_proj", "lm_head"}
    assert not any(weight.is_nvfp4 for weight in stored.values())
    assert stored["lm_head"].names == ("lm_head.weight",)


def test_cache_scales() -> None:
    for name in ("k_proj.k_scale", "v_proj.v_scale", "k_scale", "attn.k_scale", "kv_scale"):
        assert is_cache_scale(f"model.layers.3.self_attn.{name}")
    assert is_cache_scale("model.layers.3.self_attn.k_proj.output_scale")
    for name in ("k_proj.weight_scale", "k_proj.input_scale", "q_norm.weight", "o_proj.k_scale"):
        assert not is_cache_scale(f"model.layers.3.self_attn.{name}")


def declared(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"quantization_config": {**config["quantization_config"], **changes}}


MIXED = {**modelopt(), **dense()}
HF_QUANT = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["*mlp*"]}
AGREEING: dict[str, tuple[Values, dict[str, Any], dict[str, Any] | None, set[str]]] = {
    "glob": (MIXED, declared(MODELOPT, ignore=["model.layers.0.mlp*"]), None, {Q}),
    "role": (MIXED, declared(MODELOPT, ignore=["*up_proj"]), None, {Q}),
    "hf_quant_config only": (MIXED, {}, {"quantization": HF_QUANT}, {Q}),
    "regex": (
        {**compressed(UP), **dense(Q)},
        declared(COMPRESSED, ignore=["re:.*self_attn.*"]),
        None,
        {UP},
    ),
    "targets": (
        {**compressed(), **dense()},
        declared(COMPRESSED, config_groups={"g": {"targets": ["re:.*self_attn.*"]}}),
        None,
        {Q},
    ),
    "head": ({**compressed(), **dense("lm_head")}, COMPRESSED, None, {Q}),
    "quantized head": ({**modelopt("lm_head"), **modelopt()}, MODELOPT, None, {Q, "lm_head"}),
    "odd width": ({**modelopt(), **dense(columns=24)}, MODELOPT, None, {Q}),
    "undeclared": (MIXED, {}, None, {Q}),
    "dense": (dense(), {}, None, set()),
}


@pytest.mark.parametrize("name", AGREEING)
def test_declarations_that_agree(name: str) -> None:
    values, config, hf_quant_config, quantized = AGREEING[name]
    stored = stored_weights(specs(values), config, hf_quant_config)
    assert {weight.module for weight in stored.values() if weight.is_nvfp4} == quantized


def without(values: Values, name: str) -> Values:
    return {key: array for key, array in values.items() if not key.endswith(f".{name}")}


def changed(values: Values, name: str, array: NDArray[Any]) -> Values:
    (full,) = (key for key in values if key.endswith(f".{name}"))
    return {**values, full: array}


F8 = ml_dtypes.float8_e4m3fn
BROKEN: dict[str, tuple[Values, dict[str, Any], str]] = {
    "no block scales": (
        without(modelopt(), "weight_scale"),
        MODELOPT,
        f"{Q}.weight_scale: absent, but {Q}.weight is there",
    ),
    "no global scale": (
        without(modelopt(), "weight_scale_2"),
        MODELOPT,
        f"{Q}.weight_scale_2: absent",
    ),
    "no codes": (without(modelopt(), "weight"), MODELOPT, f"{Q}.weight: absent"),
    "no reciprocal scale": (
        without(compressed(), "weight_global_scale"),
        COMPRESSED,
        f"{Q}.weight_global_scale: absent",
    ),
    "only an input scale": (
        {f"{Q}.input_scale": np.ones((), np.float32)},
        MODELOPT,
        f"{Q}.weight: absent",
    ),
    "both layouts": (
        {**modelopt(), **compressed()},
        MODELOPT,
        f"{Q}.weight: found this in {Q}",
    ),
    "bias": (
        {**dense(Q), f"{Q}.bias": np.ones(4, np.float32)},
        {},
        f"{Q}.bias: found this in {Q}, expected a dense weight alone",
    ),
    "only a bias": ({f"{Q}.bias": np.ones(4, np.float32)}, {}, f"{Q}.bias: found this"),
    "AWQ": (
        {**modelopt(), f"{Q}.pre_quant_scale": np.ones(32, np.float32)},
        MODELOPT,
        f"{Q}.pre_quant_scale: found this",
    ),
    "bare codes": (
        {f"{Q}.weight": np.ones((4, 16), np.uint8)},
        {},
        f"{Q}.weight: found U8 [4, 16], expected BF16, F16, F32",
    ),
    "float8": ({f"{Q}.weight": np.ones((4, 16), F8)}, {}, "found F8_E4M3 [4, 16], expected BF16"),
    "vector": ({f"{Q}.weight": np.ones(4, np.float32)}, {}, "found F32 [4], expected a matrix"),
    "codes of int8": (
        changed(modelopt(), "weight", np.ones((4, 16), np.int8)),
        MODELOPT,
        f"{Q}.weight: found I8 [4, 16], expected U8 [out, in / 2]",
    ),
    "odd width": (
        changed(modelopt(), "weight", np.ones((4, 12), np.uint8)),
        MODELOPT,
        "found U8 [4, 12], expected U8 [out, in / 2], in a multiple of 16",
    ),
    "scales of the wrong shape": (
        changed(modelopt(), "weight_scale", np.ones((4, 1), F8)),
        MODELOPT,
        f"{Q}.weight_scale: found F8_E4M3 [4, 1], expected F8_E4M3 [4, 2]",
    ),
    "scales of bytes": (
        changed(modelopt(), "weight_scale", np.ones((4, 2), np.uint8)),
        MODELOPT,
        "found U8 [4, 2], expected F8_E4M3 [4, 2]",
    ),
    "global scale a vector": (
        changed(modelopt(), "weight_scale_2", np.ones(2, np.float32)),
        MODELOPT,
        f"{Q}.weight_scale_2: found F32 [2], expected F32 [] or [1]",
    ),
    "global scale bf16": (
        changed(modelopt(), "weight_scale_2", np.ones((), ml_dtypes.bfloat16)),
        MODELOPT,
        "found BF16 [], expected F32",
    ),
    "two prefixes": (
        {**dense(), **dense(UP.replace("model.", "language_model.model."))},
        {},
        f"found {UP} too, the same weight under another prefix",
    ),
    "declared NVFP4, found dense": (
        {**modelopt(), **dense()},
        MODELOPT,
        f"{UP}.weight: found dense [4, 32], but config.json says it is in NVFP4",
    ),
    "declared ignored, found NVFP4": (
        modelopt(),
        declared(MODELOPT, ignore=["*self_attn*"]),
        f"{Q}.weight: found modelopt [4, 32], but config.json says it is not quant",
    ),
    "declared modelopt, found compressed-tensors": (
        compressed(),
        MODELOPT,
        f"{Q}.weight_packed: found compressed-tensors NVFP4, but config.json says mod",
    ),
    "declared compressed-tensors, found modelopt": (
        modelopt(),
        COMPRESSED,
        f"{Q}.weight: found modelopt NVFP4, but config.json says compressed-tensors",
    ),
    "declared blocks of 32": (
        modelopt(),
        declared(MODELOPT, group_size=32),
        "group_size is 32, expected 16",
    ),
    "declared 8 bits": (
        compressed(),
        declared(COMPRESSED, config_groups={"g": {"weights": {"num_bits": 8}}}),
        "num_bits is 8, expected 4",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_contradictions_name_the_tensor(name: str) -> None:
    values, config, words = BROKEN[name]
    with pytest.raises(CheckpointError) as caught:
        stored_weights(specs(values), config)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


def test_another_quantization_is_unsupported() -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UnsupportedError, match="fp8"):
        stored_weights(specs({f"{Q}.weight": np.ones((4, 16), F8)}), config)


@pytest.mark.parametrize("make", [modelopt, compressed])
@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, -np.inf])
def test_impossible_global_scales(make: Callable[..., Values], scale: float) -> None:
    values = make(scale=scale)
    stored = stored_weights(specs(values), {})["layers.0.self_attn.q_proj"]
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_\w+: found .*, expected a finite"):
        load_nvfp4(stored, values.__getitem__)


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0x88])
def test_impossible_block_scales(byte: int) -> None:
    bytes_ = np.full((4, 2), 0x38, np.uint8)
    bytes_[2, 1] = byte
    values = changed(modelopt(), "weight_scale", bytes_.view(F8))
    stored = stored_weights(specs(values), MODELOPT)["layers.0.self_attn.q_proj"]
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale: block_scales: found a NaN"):
        load_nvfp4(stored, values.__getitem__)
