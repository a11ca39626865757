"""The memory plan: the figures of Gemma 4 31B, MAX's own cache accounting, and what fits."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import MultiKVCacheParams
from max.pipelines.architectures.gpt_oss.hybrid_kv_params_util import hybrid_swa_full_kv_params
from max.pipelines.kv_cache.paged_kv_cache.jenga_cache_manager import JengaKVCacheManager
from max.pipelines.lib import KVCacheConfig

from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import SettingsError
from attnquant.memory import FIXED_BYTES, LayerCache, MemoryPlan, Serving, parse_size
from attnquant.nvfp4.coverage import Coverage
from tests.configs import gemma3_270m, gemma4_31b
from tests.test_vision_shapes import gemma4_31b_vision

SERVING = Serving()


def flagship(*ignore: str, serving: Serving = SERVING, head: bool = False) -> MemoryPlan:
    """Gemma 4 31B with its real window, length and tower; `ignore` stays in bfloat16."""
    config = gemma4_31b(sliding_window=1024, max_position_embeddings=262144)
    config["vision_config"] = gemma4_31b_vision()
    shapes = DecoderShapes.from_config(config)
    coverage = Coverage.of(
        shapes.projections, ignore=ignore, head=shapes.head if head else None, source=None
    )
    return MemoryPlan.from_config(config, coverage, parts_bound=True, serving=serving)


def small(**changes: Any) -> MemoryPlan:
    config = gemma3_270m(sliding_window=512, max_position_embeddings=32768, **changes)
    coverage = Coverage.of(DecoderShapes.from_config(config).projections)
    return MemoryPlan.from_config(config, coverage, parts_bound=True, serving=SERVING)


@pytest.mark.parametrize(
    ("plan", "decoder", "stacked"),
    [
        pytest.param(flagship("*"), 61_394_690_680, 38_535_168_000, id="bfloat16"),
        pytest.param(flagship("self_attn"), 31_481_767_240, 10_789_847_040, id="mlp"),
        pytest.param(flagship(), 19_295_021_280, 0, id="every-projection"),
        # The packed head comes beside the embedding, which stays for looking tokens up.
        pytest.param(flagship(head=True), 17_269_172_452 + 2_818_572_288, 0, id="head"),
    ],
)
def test_weights_of_gemma4_31b(plan: MemoryPlan, decoder: int, stacked: int) -> None:
    weights = plan.weights(8192)
    assert (weights.decoder, weights.copies) == (decoder, stacked)
    assert weights.rotary == 2 * (8192 + 64) * (256 + 512)
    # 575,743,536 weights; q, k, v and gate, up of 27 layers are stacked once more.
    assert weights.vision == 2 * (575_743_536 + 27 * 1152 * (3 * 1152 + 2 * 4304))
    assert weights.total == decoder + stacked + weights.rotary + weights.vision


def test_what_is_stacked_before_it_is_bound_lies_in_memory_once() -> None:
    plan = dataclasses.replace(flagship("*"), parts_bound=False)
    assert plan.weights(8192).copies == 0


def test_float32_weights_are_twice_as_large() -> None:
    plan = dataclasses.replace(flagship("*"), serving=Serving(element_bytes=4, table_bytes=4))
    for part in ("decoder", "copies", "rotary", "vision"):
        assert getattr(plan.weights(100), part) == 2 * getattr(flagship("*").weights(100), part)


def test_activations_of_gemma4_31b() -> None:
    parts = flagship().activations(8)
    # The widest point of a layer is the feed-forward block: residual, and gate and up twice.
    token = 2 * (5376 + 4 * 21504)
    assert parts.layers == (8192 + 8) * token
    assert parts.logits == 8 * 262144 * (2 + 3 * 4)
    # Eight graphs, of 1 to 8 requests.
    assert parts.captured == 36 * (token + 262144 * (2 + 4))
    # Pixels of a patch, residual, gate, up and product; nine patches to a token of the chunk and of
    # the two images that it cuts; and what the decoder gets.
    patches = 9 * (8192 + 2 * 1120)
    assert parts.vision == 2 * patches * (3 * 16 * 16 + 1152 + 3 * 4304) + 4 * 8192 * 5376
    shapes_tell = parts.layers + parts.logits + parts.captured + parts.vision
    assert parts.total == shapes_tell + shapes_tell // 4 + FIXED_BYTES


def test_attention_can_be_the_widest_point() -> None:
    plan = small(intermediate_size=256)
    # q+k+v is 1024 + 256 + 256: as the matmul gives it, after the norms, and as it is stored.
    assert plan.activations(0).layers == 8192 * 2 * (640 + 3 * 1536)


@pytest.mark.parametrize(
    ("ignored", "widths"), [(("mlp",), 3), ((), 4), (("up_proj",), 4), (("down_proj",), 4)]
)
def test_packed_and_split_groups_are_held_twice(ignored: tuple[str, ...], widths: int) -> None:
    assert flagship(*ignored).activations(0).layers == 8192 * 2 * (5376 + widths * 21504)


def test_rearranged_scales_lie_in_memory_twice() -> None:
    plan = dataclasses.replace(flagship(head=True), scales_copied=True)
    weights = 8_477_736_960 + 20_808_990_720 + 1_409_286_144
    assert plan.weights(1).copies == weights // 16


@pytest.mark.parametrize(
    ("changes", "part", "expected"),
    [
        ({"device_graph_capture": False}, "captured", 0),
        ({"max_batch_input_tokens": 2048}, "layers", (2048 + 4) * 2 * (5376 + 4 * 21504)),
        # Four rows to verify, and one of the drafter.
        ({"num_speculative_tokens": 3}, "logits", 4 * 5 * 262144 * 14),
        ({"enable_echo": True}, "logits", (8192 + 4) * 262144 * 14),
    ],
)
def test_how_it_is_served_decides(changes: dict[str, Any], part: str, expected: int) -> None:
    plan = flagship(serving=dataclasses.replace(SERVING, **changes))
    assert getattr(plan.activations(4), part) == expected


def test_no_more_than_128_graphs_are_captured() -> None:
    assert flagship().activations(128).captured == flagship().activations(500).captured


def test_cache_of_gemma4_31b() -> None:
    assert flagship().caches == {
        "sliding_attention": LayerCache(token_bytes=50 * 2 * 16 * 256 * 2, window=1024),
        "full_attention": LayerCache(token_bytes=10 * 2 * 4 * 512 * 2, window=None),
    }


def kv_params(plan: MemoryPlan) -> MultiKVCacheParams:
    """The caches as the graph's configuration describes them to MAX."""
    of_kind = {layer.kind: layer for layer in plan.shapes.layers}
    sliding, full = of_kind["sliding_attention"], of_kind["full_attention"]
    drafted = plan.serving.num_speculative_tokens
    config: Any = SimpleNamespace(
        model=SimpleNamespace(data_parallel_degree=1),
        speculative=(
            SimpleNamespace(num_speculative_tokens=drafted, speculative_method="mtp")
            if drafted
            else None
        ),
    )
    return hybrid_swa_full_kv_params(
        layer_types=[layer.kind for layer in plan.shapes.layers],
        sliding_window=plan.window,
        pipeline_config=config,
        devices=[DeviceRef.GPU()],
        kv_cache_config=KVCacheConfig(),
        cache_dtype=DType.bfloat16,
        n_kv_heads=sliding.kv_heads,
        head_dim=sliding.head_dim,
        full_n_kv_heads=full.kv_heads,
        full_head_dim=full.head_dim,
    )


