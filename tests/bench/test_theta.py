"""The weights that the measurement runs with are those that loading with fewer blocks makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from max.dtype import DType
from max.graph.weights import load_weights

from attnquant.decoder_shapes import DecoderShapes
from attnquant.nn.tensors import State, to_numpy
from attnquant.nn.weights import decoder_weights
from attnquant.settings import Settings
from attnquant.theta import decompose_decoder
from bench.theta import Shared
from tests.tiny.gemma3 import CASES

CASE = CASES["pattern2-scalar"]
BLOCKS, RANK = 2, 8


def load(directory: Path, **settings: int) -> State:
    tensors = dict(load_weights(sorted(directory.glob("*.safetensors"))).items())
    return decoder_weights(
        tensors, config=CASE.config(), dtype=DType.float32, settings=Settings(**settings)
    )


@pytest.mark.parametrize("rank", [0, 3, RANK])
def test_a_smaller_rank_is_the_first_columns(
    rank: int, tiny_directory: Callable[[str], Path]
) -> None:
    directory, tensors = tiny_directory(CASE.name), CASE.tensors()
    shapes = DecoderShapes.from_config(CASE.config())
    groups = decompose_decoder(
        shapes.projections,
        lambda key: tensors[f"model.{key.module}.weight"],
        blocks=BLOCKS,
        rank=RANK,
    )
    bundles = {key: bundle for group in groups for key, bundle in group.items()}
    shared = Shared(bundles=bundles, rank=rank)(load(directory), shapes)
    loaded = load(directory, blocks=BLOCKS, rank=rank)
    assert shared.keys() == loaded.keys()
    for name, tensor in loaded.items():
        np.testing.assert_allclose(to_numpy(shared[name]), to_numpy(tensor), rtol=0, atol=1e-6)
