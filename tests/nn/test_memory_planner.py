"""What the planner tells MAX, held against the weights that are really loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from max.dtype import DType
from max.graph.weights import load_weights
from max.pipelines import PIPELINE_REGISTRY, PipelineArgs, PipelineConfig
from max.pipelines.lib import SupportedArchitecture

from attnquant.checkpoint.export import export_nvfp4
from attnquant.errors import SettingsError
from attnquant.gemma3 import weight_adapters as gemma3_adapters
from attnquant.gemma3.arch import gemma3_arch
from attnquant.gemma4 import weight_adapters as gemma4_adapters
from attnquant.gemma4.arch import gemma4_arch
from attnquant.inspect import Device, inspect
from attnquant.kernels.codec import encode
from attnquant.memory import ResidentBytes, Serving
from attnquant.nn.memory_planner import DecoderMemoryPlanner
from attnquant.nn.tensors import State, to_numpy
from attnquant.settings import patterns
from tests.tiny.cases import CASES

LENGTH = 1024
TIED, UNTIED, TOWER = "pattern2-scalar", "untied-sharded", "gemma4-shared-values"
FAMILIES: Mapping[str, tuple[SupportedArchitecture, ModuleType]] = {
    TIED: (gemma3_arch, gemma3_adapters),
    UNTIED: (gemma3_arch, gemma3_adapters),
    TOWER: (gemma4_arch, gemma4_adapters),
}

Directories = Callable[[str], Path]


def pipeline_config(directory: Path, **options: Any) -> PipelineConfig:
    return PipelineConfig.from_args(
        PipelineArgs.from_flat_kwargs(
            model_path=str(directory),
            custom_architectures=["attnquant"],
            device_specs="cpu",
            quantization_encoding="float32",
            max_length=LENGTH,
            **options,
        )
    )


def planner(config: PipelineConfig, case: str) -> DecoderMemoryPlanner:
    arch, _ = FAMILIES[case]
    return DecoderMemoryPlanner(arch.config.initialize(config, max_seq_len=LENGTH))


def planned(config: PipelineConfig, case: str) -> ResidentBytes:
    return planner(config, case).plan(config).weights(LENGTH)


def loaded_state(config: PipelineConfig, directory: Path, case: str) -> State:
    """The tensors that the graphs bind, rotary tables aside."""
    _, adapters = FAMILIES[case]
    weights = load_weights(sorted(directory.glob("*.safetensors")))
    state: State = adapters.convert_safetensors(
        dict(weights.items()),
        huggingface_config=config.model.huggingface_config,
        pipeline_config=config,
    )
    return state


def loaded(config: PipelineConfig, directory: Path, case: str) -> int:
    """Bytes of those tensors on the device; `input_scale` is a number on the host."""
    state = loaded_state(config, directory, case)
    return sum(
        to_numpy(weight).nbytes
        for name, weight in state.items()
        if not name.endswith(".input_scale")
    )


def tower(case: str, resident: ResidentBytes) -> int:
    """The tower's weights alone: a layer of width 64, heads of 64, 96 inside; in float32."""
    if case != TOWER:
        return 0
    stacked = 64 * (3 * 64 + 2 * 96)
    others = 64 * 64 + 64 * 96 + 4 * 64 + 2 * 16 + (3 * 64 + 2 * 256) * 64 + 2 * 64 + 64 * 128
    assert resident.vision == 4 * (2 * stacked + others)
    return 4 * (stacked + others)


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="passthrough"),
        pytest.param({"QUANT": "nvfp4"}, id="nvfp4"),
        pytest.param({"QUANT": "nvfp4", "QUANT_LM_HEAD": "nvfp4"}, id="nvfp4-head"),
        pytest.param({"QUANT": "nvfp4", "QUANT_IGNORE": "self_attn"}, id="mlp-only"),
        pytest.param({"QUANT": "nvfp4", "QUANT_IGNORE": "up_proj,layers.0"}, id="split"),
    ],
)
def test_planned_weights_are_the_loaded_ones_to_the_byte(
    case: str,
    settings: dict[str, str],
    tiny_directory: Directories,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(f"ATTNQUANT_{name}", value)
    if settings:  # the fastest scales: which ones there are does not matter here
        monkeypatch.setenv("ATTNQUANT_QUANT_SCALES", "absmax")
    config = pipeline_config(tiny_directory(case))
    resident = planned(config, case)
    expected = resident.decoder + tower(case, resident)
    assert expected == loaded(config, tiny_directory(case), case)
    # A config does not say in which dtype the tables are stored.
    table_bytes = planner(config, case).plan(config).serving.table_bytes
    of_config = inspect(
        tiny_directory(case),
        quant="nvfp4" if "QUANT" in settings else "none",
        ignore=patterns(settings.get("QUANT_IGNORE", "")),
        quant_lm_head="nvfp4" if "QUANT_LM_HEAD" in settings else "none",
        device=Device(memory=10**9, serving=Serving(element_bytes=4, table_bytes=table_bytes)),
    ).memory
    assert of_config is not None
    inspected = of_config.plan.weights(LENGTH)
    assert (inspected.decoder, inspected.vision) == (resident.decoder, resident.vision)


@pytest.mark.parametrize("case", [TIED, TOWER])
@pytest.mark.parametrize("outside", ["0", "1"])
def test_shared_blocks_have_room(
    case: str, outside: str, tiny_directory: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rebuilt weights to the byte; bundles in the graph as if no layer shared its block."""
    for name, value in {"BLOCKS": "2", "RANK": "4", "PRECOMPUTE_OUTSIDE": outside}.items():
        monkeypatch.setenv(f"ATTNQUANT_{name}", value)
    config = pipeline_config(tiny_directory(case))
    own = planner(config, case)
    resident = own.plan(config).weights(LENGTH)
    bound = loaded(config, tiny_directory(case), case)
    planned_bytes = own.estimate_weights_size(config) - (resident.total - resident.decoder)
    planned_bytes += tower(case, resident)
    assert planned_bytes == bound if outside == "1" else planned_bytes > bound


def test_a_checkpoint_in_nvfp4_is_planned_from_its_headers(
    tiny_directory: Directories, tmp_path: Path
) -> None:
    directory = tmp_path / "exported"
    export_nvfp4(
        tiny_directory(UNTIED), directory, encode=encode, recipe={}, ignore=("layers.0", "mlp")
    )
    config = pipeline_config(directory)
    assert planned(config, UNTIED).decoder == loaded(config, directory, UNTIED)


@pytest.mark.parametrize("case", [TIED, TOWER])
def test_rotary_tables_are_as_long_as_the_graphs(case: str, tiny_directory: Directories) -> None:
    config = pipeline_config(tiny_directory(case))
    arch, _ = FAMILIES[case]
    arch_config = arch.config.initialize(config, max_seq_len=LENGTH)
    state = loaded_state(config, tiny_directory(case), case)
    decoder = arch.pipeline_model.build(arch_config, state)
    tables = [
        weight for name, weight in decoder.raw_state_dict().items() if name.startswith("rope")
    ]
    assert len(tables) == 2
    expected = sum(int(table.shape[0]) * int(table.shape[1]) * 4 for table in tables)
    assert planned(config, case).rotary == expected


def test_what_is_bound_as_it_is_stored_is_stacked_once_more(tiny_directory: Directories) -> None:
    """The tiny checkpoint is in bfloat16: a float32 graph's weights are stacked by the adapter,
    but for the embedding, which stays as it is."""
    config = pipeline_config(tiny_directory(TIED))
    as_float32 = planner(config, TIED)
    assert as_float32.plan(config).weights(LENGTH).copies == 0
    arch_config = gemma3_arch.config.initialize(config, max_seq_len=LENGTH)
    arch_config.dtype = DType.bfloat16
    resident = DecoderMemoryPlanner(arch_config).plan(config).weights(LENGTH)
    assert resident.copies > 0
    table = 2 * CASES[TIED].vocab * CASES[TIED].hidden
    assert 2 * resident.decoder - table == as_float32.plan(config).weights(LENGTH).decoder


def test_max_takes_the_plan(tiny_directory: Directories) -> None:
    config = pipeline_config(tiny_directory(TOWER), max_batch_size=2)
    plan = PIPELINE_REGISTRY.retrieve_factory(config).memory_plan
    own = planner(config, TOWER)
    assert plan.vision_cache_plan is not None
    cache = plan.available_cache_memory + plan.vision_cache_plan.bytes_per_device
    expected = own.estimate_weights_size(config) + own.estimate_activation_memory(config, None)
    assert plan.footprint - cache == expected
    assert own.estimate_activation_memory(config, None) == own.plan(config).activations(2).total


def test_settings_that_do_not_fit_are_refused(
    tiny_directory: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNQUANT_QUANT", "nvfp4")
    monkeypatch.setenv("ATTNQUANT_QUANT_IGNORE", "self_atn")
    config = pipeline_config(tiny_directory(TIED))
    with pytest.raises(SettingsError, match="'self_atn' matches no projection"):
        planner(config, TIED).estimate_weights_size(config)


@pytest.mark.parametrize(("cache", "limit"), [(10**12, 512), (10**7, None), (-1, 1)])
def test_a_batch_is_inferred_for_a_gpu(
    cache: int, limit: int | None, tiny_directory: Directories
) -> None:
    """Beside the cache, requests take a quarter of what weights and a chunk leave, at most."""
    config = pipeline_config(tiny_directory(TIED), device_memory_utilization=0.5)
    own = planner(config, TIED)
    plan, weights = own.plan(config), own.estimate_weights_size(config)
    free = 2 * (weights + plan.activations(0).total + cache)
    device: Any = SimpleNamespace(is_host=False, stats={"free_memory": free})
    batch = own.infer_max_batch_size(config, [device], weights)
    assert batch is not None
    beside = [
        plan.activations(size).total - plan.activations(0).total for size in (batch, batch + 1)
    ]
    if limit is None:
        assert 1 < batch < 512
        assert beside[0] <= cache // 4 < beside[1]
    else:
        assert batch == limit
    assert own.estimate_activation_memory(config, None) == plan.activations(batch).total
    # Where a device does not say what is free, all of it is.
    device.stats = {"free_memory": 0, "total_memory": free}
    assert own.infer_max_batch_size(config, [device], weights) == batch


def test_a_cpu_s_batch_is_left_to_max(tiny_directory: Directories) -> None:
    config = pipeline_config(tiny_directory(TIED))
    host: Any = SimpleNamespace(is_host=True, stats={"free_memory": 10**12})
    assert planner(config, TIED).infer_max_batch_size(config, [host], 0) is None


def test_a_prompt_that_is_not_cut_is_one_step(tiny_directory: Directories) -> None:
    options = {"max_batch_input_tokens": 256, "max_batch_size": 1}
    chunks = pipeline_config(tiny_directory(TIED), **options)
    whole = pipeline_config(tiny_directory(TIED), enable_chunked_prefill=False, **options)
    of_chunks = planner(chunks, TIED).plan(chunks).activations(0).layers
    assert planner(whole, TIED).plan(whole).activations(0).layers == LENGTH // 256 * of_chunks
