"""From a checkpoint's tensors to the graph's: bytes, memory, storage, and what is refused."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from max.dtype import DType
from max.graph.weights import WeightData, load_weights
from safetensors.numpy import save_file

from attnquant.errors import AttnquantError, CheckpointError, SettingsError
from attnquant.nn.embedding import table_dtype
from attnquant.nn.tensors import to_numpy
from attnquant.nn.weights import decoder_weights
from attnquant.projections import FUSED_ROLES, ProjectionKey, group_module
from attnquant.settings import Settings
from attnquant.theta import Device
from tests.tiny.gemma3 import CASES, TinyGemma3

CASE = CASES["pattern2-scalar"]


def load(
    directory: Path,
    dtype: DType = DType.bfloat16,
    settings: Settings | None = None,
) -> dict[str, WeightData]:
    weights = load_weights(sorted(directory.glob("*.safetensors")))
    return decoder_weights(
        dict(weights.items()), config=CASE.config(), dtype=dtype, settings=settings or Settings()
    )


def write(directory: Path, case: TinyGemma3 = CASE, **changes: np.ndarray | None) -> Path:
    """The case's tensors in one file, with some replaced, added or (None) left out."""
    tensors = {name: value for name, value in (case.tensors() | changes).items()}
    directory.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    "settings", [Settings(), Settings(blocks=CASE.layers)], ids=["default", "blocks=layers"]
)
def test_passthrough_is_the_file_bit_for_bit(
    tiny_directory: Callable[[str], Path], settings: Settings
) -> None:
    state = load(tiny_directory(CASE.name), settings=settings)
    stored = CASE.tensors()
    for layer in range(CASE.layers):
        for roles in FUSED_ROLES:
            module = group_module(layer, roles)
            for role in roles:
                name = f"{module}.weight" if len(roles) == 1 else f"{module}.{role}.weight"
                source = stored[f"model.{ProjectionKey(layer=layer, role=role).module}.weight"]
                assert to_numpy(state[name]).tobytes() == source.tobytes(), name


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: reads /proc/self/maps")
def test_passthrough_is_the_mapped_files_own_memory(
    tiny_directory: Callable[[str], Path],
) -> None:
    state = load(tiny_directory(CASE.name))
    mapped = [
        tuple(int(bound, 16) for bound in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(tiny_directory(CASE.name)) in line
    ]
    for name, weight in state.items():
        address = to_numpy(weight).ctypes.data
        assert any(start <= address < end for start, end in mapped), name


def test_another_dtype_costs_one_stacked_array_a_group(
    tiny_directory: Callable[[str], Path],
) -> None:
    state = load(tiny_directory(CASE.name), DType.float32)
    stored = CASE.tensors()
    prefix = "model.layers.1.self_attn."
    expected = np.concatenate(
        [stored[f"{prefix}{role}.weight"].astype(np.float32) for role in FUSED_ROLES[0]]
    )
    assert np.array_equal(to_numpy(state["layers.1.self_attn.qkv_proj.weight"]), expected)
    assert not any(".q_proj." in name for name in state)
    tables = {name for name, weight in state.items() if weight.dtype != DType.float32}
    assert tables == {"embed_tokens.weight"}


@pytest.mark.parametrize(
    ("stored", "dtype", "hidden", "device", "expected"),
    [
        (DType.bfloat16, DType.float32, 640, "cpu", DType.bfloat16),
        (DType.bfloat16, DType.float32, 648, "cpu", DType.float32),  # not whole blocks of 16
        (DType.float16, DType.float32, 640, "cpu", DType.float32),
        (DType.float32, DType.float32, 640, "cpu", DType.float32),
        (DType.bfloat16, DType.float32, 640, "gpu", DType.float32),
        (DType.float32, DType.bfloat16, 640, "gpu", DType.bfloat16),
    ],
)
def test_a_table_stays_as_stored_where_a_kernel_reads_it(
    stored: DType, dtype: DType, hidden: int, device: Device, expected: DType
) -> None:
    assert table_dtype(stored, dtype, hidden, device) == expected


def test_float32_to_bfloat16_rounds_to_nearest_even(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    case = dataclasses.replace(CASE, dtype="float32")
    write(tmp_path, case)
    state = load(tmp_path)
    assert np.array_equal(
        to_numpy(state["layers.0.mlp.down_proj.weight"]),
        case.tensors()[name].astype(ml_dtypes.bfloat16),
    )


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_known_prefixes_load_to_the_same_model(tmp_path: Path, prefix: str) -> None:
    tensors = {
        prefix + name.removeprefix("model."): value for name, value in CASE.tensors().items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert load(tmp_path).keys() == load(write(tmp_path / "plain")).keys()


def test_a_head_that_a_tied_checkpoint_repeats_is_not_loaded(tmp_path: Path) -> None:
    head = CASE.tensors()["model.embed_tokens.weight"]
    assert "lm_head.weight" not in load(write(tmp_path, **{"lm_head.weight": head}))


ONE = np.ones((1,), ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            {"model.layers.0.self_attn.q_proj.weight": None},
            "layers.0.self_attn.q_proj.weight is missing",
            id="missing",
        ),
        pytest.param(
            {"model.layers.0.self_attn.qq_proj.weight": ONE},
            "self_attn.qq_proj.weight: unknown, expected only what Gemma3ForCausalLM",
            id="unknown",
        ),
        pytest.param(
            {"model.norm.weight": ONE},
            "model.norm.weight: found shape [1], expected [128] as config.json implies",
            id="shape",
        ),
        pytest.param(
            {"language_model.model.norm.weight": CASE.tensors()["model.norm.weight"]},
            "the same weight under another prefix",
            id="twice",
        ),
        pytest.param(
            {"model.norm.weight": np.ones((128,), np.int8)},
            "model.norm.weight: found dtype I8, expected BF16, F16, F32",
            id="dtype",
        ),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, changes: dict[str, np.ndarray | None], words: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(write(tmp_path, **changes))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, AttnquantError)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(
            Settings(blocks=CASE.layers + 1),
            f"ATTNQUANT_BLOCKS={CASE.layers + 1} is not a whole number from 1 to {CASE.layers}",
            id="more-blocks-than-layers",
        ),
        pytest.param(
            Settings(rank=4), "ATTNQUANT_RANK=4 corrects shared blocks", id="rank-at-passthrough"
        ),
        pytest.param(
            Settings(blocks=2, precompute_outside=False, gemm="dense", quant="nvfp4"),
            "ATTNQUANT_GEMM=dense rebuilds weights in the graph, where they cannot be packed",
            id="dense-and-packed",
        ),
        pytest.param(
            Settings(
                blocks=2, precompute_outside=False, quant="nvfp4", quant_ignore=("layers.0.mlp",)
            ),
            "ATTNQUANT_QUANT_IGNORE names gate_proj in some of the layers 0, 1, which share one",
            id="half-a-block",
        ),
    ],
)
def test_blocks_that_cannot_be_served_are_refused(
    tiny_directory: Callable[[str], Path], settings: Settings, words: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tiny_directory(CASE.name), settings=settings)
    assert words in str(caught.value)


def test_shared_blocks_are_rebuilt_and_stacked(tiny_directory: Callable[[str], Path]) -> None:
    state = load(tiny_directory(CASE.name), settings=Settings(blocks=1, rank=4))
    stacked = to_numpy(state["layers.0.mlp.gate_up_proj.weight"])
    assert stacked.shape == (2 * CASE.intermediate, CASE.hidden)
    stored = CASE.tensors()["model.layers.0.mlp.gate_proj.weight"]
    assert not np.array_equal(stacked[: CASE.intermediate], stored)
