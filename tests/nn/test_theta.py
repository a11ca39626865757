"""Bundles in a graph: every path computes W_eff's products, and what each launches and stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from max.dtype import DType
from max.graph.weights import load_weights
from numpy.typing import NDArray

import attnquant.nn.bundles as bundles_module
import attnquant.nn.quantize as quantize_module
import attnquant.nn.weights as weights_module
from attnquant.checkpoint.export_theta import export_theta
from attnquant.decoder_shapes import DecoderShapes
from attnquant.kernels.codec import decode, encode, largest_magnitude
from attnquant.nn.tensors import State, to_numpy
from attnquant.nn.weights import decoder_weights
from attnquant.projections import FUSED_ROLES, ProjectionKey
from attnquant.settings import Settings
from attnquant.theta import ThetaBundle, decompose_decoder, effective_weight
from bench.projections_graph import Projections, launches, run
from tests.golden.data import relative_error
from tests.tiny.gemma3 import CASES

CASE = CASES["pattern2-scalar"]
SHAPES = DecoderShapes.from_config(CASE.config())
BLOCKS, RANK, LAYER = 2, 8, 1

FACTORED = Settings(blocks=BLOCKS, rank=RANK, precompute_outside=False)
DENSE = Settings(blocks=BLOCKS, rank=RANK, precompute_outside=False, gemm="dense")
PACKED = Settings(blocks=BLOCKS, rank=RANK, precompute_outside=False, quant="nvfp4")
OUTSIDE = Settings(blocks=BLOCKS, rank=RANK)

# On a CPU, activations are quantized where weights are.
PACKED_TOLERANCE = 5e-3


def load(directory: Path, settings: Settings, config: dict[str, Any] | None = None) -> State:
    tensors = dict(load_weights(sorted(directory.glob("*.safetensors"))).items())
    return decoder_weights(
        tensors, config=config or CASE.config(), dtype=DType.float32, settings=settings
    )


def without_fusion(patch: pytest.MonkeyPatch) -> None:
    """Every role gets matmuls of its own, as where the coverage splits a group."""
    patch.setattr(weights_module, "can_fuse", lambda quantized: len(quantized) == 1)


@pytest.fixture(scope="module")
def bundles() -> dict[ProjectionKey, ThetaBundle]:
    tensors = CASE.tensors()
    groups = decompose_decoder(
        SHAPES.projections,
        lambda key: tensors[f"model.{key.module}.weight"],
        blocks=BLOCKS,
        rank=RANK,
    )
    return {key: bundle for group in groups for key, bundle in group.items()}


X = np.random.default_rng(3).standard_normal((3, CASE.hidden), np.float32)


@pytest.fixture(scope="module")
def products(tiny_directory: Callable[[str], Path]) -> dict[str, NDArray[np.float32]]:
    """What each path makes of X with the q, k and v of `LAYER`, all of them in one graph."""
    states = {
        name: load(tiny_directory(CASE.name), settings)
        for name, settings in (("factored", FACTORED), ("dense", DENSE), ("packed", PACKED))
    }
    with pytest.MonkeyPatch.context() as patch:
        without_fusion(patch)
        states["unfused"] = load(tiny_directory(CASE.name), FACTORED)
    layers = range(LAYER, LAYER + 1)
    modules = {
        name: Projections(SHAPES, layers, state, ("qkv_proj",)) for name, state in states.items()
    }
    return {name: made for name, (made,) in run(modules, {CASE.hidden: X}).items()}


def expected(weight_of: Callable[[ProjectionKey], NDArray[Any]]) -> NDArray[np.float64]:
    keys = [ProjectionKey(layer=LAYER, role=role) for role in FUSED_ROLES[0]]
    weight = np.concatenate([weight_of(key) for key in keys])
    return X.astype(np.float64) @ weight.astype(np.float64).T


@pytest.mark.parametrize("path", ["factored", "dense", "unfused"])
def test_every_path_multiplies_by_the_effective_weight(
    path: str,
    products: dict[str, NDArray[np.float32]],
    bundles: dict[ProjectionKey, ThetaBundle],
) -> None:
    product = expected(lambda key: effective_weight(bundles[key]))
    assert relative_error(products[path], product) < 2e-6


def test_packed_blocks_are_multiplied_as_they_are(
    products: dict[str, NDArray[np.float32]], bundles: dict[ProjectionKey, ThetaBundle]
) -> None:
    keys = [ProjectionKey(layer=LAYER, role=role) for role in FUSED_ROLES[0]]
    amax = max(float(largest_magnitude(bundles[key].w0)) for key in keys)

    def weight(key: ProjectionKey) -> NDArray[Any]:
        bundle = bundles[key]
        assert bundle.s is not None
        block = decode(encode(bundle.w0, scales="mse", amax=amax))
        u, v = bundle.u.astype(np.float32), bundle.v.astype(np.float32)
        return bundle.s[:, None] * block + u @ v.T

    assert relative_error(products["packed"], expected(weight)) < PACKED_TOLERANCE
    unpacked = expected(lambda key: effective_weight(bundles[key]))
    assert relative_error(products["packed"], unpacked) > 4 * PACKED_TOLERANCE


@pytest.mark.parametrize(
    ("settings", "fused", "apart"),
    [
        pytest.param(OUTSIDE, {"rmo.matmul": 4}, None, id="host"),
        pytest.param(FACTORED, {"rmo.matmul": 12}, {"rmo.matmul": 21}, id="factored"),
        pytest.param(DENSE, {"rmo.matmul": 8}, {"rmo.matmul": 14}, id="dense"),
        pytest.param(
            PACKED,
            {"rmo.matmul": 8, "mo.custom": 4},
            {"rmo.matmul": 14, "mo.custom": 7},
            id="packed",
        ),
    ],
)
def test_launches_of_a_layers_projections(
    settings: Settings,
    fused: dict[str, int],
    apart: dict[str, int] | None,
    tiny_directory: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fusion takes the factored path from 21 launches to 12; plain weights take 4."""

    def count() -> dict[str, int]:
        state = load(tiny_directory(CASE.name), settings)
        return dict(launches(Projections(SHAPES, range(LAYER, LAYER + 1), state).graph()))

    assert count() == fused
    if apart is not None:
        without_fusion(monkeypatch)
        assert count() == apart


