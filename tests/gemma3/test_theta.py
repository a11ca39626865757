"""Below passthrough: on every path the logits are those of a model that has the rebuilt weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import attnquant.nn.weights as weights_module
from attnquant.checkpoint.export_theta import export_theta
from attnquant.decoder_shapes import DecoderShapes
from attnquant.kernels.codec import decode, encode, largest_magnitude
from attnquant.projections import FUSED_ROLES, ProjectionKey
from attnquant.theta import ThetaBundle, decompose_decoder, effective_weight
from tests.golden.data import load_tiny, relative_error
from tests.models import load_model
from tests.tiny.gemma3 import CASES

CASE = CASES["pattern2-scalar"]
PROMPTS = [prompt.tokens for prompt in load_tiny(CASE.name).prompts]
BLOCKS, RANK = 2, 8
TOLERANCE = 1e-4

Weights = Mapping[ProjectionKey, NDArray[np.float32]]


def logits(directory: Path) -> NDArray[np.float32]:
    """`[prompts, vocab]`: each prompt's next-token logits."""
    with load_model(directory) as model:
        rows = model.generate(PROMPTS, max_new_tokens=1, output_logits=True).logits
    return np.stack([row[0] for row in rows])


def settings(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, text in ({"BLOCKS": str(BLOCKS), "RANK": str(RANK)} | variables).items():
        monkeypatch.setenv(f"ATTNQUANT_{name}", text)


@pytest.fixture(scope="module")
def bundles() -> dict[ProjectionKey, ThetaBundle]:
    tensors = CASE.tensors()
    shapes = DecoderShapes.from_config(CASE.config()).projections
    groups = decompose_decoder(
        shapes, lambda key: tensors[f"model.{key.module}.weight"], blocks=BLOCKS, rank=RANK
    )
    return {key: bundle for group in groups for key, bundle in group.items()}


@pytest.fixture(scope="module")
def logits_of(
    tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Weights], NDArray[np.float32]]:
    """Logits of the model that has other projections, in float32, as a checkpoint of its own."""

    def run(weights: Weights) -> NDArray[np.float32]:
        target = tmp_path_factory.mktemp("rebuilt")
        tensors = {name: value.astype(np.float32) for name, value in CASE.tensors().items()}
        tensors |= {f"model.{key.module}.weight": weight for key, weight in weights.items()}
        save_file(tensors, target / "model.safetensors")
        for path in tiny_directory(CASE.name).glob("*.json"):
            (target / path.name).write_bytes(path.read_bytes())
        (target / "config.json").write_text(json.dumps(CASE.config() | {"dtype": "float32"}))
        return logits(target)

    return run


@pytest.fixture(scope="module")
def reference(
    bundles: dict[ProjectionKey, ThetaBundle],
    logits_of: Callable[[Weights], NDArray[np.float32]],
) -> NDArray[np.float32]:
    found = logits_of({key: effective_weight(bundle) for key, bundle in bundles.items()})
    dense = np.stack([prompt.last for prompt in load_tiny(CASE.name).prompts])
    assert relative_error(found, dense) > 1e-2
    return found


def check(found: NDArray[np.float32], reference: NDArray[np.float32]) -> None:
    for row, expected in zip(found, reference, strict=True):
        assert relative_error(row, expected) < TOLERANCE


def test_rebuilt_on_the_host(
    reference: NDArray[np.float32],
    tiny_directory: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings(monkeypatch)
    check(logits(tiny_directory(CASE.name)), reference)


def test_factored_in_the_graph_and_from_a_theta_checkpoint(
    reference: NDArray[np.float32],
    tiny_directory: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = tiny_directory(CASE.name), tmp_path / "theta"
    export_theta(source, target, blocks=BLOCKS, rank=RANK, encode=encode, recipe={})
    monkeypatch.setenv("ATTNQUANT_PRECOMPUTE_OUTSIDE", "0")
    stored = logits(target)
    settings(monkeypatch)
    made = logits(source)
    check(made, reference)
    assert np.array_equal(stored, made)


@pytest.mark.slow
def test_rebuilt_in_the_graph(
    reference: NDArray[np.float32],
    tiny_directory: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings(monkeypatch, PRECOMPUTE_OUTSIDE="0", GEMM="dense")
    check(logits(tiny_directory(CASE.name)), reference)


@pytest.mark.slow
def test_factored_without_fusion(
    reference: NDArray[np.float32],
    tiny_directory: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights_module, "can_fuse", lambda quantized: len(quantized) == 1)
    settings(monkeypatch, PRECOMPUTE_OUTSIDE="0", GEMM="factored")
    check(logits(tiny_directory(CASE.name)), reference)


@pytest.mark.slow
def test_blocks_in_nvfp4(
    bundles: dict[ProjectionKey, ThetaBundle],
    logits_of: Callable[[Weights], NDArray[np.float32]],
    tiny_directory: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights: dict[ProjectionKey, NDArray[np.float32]] = {}
    for layer in range(CASE.layers):
        for roles in FUSED_ROLES:
            keys = [ProjectionKey(layer=layer, role=role) for role in roles]
            amax = max(float(largest_magnitude(bundles[key].w0)) for key in keys)
            for key in keys:
                bundle = bundles[key]
                block = decode(encode(bundle.w0, scales="mse", amax=amax))
                u, v = bundle.u.astype(np.float32), bundle.v.astype(np.float32)
                assert bundle.s is not None
                weights[key] = bundle.s[:, None] * block + u @ v.T
    source, target = tiny_directory(CASE.name), tmp_path / "theta"
    options = {"blocks": BLOCKS, "rank": RANK, "quant": "nvfp4", "recipe": {}}
    export_theta(source, target, encode=partial(encode, scales="mse"), **options)
    stored = logits(target)
    check(stored, logits_of(weights))
    settings(monkeypatch, PRECOMPUTE_OUTSIDE="0", QUANT="nvfp4")
    assert np.array_equal(logits(source), stored)