@given(
    tokens=st.integers(1, 262144),
    batch=st.integers(1, 512),
    drafted=st.integers(0, 5),
    base=st.sampled_from([flagship(), small()]),
)
def test_the_cache_is_what_max_reserves(
    tokens: int, batch: int, drafted: int, base: MemoryPlan
) -> None:
    serving = Serving(num_speculative_tokens=drafted)
    plan = dataclasses.replace(base, serving=serving)
    enough = 2**60
    expected = JengaKVCacheManager.memory_size(kv_params(plan), enough, batch, tokens)
    assert plan.cache(tokens, batch) == expected


@given(memory=st.integers(0, 200 * 10**9), batch=st.integers(1, 16), tokens=st.integers(1, 32768))
def test_what_fits_is_the_most_that_does(memory: int, batch: int, tokens: int) -> None:
    plan = flagship()
    longest, largest = plan.longest_context(memory, batch), plan.largest_batch(memory, tokens)
    assert longest == 0 or plan.fits(memory, longest, batch)
    assert longest == plan.positions or not plan.fits(memory, longest + 1, batch)
    assert largest == 0 or plan.fits(memory, tokens, largest)
    assert largest == 512 or not plan.fits(memory, tokens, largest + 1)


def test_a_31b_in_nvfp4_fits_a_32_gb_card() -> None:
    """MAX's own planner reserves 15 GiB for activations, and so finds no room."""
    memory, chunked = parse_size("32GB"), Serving(max_batch_input_tokens=2048)
    plan = flagship(serving=chunked)
    assert plan.longest_context(memory, 1) > 32768
    assert plan.weights(8192).total + 15 * 2**30 > memory
    assert flagship("self_attn", serving=chunked).longest_context(memory, 1) == 0


def test_images_take_their_part_of_the_cache() -> None:
    plan = flagship()
    text = dataclasses.replace(
        plan, serving=dataclasses.replace(SERVING, vision_cache_utilization=0.0)
    )
    whole = text.cache_budget(80 * 10**9, 8192, 1)
    assert plan.cache_budget(80 * 10**9, 8192, 1) == whole - whole // 20


def test_a_device_that_is_too_small_has_less_than_nothing() -> None:
    plan = flagship()
    missing = int(8e9 * 0.9) - plan.weights(8192).total - plan.activations(1).total
    assert plan.cache_budget(8 * 10**9, 8192, 1) == missing < 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32GiB", 32 * 2**30),
        ("32GB", 32 * 10**9),
        ("24gb", 24 * 10**9),
        (" 1.5 TiB ", 3 * 2**39),
        ("512MiB", 2**29),
        ("900kb", 900_000),
        ("0.1GB", 10**8),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "32",
        "GB",
        "-1GB",
        "0GB",
        "0.0001KB",
        "32G",
        "32GBs",
        "1e3GB",
        "nanGB",
        "1_0GB",
        "1,5GB",
        "9999999GB",
        "٣GB",
    ],
)
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="is not a size above 0 with its unit") as caught:
        parse_size(text)
    assert "\n" not in str(caught.value)