def test_a_block_is_stored_once_for_its_layers(tiny_directory: Callable[[str], Path]) -> None:
    state = load(tiny_directory(CASE.name), FACTORED)
    blocks = {name: tensor for name, tensor in state.items() if name.startswith("blocks.")}
    assert len(blocks) == BLOCKS * len(FUSED_ROLES)
    assert "blocks.0-1.mlp.gate_up_proj.weight" in blocks
    numbers = sum(rows * columns for rows, columns in SHAPES.projections.values())
    assert sum(to_numpy(block).size for block in blocks.values()) == numbers // 2
    assert not any(".proj.weight" in name for name in state.keys() - blocks.keys())


def test_a_layer_that_shares_with_none_keeps_its_weights(
    tiny_directory: Callable[[str], Path],
) -> None:
    directory = tiny_directory(CASE.name)
    state = load(directory, Settings(blocks=3, rank=RANK, precompute_outside=False))
    alone, passthrough = "layers.3.", load(directory, Settings())
    own = {name for name in state if name.startswith(alone)}
    assert own == {name for name in passthrough if name.startswith(alone)}
    assert "layers.1.mlp.down_proj.output_scales" in state


@pytest.mark.parametrize(
    "settings", [FACTORED, DENSE, OUTSIDE, PACKED], ids=["factored", "dense", "host", "packed"]
)
def test_a_theta_checkpoint_loads_to_what_decomposing_at_load_makes(
    settings: Settings, tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    source, target = tiny_directory(CASE.name), tmp_path / "theta"
    report = export_theta(
        source,
        target,
        blocks=BLOCKS,
        rank=RANK,
        quant=settings.quant,
        encode=lambda weight, **options: encode(weight, scales="mse", **options),
        recipe={},
    )
    assert report.after < report.before
    section: dict[str, Any] = {
        "format": 1,
        "blocks": BLOCKS,
        "rank": RANK,
        "quant": settings.quant,
        "quant_ignore": [],
    }
    made = load(source, settings)
    found = load(target, settings, CASE.config() | {"attnquant": section})
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert to_numpy(found[name]).tobytes() == to_numpy(tensor).tobytes(), name


def test_a_smaller_rank_than_the_checkpoints_cuts_its_corrections(
    tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    source, target = tiny_directory(CASE.name), tmp_path / "theta"
    export_theta(source, target, blocks=BLOCKS, rank=RANK, encode=encode, recipe={})
    config = CASE.config() | {"attnquant": {"format": 1, "blocks": BLOCKS, "rank": RANK}}
    less = Settings(blocks=BLOCKS, rank=3, precompute_outside=False)
    for settings in (less, Settings(blocks=BLOCKS, rank=0, precompute_outside=False)):
        made, found = load(source, settings), load(target, settings, config)
        shapes = {name: list(tensor.shape) for name, tensor in made.items()}
        assert shapes == {name: list(tensor.shape) for name, tensor in found.items()}


@pytest.mark.parametrize(
    "settings", [FACTORED, DENSE, OUTSIDE, PACKED], ids=["factored", "dense", "host", "packed"]
)
def test_compiling_for_elsewhere_needs_the_shapes_only(
    settings: Settings, tiny_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_directory(CASE.name)
    made = load(directory, settings)

    def refuse(*_: Any) -> None:
        raise AssertionError("decomposed")

    for module in (weights_module, bundles_module, quantize_module):
        monkeypatch.setattr(module, "is_virtual_device_mode", lambda: True)
    monkeypatch.setattr(bundles_module, "decompose_decoder", refuse)
    monkeypatch.setattr(bundles_module, "effective_weight", refuse)
    blank = load(directory, settings)
    assert {name: (tensor.dtype, list(tensor.shape)) for name, tensor in blank.items()} == {
        name: (tensor.dtype, list(tensor.shape)) for name, tensor in made.items()
    }


@pytest.mark.parametrize("settings", [FACTORED, DENSE], ids=["factored", "dense"])
def test_what_elementwise_operations_read_is_aligned(
    settings: Settings, tiny_directory: Callable[[str], Path]
) -> None:
    """MAX's aligned loads of scales that it fused into a norm ended the process."""
    for name, tensor in load(tiny_directory(CASE.name), settings).items():
        if name.startswith("blocks.") or ("_proj." in name and not name.endswith("_proj.weight")):
            assert to_numpy(tensor).ctypes.data % 64 == 0, name
