"""A whole checkpoint against its config: what is accepted, and the one line for what is not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attnquant.checkpoint.verify import verify, verify_decoder
from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import AttnquantError, CheckpointError
from tests.checkpoint.decoder import CONFIG, GEMMA4, HEAD_DIM, HIDDEN, INNER, LAYERS, weights
from tests.checkpoint.files import write
from tests.tiny.cases import CASES

Q = "model.layers.0.self_attn.q_proj"
HEAD = weights()["model.embed_tokens.weight"]
TOWERS = {
    f"model.{name}": np.ones(3, np.float32)
    for name in ("vision_tower.x", "embed_vision.y", "audio_tower.z", "embed_audio.a")
}


def checkpoint(root: Path, tensors: dict[str, Any], config: dict[str, Any] = CONFIG) -> Path:
    return write(root / "model", {"config.json": config, "model.safetensors": tensors})


@pytest.mark.parametrize(
    "prefix", ["model.", "", "language_model.model.", "model.language_model.", "language_model."]
)
def test_every_prefix_is_the_same_decoder(prefix: str, tmp_path: Path) -> None:
    opened = verify(checkpoint(tmp_path, weights(prefix)))
    stored = verify_decoder(opened, DecoderShapes.from_config(CONFIG))
    assert len(stored) == 7 * LAYERS


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({**weights(), "model.rotary_emb.inv_freq": np.ones(8, np.float32)}, CONFIG),
        ({**weights(), f"{Q[:-6]}k_proj.k_scale": np.ones((), np.float32)}, CONFIG),
        ({**weights(), "lm_head.weight": HEAD}, CONFIG),
        ({**weights(), "lm_head.weight": -HEAD}, {**CONFIG, "tie_word_embeddings": False}),
        ({**weights(gemma4=True), **TOWERS}, GEMMA4),
        ({n: a.astype(np.float16) for n, a in weights().items()}, CONFIG),
    ],
    ids=["rotary", "cache scale", "tied head", "untied head", "towers", "float16"],
)
def test_odd_but_good(tensors: dict[str, Any], config: dict[str, Any], tmp_path: Path) -> None:
    verify(checkpoint(tmp_path, tensors, config))


def without(*names: str) -> dict[str, Any]:
    return {key: array for key, array in weights().items() if key not in names}


BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "missing": (
        without(f"{Q}.weight", "model.norm.weight"),
        CONFIG,
        "tensor layers.0.self_attn.q_proj.weight is missing, and 1 more of the 28 that config",
    ),
    "missing norm": (without("model.norm.weight"), CONFIG, "tensor norm.weight is missing, and 0"),
    "unknown": (
        {**weights(), "model.layers.0.foo": HEAD},
        CONFIG,
        "tensor model.layers.0.foo: unk",
    ),
    "unknown prefix": (
        weights("transformer."),
        CONFIG,
        "tensor transformer.embed_tokens.weight: u",
    ),
    "surplus layer": (
        weights(),
        {**CONFIG, "num_hidden_layers": 1},
        "tensor model.layers.1.input_layernorm.weight: unknown",
    ),
    "surplus projection": (
        {**weights(), "model.layers.2.mlp.up_proj.weight": np.ones((INNER, HIDDEN), np.float32)},
        CONFIG,
        "tensor model.layers.2.mlp.up_proj.weight: unknown",
    ),
    "towers of a text model": ({**weights(), **TOWERS}, CONFIG, "vision_tower.x: unknown"),
    "projection's shape": (
        weights(),
        {**CONFIG, "intermediate_size": 64},
        "gate_proj.weight: found shape [48, 32], expected [64, 32] as config.json implies",
    ),
    "norm's shape": (
        {**weights(), "model.norm.weight": np.ones(HEAD_DIM, np.float32)},
        CONFIG,
        "tensor model.norm.weight: found shape [16], expected [32]",
    ),
    "embedding's shape": (
        weights(),
        {**CONFIG, "vocab_size": 41},
        "tensor model.embed_tokens.weight: found shape [40, 32], expected [41, 32]",
    ),
    "dtype": (
        {**weights(), "model.norm.weight": np.ones(HIDDEN, np.int64)},
        CONFIG,
        "tensor model.norm.weight: found dtype I64, expected BF16, F16, F32",
    ),
    "two prefixes": (
        {**weights(), "norm.weight": np.ones(HIDDEN, np.float32)},
        CONFIG,
        "tensor norm.weight: found model.norm.weight too",
    ),
    "head absent": (
        weights(),
        {**CONFIG, "tie_word_embeddings": False},
        "tensor lm_head.weight is missing, and 0 more of the 29 that config.json implies with tie_",
    ),
    "tied head differs": (
        {**weights(), "lm_head.weight": np.concatenate([HEAD[:-1], -HEAD[-1:]])},
        CONFIG,
        "tensor lm_head.weight: differs from model.embed_tokens.weight",
    ),
    "tied head's shape": (
        {**weights(), "lm_head.weight": HEAD[:-1]},
        CONFIG,
        "tensor lm_head.weight: found shape [39, 32], expected [40, 32]",
    ),
    "tied head's dtype": (
        {**weights(), "lm_head.weight": HEAD.astype(np.float32)},
        CONFIG,
        "tensor lm_head.weight: differs from",
    ),
    "says NVFP4, is not": (
        weights(),
        {**CONFIG, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        "but config.json says it is in NVFP4",
    ),
    "NVFP4 of another shape": (
        {
            **without(f"{Q}.weight"),
            f"{Q}.weight": np.zeros((32, 24), np.uint8),
            f"{Q}.weight_scale": np.ones((32, 3), ml_dtypes.float8_e4m3fn),
            f"{Q}.weight_scale_2": np.ones((), np.float32),
        },
        CONFIG,
        f"tensor {Q}.weight: found shape [32, 48], expected [32, 32]",
    ),
    "another architecture": (weights(), {**CONFIG, "architectures": ["LlamaForCausalLM"]}, "Llama"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_refused_in_one_line(name: str, tmp_path: Path) -> None:
    tensors, config, words = BROKEN[name]
    directory = checkpoint(tmp_path, tensors, config)
    start = time.process_time()
    with pytest.raises(AttnquantError) as caught:
        verify(directory)
    assert time.process_time() - start < 2
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


def tower(name: str = "gemma4-shared-values") -> tuple[dict[str, Any], dict[str, Any]]:
    return CASES[name].tensors(), CASES[name].config()


PATCHES = "model.vision_tower.patch_embedder.input_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({PATCHES: None}, "input_proj.weight is missing, and 0 more of the 18 that config.json's"),
        ({PATCHES: np.ones((64, 48), np.float32)}, "found shape [64, 48], expected [64, 192]"),
        ({PATCHES: np.ones((64, 192), np.int8)}, f"{PATCHES}: found dtype I8"),
        ({PATCHES + "_2": HEAD}, f"{PATCHES}_2: unknown, expected only what config.json's vis"),
        (
            {PATCHES.removeprefix("model."): np.ones((64, 192), np.float32)},
            "the same weight under another name",
        ),
    ],
    ids=["missing", "shape", "dtype", "unknown", "twice"],
)
def test_a_served_vision_tower(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    tensors, config = tower()
    verify(checkpoint(tmp_path / "good", tensors, config))
    changed = {name: array for name, array in {**change, **tensors, **change}.items()}
    changed = {name: array for name, array in changed.items() if array is not None}
    with pytest.raises(CheckpointError) as caught:
        verify(checkpoint(tmp_path / "bad", changed, config))
    assert words in str(caught.value) and str(tmp_path / "bad") in str(caught.value)
    # Served as text, nobody needs it.
    verify(checkpoint(tmp_path / "text", changed, config | {"vision_config": None}))


def test_errors_name_the_file(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, {**weights(), "model.foo": HEAD})
    with pytest.raises(CheckpointError) as caught:
        verify(directory)
    assert str(caught.value).startswith(f"{directory / 'model.safetensors'}: tensor model.foo: ")
