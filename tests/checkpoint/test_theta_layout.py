"""Theta checkpoints: what an export writes, and what is said of one that is not whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from attnquant.checkpoint.checkpoint import INDEX_FILE, Checkpoint
from attnquant.checkpoint.export import export_nvfp4
from attnquant.checkpoint.export_theta import export_theta
from attnquant.checkpoint.theta_layout import StoredBundle, held_bundles
from attnquant.checkpoint.verify import verify, verify_decoder
from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import AttnquantError, CheckpointError, SettingsError
from attnquant.nvfp4.reference import encode
from attnquant.projections import ROLES, ProjectionKey
from attnquant.theta.decompose import decompose
from tests.checkpoint.decoder import CONFIG, LAYERS, SHAPES, weights
from tests.checkpoint.files import write

BLOCKS, RANK = 1, 4
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(
        tmp_path_factory.mktemp("source"),
        {"config.json": CONFIG, "model.safetensors": weights(), "tokenizer.json": {"a": 1}},
    )


def export(source: Path, target: Path, **options: Any) -> Path:
    defaults = {"blocks": BLOCKS, "rank": RANK, "encode": encode, "recipe": {}}
    export_theta(source, target, **(defaults | options))
    return target


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(source, tmp_path_factory.mktemp("exported") / "theta")


def rewritten(exported: Path, target: Path, config: Any = None, **changes: Any) -> Path:
    """The export with some tensors replaced, added or (None) left out."""
    tensors = load_file(exported / "model.safetensors") | changes
    found = json.loads((exported / "config.json").read_text())
    kept = {name: value for name, value in tensors.items() if value is not None}
    return write(target, {"config.json": found | (config or {}), "model.safetensors": kept})


def test_an_export_holds_bundles_and_says_so(source: Path, exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert config["attnquant"] == {
        "format": 1,
        "blocks": BLOCKS,
        "rank": RANK,
        "quant": "none",
        "quant_ignore": [],
    }
    assert {name: config[name] for name in CONFIG} == CONFIG
    assert (exported / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    before, after = weights(), load_file(exported / "model.safetensors")
    for module, shape in SHAPES.items():
        names = [f"model.layers.{layer}.{module}" for layer in range(LAYERS)]
        bundles = decompose(
            [before.pop(f"{name}.weight") for name in names], RANK, dtype=ml_dtypes.bfloat16
        )
        assert np.array_equal(after.pop(f"{names[0]}.w0"), bundles[0].w0)
        for name, bundle in zip(names, bundles, strict=True):
            for part in ("s", "u", "v"):
                assert np.array_equal(after.pop(f"{name}.{part}"), getattr(bundle, part))
            assert bundle.u.shape == (shape[0], min(RANK, *shape))
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[name], before[name]) for name in after)


def test_an_export_verifies_and_its_bundles_are_found(exported: Path) -> None:
    checkpoint = verify(exported)
    shapes = DecoderShapes.from_config(checkpoint.config)
    stored = verify_decoder(checkpoint, shapes)
    assert {key.module for key in shapes.projections} == stored.keys()
    second = stored["layers.1.self_attn.q_proj"]
    assert isinstance(second, StoredBundle)
    assert (second.module, second.shape) == ("model.layers.1.self_attn.q_proj", (32, 32))
    assert second.block.names == (f"{Q}.w0",) and not second.is_nvfp4
    held = held_bundles(checkpoint.config, stored)
    assert held is not None and (held.blocks, held.rank, held.packed) == (BLOCKS, RANK, False)


def test_packed_blocks(source: Path, tmp_path: Path) -> None:
    checkpoint = verify(export(source, tmp_path / "t", quant="nvfp4", ignore=("mlp.down_proj",)))
    stored = verify_decoder(checkpoint, DecoderShapes.from_config(checkpoint.config))
    packed = {path for path, weight in stored.items() if weight.is_nvfp4}
    expected = {
        ProjectionKey(layer=layer, role=role).module
        for layer in range(LAYERS)
        for role in ROLES
        if role != "down_proj"
    }
    assert packed == expected
    assert checkpoint.config["attnquant"]["quant_ignore"] == ["mlp.down_proj"]
    before = weights()
    blocks = [
        decompose([before[f"model.layers.{n}.{name}.weight"] for n in range(LAYERS)], 0)[0].w0
        for name in list(SHAPES)[:3]
    ]
    amax = max(np.abs(block.astype(ml_dtypes.bfloat16).astype("f4")).max() for block in blocks)
    block = encode(blocks[0].astype(ml_dtypes.bfloat16), amax=float(amax))
    assert np.array_equal(checkpoint.array(f"{Q}.w0"), block.codes)
    assert np.array_equal(checkpoint.array(f"{Q}.w0_scale"), block.block_scales)
    assert checkpoint.array(f"{Q}.w0_scale_2") == block.global_scales[0]


def test_a_layer_that_shares_with_none_keeps_its_weight(tmp_path: Path) -> None:
    config = CONFIG | {"num_hidden_layers": 3}
    tensors = weights()
    for name in [name for name in tensors if ".layers.1." in name]:
        tensors[name.replace(".1.", ".2.")] = tensors[name]
    source = write(tmp_path / "source", {"config.json": config, "model.safetensors": tensors})
    third = "model.layers.2.self_attn.q_proj"
    plain = verify(export(source, tmp_path / "plain", blocks=2))
    assert np.array_equal(plain.array(f"{third}.weight"), tensors[f"{third}.weight"])
    packed = verify(export(source, tmp_path / "packed", blocks=2, quant="nvfp4"))
    nvfp4 = tmp_path / "nvfp4"
    export_nvfp4(source, nvfp4, encode=encode, recipe={})
    for name in ("weight", "weight_scale", "weight_scale_2"):
        whole = Checkpoint.open(nvfp4).array(f"{third}.{name}")
        assert np.array_equal(packed.array(f"{third}.{name}"), whole)


def test_a_bundle_may_span_shards(exported: Path, tmp_path: Path) -> None:
    """A shard a tensor: no two parts of a bundle lie together."""
    tensors = load_file(exported / "model.safetensors")
    files: dict[str, Any] = {"config.json": json.loads((exported / "config.json").read_text())}
    weight_map = {}
    for index, (name, value) in enumerate(tensors.items(), start=1):
        shard = f"model-{index:05d}-of-{len(tensors):05d}.safetensors"
        files[shard] = {name: value}
        weight_map[name] = shard
    files[INDEX_FILE] = {"metadata": {}, "weight_map": weight_map}
    checkpoint = verify(write(tmp_path / "sharded", files))
    assert len({info.file for info in checkpoint.tensors.values()}) == len(tensors)


ONES: NDArray[Any] = np.ones((4, 4), ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{Q}.w0": None}, "tensor layers.0.self_attn.q_proj.w0 is missing, a part of a theta"),
        ({f"{Q}.s": None}, "layers.0.self_attn.q_proj.s is missing"),
        ({f"{Q.replace('0', '1')}.v": None}, "layers.1.self_attn.q_proj.v is missing"),
        ({f"{Q}.u": ONES}, f"{Q}.u: found BF16 [4, 4], expected BF16 [32, 4] as config.json"),
        (
            {f"{Q}.s": np.ones(32, ml_dtypes.bfloat16)},
            f"{Q}.s: found BF16 [32], expected F32 [32]",
        ),
        (
            {f"{Q}.v": np.ones((32, 4), np.float32)},
            f"{Q}.v: found F32 [32, 4], expected BF16 [32, 4]",
        ),
        ({f"{Q}.w0": ONES}, f"{Q}.w0: found BF16 [4, 4], expected BF16 or F16 or F32 [32, 32]"),
        (
            {f"{Q.replace('0', '1')}.w0": np.ones((32, 32), ml_dtypes.bfloat16)},
            "layers.1.self_attn.q_proj.w0: unknown, expected only the parts that 1 blocks of",
        ),
        (
            {f"{Q}.weight": np.ones((32, 32), ml_dtypes.bfloat16)},
            f"{Q}.weight: found {Q}.s too, expected a weight or its theta bundle",
        ),
        (
            {f"{Q.removeprefix('model.')}.s": np.ones(32, np.float32)},
            "the same part under another prefix",
        ),
    ],
)
def test_a_part_that_is_missing_surplus_or_misshapen_is_named(
    changes: dict[str, Any], words: str, exported: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        verify(rewritten(exported, tmp_path / "t", **changes))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, 'found a part of a theta bundle, but config.json\'s "attnquant" object has no format'),
        ({"format": 2, "blocks": 1}, "attnquant.format is 2, expected 1; install the version"),
        ({"format": 1}, "attnquant.blocks is missing"),
        ({"format": 1, "blocks": 7}, "attnquant.blocks is 7, which is not a whole number from 1"),
        ({"format": 1, "blocks": 1, "rank": "x"}, "attnquant.rank='x' is not a whole number"),
        ({"format": 1, "blocks": 1, "rank": 3}, "expected BF16 [32, 3] as config.json implies"),
        ({"format": 1, "blocks": 2, "rank": 4}, "unknown, expected only the parts that 2 blocks"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    section: dict[str, Any], words: str, exported: Path, tmp_path: Path
) -> None:
    with pytest.raises(AttnquantError) as caught:
        verify(rewritten(exported, tmp_path / "t", {"attnquant": section}))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blocks": 3}, "--blocks 3 is not a whole number from 1 to 2"),
        ({"blocks": 2, "rank": 0}, "--blocks 2 is a block for each layer"),
        ({"blocks": 2, "rank": 4}, "--rank 4 corrects shared blocks"),
        ({"quant": "nvfp4", "ignore": ("self_atn",)}, "--ignore: 'self_atn' matches no"),
        (
            {"quant": "nvfp4", "ignore": ("layers.1.mlp",)},
            "--ignore names gate_proj in some of the layers 0, 1, which share one block",
        ),
    ],
)
def test_what_cannot_be_exported(
    options: dict[str, Any], words: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as caught:
        export(source, tmp_path / "t", **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "t").exists()


def test_an_export_is_not_exported_again(exported: Path, tmp_path: Path) -> None:
    again: list[Callable[[], Any]] = [
        lambda: export(exported, tmp_path / "t"),
        lambda: export_nvfp4(exported, tmp_path / "t", encode=encode, recipe={}),
    ]
    for attempt in again:
        with pytest.raises(CheckpointError, match="found a theta bundle, expected a dense weight"):
            attempt()


def test_nothing_is_written_over(source: Path, exported: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already, expected a new directory"):
        export(source, exported)
