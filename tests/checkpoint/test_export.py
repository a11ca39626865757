"""Exports: what MAX's own tool, MAX's config parser and our reader make of them."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import types
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attnquant.checkpoint import Checkpoint
from attnquant.checkpoint.export import export_nvfp4
from attnquant.checkpoint.nvfp4_layouts import load_nvfp4, stored_weights
from attnquant.errors import CheckpointError, SettingsError
from attnquant.nvfp4.format import NVFP4Weight
from attnquant.nvfp4.reference import decode, encode
from attnquant.projections import fused_groups
from tests.checkpoint.decoder import CONFIG, GEMMA4, HIDDEN, INNER, LAYERS, SHAPES, weights
from tests.checkpoint.files import write

ABSMAX = partial(encode, scales="absmax")


def source(tmp_path: Path, **changes: Any) -> Path:
    files = {"config.json": CONFIG, "model.safetensors": weights(), "tokenizer.json": {"a": 1}}
    return write(tmp_path / "source", {**files, **changes})


def export(tmp_path: Path, src: Path, **options: Any) -> Checkpoint:
    target = tmp_path / "out"
    arguments: dict[str, Any] = {"encode": ABSMAX, "recipe": {"scales": "absmax"}, **options}
    export_nvfp4(src, target, **arguments)
    return Checkpoint.open(target)


def load(checkpoint: Checkpoint) -> dict[str, NVFP4Weight]:
    stored = stored_weights(checkpoint.tensors, checkpoint.config, checkpoint.hf_quant_config)
    loaded = {path: weight for path, weight in stored.items() if weight.is_nvfp4}
    return {path: load_nvfp4(weight, checkpoint.array) for path, weight in loaded.items()}


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 3_000])
def test_export_is_what_quantizing_at_load_gives(shard_bytes: int, tmp_path: Path) -> None:
    src = source(tmp_path)
    before = {path.name: path.read_bytes() for path in src.iterdir()}
    checkpoint = export(tmp_path, src, shard_bytes=shard_bytes)
    assert before == {path.name: path.read_bytes() for path in src.iterdir()}
    loaded, original = load(checkpoint), weights()
    assert len(loaded) == 7 * LAYERS
    for layer in range(LAYERS):
        for roles in fused_groups(tuple(name.split(".")[1] for name in SHAPES)):  # type: ignore[arg-type]
            paths = [f"layers.{layer}.{n}" for n in SHAPES if n.split(".")[1] in roles]
            dense = [original[f"model.{path}.weight"] for path in paths]
            amax = max(float(np.abs(part.astype(np.float32)).max()) for part in dense)
            for path, part in zip(paths, dense, strict=True):
                expected = encode(part, scales="absmax", amax=amax)
                found = loaded[path]
                assert found.codes.tobytes() == expected.codes.tobytes()
                assert found.block_scales.tobytes() == expected.block_scales.tobytes()
                assert found.global_scales.tobytes() == expected.global_scales.tobytes()
    for name, array in original.items():
        if "_proj" not in name:
            assert checkpoint.array(name).tobytes() == array.tobytes()
    # MAX's tools look for a weight's scales in the weight's own shard.
    for path in loaded:
        files = {i.file for n, i in checkpoint.tensors.items() if n.startswith(f"model.{path}.")}
        assert len(files) == 1
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == before["tokenizer.json"]


def test_report_counts_bytes(tmp_path: Path) -> None:
    told: list[int] = []
    report = export_nvfp4(
        source(tmp_path), tmp_path / "out", encode=ABSMAX, recipe={}, progress=told.append
    )
    assert report.before == sum(array.nbytes for array in weights().values())
    assert report.after == sum(told) < report.before
    assert len(report.coverage.quantized) == 7 * LAYERS


def test_ignored_projections_stay_and_are_declared(tmp_path: Path) -> None:
    ignore = ["layers.0.self_attn", "layers.1.self_attn.v_proj"]
    checkpoint = export(tmp_path, source(tmp_path), ignore=ignore)
    assert len(load(checkpoint)) == 7 * LAYERS - 5
    declared = checkpoint.config["quantization_config"]
    assert declared["ignore"] == [
        "lm_head",
        "model.layers.0.self_attn*",
        "model.layers.1.self_attn.v_proj",
    ]
    # q and k of the group that lost v are unfused, each with the global scale of its own.
    loaded, original = load(checkpoint), weights()
    for name in ("q_proj", "k_proj"):
        path = f"layers.1.self_attn.{name}"
        expected = encode(original[f"model.{path}.weight"], scales="absmax")
        assert loaded[path].global_scales == expected.global_scales
    assert checkpoint.hf_quant_config is not None
    assert checkpoint.hf_quant_config["quantization"]["exclude_modules"] == declared["ignore"]
    without = {name: v for name, v in checkpoint.config.items() if name != "quantization_config"}
    assert without == CONFIG


def test_towers_stay_and_are_declared(tmp_path: Path) -> None:
    prefix = "language_model.model."
    towers = {
        "vision_tower.encoder.layers.0.self_attn.q_proj.weight": np.ones((16, 16), np.float32),
        "multi_modal_projector.weight": np.ones((16, 16), np.float32),
        "language_model.model.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    tensors = {**weights(prefix, gemma4=True), **towers}
    src = source(tmp_path, **{"config.json": GEMMA4, "model.safetensors": tensors})
    checkpoint = export(tmp_path, src)
    assert len(load(checkpoint)) == 7 * LAYERS
    assert checkpoint.config["quantization_config"]["ignore"] == [
        "lm_head",
        "language_model.model.rotary_emb*",
        "multi_modal_projector*",
        "vision_tower*",
    ]
    for name, array in towers.items():
        assert np.array_equal(checkpoint.array(name), array)


def _without(name: str) -> dict[str, NDArray[Any]]:
    return {key: array for key, array in weights().items() if not key.endswith(name)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model.safetensors": _without("0.mlp.up_proj.weight")},
            "layers.0.mlp.up_proj.weight is m",
        ),
        (
            {"config.json": {**CONFIG, "intermediate_size": 64}},
            "found shape [48, 32], expected [64, 32]",
        ),
        (
            {
                "model.safetensors": {
                    **weights(),
                    "model.layers.1.mlp.up_proj.weight": np.full((INNER, HIDDEN), np.nan, "f4"),
                }
            },
            "model.layers.1.mlp.up_proj.weight: found nan at [0, 0]",
        ),
    ],
    ids=["missing", "shape", "nan"],
)
def test_unusable_sources(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        export(tmp_path, source(tmp_path, **changes))
    assert words in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_an_export_is_not_exported_again(tmp_path: Path) -> None:
    export(tmp_path, source(tmp_path))
    with pytest.raises(CheckpointError, match="found NVFP4, expected a dense weight"):
        export_nvfp4(tmp_path / "out", tmp_path / "again", encode=ABSMAX, recipe={})


def test_patterns_that_match_nothing(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--ignore: 'attention' matches no projection"):
        export(tmp_path, source(tmp_path), ignore=["attention"])


def test_files_that_are_copied(tmp_path: Path) -> None:
    src = source(
        tmp_path, **{"pytorch_model.bin": b"x", ".hidden": b"x", "chat_template.jinja": b"x"}
    )
    write(src / "additional_chat_templates", {"tool.jinja": b"y"})
    write(src / ".cache", {"tool.jinja": b"y"})
    out = export(tmp_path, src).directory
    found = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert found == [
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "config.json",
        "hf_quant_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_links_out_of_the_source_are_not_copied(tmp_path: Path) -> None:
    src = source(tmp_path)
    (src / "notes.txt").symlink_to("../secret")
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(CheckpointError, match="found a link out of the directory"):
        export(tmp_path, src)


def test_a_changed_source_is_not_resumed(tmp_path: Path) -> None:
    src, encoded = source(tmp_path), []

    def interrupted(weight: NDArray[Any], *, amax: float, name: str) -> NVFP4Weight:
        if "layers.1.mlp" in name:
            raise KeyboardInterrupt
        return ABSMAX(weight, amax=amax, name=name)

    def counting(weight: NDArray[Any], *, amax: float, name: str) -> NVFP4Weight:
        encoded.append(name)
        return ABSMAX(weight, amax=amax, name=name)

    with pytest.raises(KeyboardInterrupt):
        export(tmp_path, src, encode=interrupted, shard_bytes=3_000)
    os.utime(src / "model.safetensors", (1, 1))
    export(tmp_path, src, encode=counting, shard_bytes=3_000)
    assert len(encoded) == 7 * LAYERS


def test_kill_9_during_an_export(tmp_path: Path) -> None:
    src, target, seed, killed = source(tmp_path), tmp_path / "out", random.Random(3), 0
    arguments: dict[str, Any] = {"recipe": {}, "shard_bytes": 3_000}
    for _ in range(15):
        child = os.fork()
        if child == 0:
            try:
                export_nvfp4(src, target, encode=ABSMAX, **arguments)
            finally:
                os._exit(0)
        time.sleep(seed.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if target.exists():
            assert len(load(Checkpoint.open(target))) == 7 * LAYERS
            shutil.rmtree(target)
    assert killed
    export_nvfp4(src, target, encode=ABSMAX, **arguments)
    assert len(load(Checkpoint.open(target))) == 7 * LAYERS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


class FakeTensor:
    """As much of a torch tensor as MAX's tool needs, over NumPy: torch is 900 MB."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.dtype = array.dtype

    def detach(self) -> FakeTensor:
        return self

    cpu = detach

    def to(self, dtype: Any) -> FakeTensor:
        return FakeTensor(self.array.astype(dtype))

    def view(self, dtype: Any) -> FakeTensor:
        return FakeTensor(self.array.view(dtype))

    def numpy(self) -> NDArray[Any]:
        return self.array


