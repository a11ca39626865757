"""The weights that the measurement binds are those that loading makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from max.dtype import DType
from max.graph.weights import load_weights

from attnquant.decoder_shapes import DecoderShapes
from attnquant.kernels.codec import relative_error
from attnquant.nn.tensors import State, to_numpy
from attnquant.nn.weights import decoder_weights
from attnquant.nvfp4.format import NVFP4Weight
from attnquant.projections import FUSED_ROLES, group_module
from attnquant.settings import Settings
from bench import quality
from bench.quality import COVERAGES, Quantized
from tests.tiny.gemma3 import CASES


def loaded(directory: Path, config: dict, **settings: object) -> State:
    tensors = dict(load_weights(sorted(directory.glob("*.safetensors"))).items())
    return decoder_weights(
        tensors, config=config, dtype=DType.float32, settings=Settings(**settings)
    )


@pytest.mark.parametrize("name", ["pattern2-scalar", "untied-sharded"])  # bfloat16, float32
@pytest.mark.parametrize(
    ("coverage", "ignore"),
    [("attention + MLP", ()), ("attention only", ("mlp",)), ("MLP only", ("self_attn",))],
)
@pytest.mark.parametrize("scales", ["absmax", "mse"])
def test_packed_weights_are_those_of_loading(
    tiny_directory: Callable[[str], Path], name: str, coverage: str, ignore: tuple, scales: str
) -> None:
    directory, config = tiny_directory(name), CASES[name].config()
    expected = loaded(directory, config, quant="nvfp4", quant_scales=scales, quant_ignore=ignore)
    change = Quantized(scales=scales, blocks=COVERAGES[coverage], factor=1.0, packed=True)
    found = change(loaded(directory, config), DecoderShapes.from_config(config))
    assert found.keys() == expected.keys()
    for tensor in expected:
        assert to_numpy(found[tensor]).tobytes() == to_numpy(expected[tensor]).tobytes(), tensor


@pytest.mark.parametrize("factor", [1.0, 2**0.5])
def test_decoded_weights_are_the_packed_ones(
    tiny_directory: Callable[[str], Path], factor: float
) -> None:
    case = CASES["pattern2-scalar"]
    config, blocks = case.config(), COVERAGES["attention + MLP"]
    dense = loaded(tiny_directory(case.name), config)
    shapes = DecoderShapes.from_config(config)
    packed, decoded = (
        Quantized(scales="mse", blocks=blocks, factor=factor, packed=flag)(dense, shapes)
        for flag in (True, False)
    )
    assert decoded.keys() == dense.keys()
    for roles in FUSED_ROLES:
        module = group_module(1, roles)
        codes, scales, global_scales = (
            to_numpy(packed[f"{module}.{name}"])
            for name in ("codes", "block_scales", "global_scales")
        )
        weight = NVFP4Weight(
            codes=codes,
            block_scales=scales.view("float8_e4m3fn"),
            global_scales=global_scales[:1],
            part_rows=(len(codes),),
        )
        values = to_numpy(decoded[f"{module}.weight"])
        assert relative_error(values, weight) == 0
        original = to_numpy(dense[f"{module}.weight"])
        assert 0.05 < np.linalg.norm(values - original) / np.linalg.norm(original) < 0.12


@pytest.mark.slow
def test_the_command_prints_and_writes_every_figure(
    tiny_directory: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "quality.json"
    model = str(tiny_directory("untied-sharded"))
    sizes = ["--chunk", "128", "--chunks", "2", "--global-scales", "2"]
    coverages = ["--coverages", "attention + MLP", "MLP only"]
    quality.main(["--model", model, *sizes, *coverages, "--json", str(path)])
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    assert figures["positions"] == 2 * 127
    both, mlp = (figures["qualities"][f"{coverage}, mse"] for coverage in coverages[1:])
    assert 0 < mlp["kl"] < both["kl"] and 0 < both["top1"] <= mlp["top1"] <= 1
    assert len(both["kl_by_global_scale"]) == 2
    assert "against absmax" in capsys.readouterr().out