class FakeSafeOpen:
    def __init__(self, path: Path, framework: str) -> None:
        from attnquant.checkpoint.safetensors import read_header

        self.infos, self.content = read_header(path), path.read_bytes()

    def __enter__(self) -> FakeSafeOpen:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self.infos)

    def get_tensor(self, name: str) -> FakeTensor:
        info = self.infos[name]
        raw = self.content[info.start : info.end]
        return FakeTensor(np.frombuffer(raw, info.numpy_dtype).reshape(info.shape))


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 3_000])
def test_max_rounding_error_tool_reads_it(
    shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("max.pipelines")
    try:
        import torch
    except ImportError:
        torch = types.ModuleType("torch")
        for name, dtype in (
            ("uint8", np.dtype(np.uint8)),
            ("float32", np.dtype(np.float32)),
            ("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn)),
        ):
            setattr(torch, name, dtype)
        loader = types.ModuleType("safetensors.torch")
        loader.safe_open = FakeSafeOpen  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setitem(sys.modules, "safetensors.torch", loader)
    tool = importlib.import_module("max.pipelines.weights.rounding_error")
    monkeypatch.delitem(sys.modules, tool.__name__)  # it may hold the stand-ins
    src = source(tmp_path)
    checkpoint = export(tmp_path, src, shard_bytes=shard_bytes)
    report = tool.compare_checkpoints(src, checkpoint.directory)
    found = {error.name: error.rel_l2 for error in report.tensors}
    loaded, original = load(checkpoint), weights()
    assert set(found) == {f"model.{path}.weight" for path in loaded}
    for path, weight in loaded.items():
        exact = original[f"model.{path}.weight"].astype(np.float32)
        error = np.linalg.norm(decode(weight) - exact) / np.linalg.norm(exact)
        assert found[f"model.{path}.weight"] == pytest.approx(float(error), rel=1e-5)
        assert error < 0.2


def test_max_parses_the_config(tmp_path: Path) -> None:
    quant = pytest.importorskip("max.pipelines.weights.quant")
    from max.dtype import DType
    from max.graph import Shape
    from max.graph.weights import WeightData

    checkpoint = export(tmp_path, source(tmp_path), ignore=["layers.0.self_attn"])
    embedding = checkpoint.array("model.embed_tokens.weight").view(np.uint16)
    state = {
        "embed_tokens.weight": WeightData(
            embedding, "embed_tokens.weight", DType.bfloat16, Shape(embedding.shape)
        )
    }
    config = types.SimpleNamespace(**json.loads((checkpoint.directory / "config.json").read_text()))
    parsed = quant.parse_quant_config(config, state, DType.uint8)
    assert parsed is not None and parsed.is_nvfp4
    assert set(parsed.mlp_quantized_layers) == {0, 1}
    assert set(parsed.attn_quantized_layers) == {1}
