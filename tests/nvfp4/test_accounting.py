"""Bytes per token: the figures of Gemma 4 31B, and the accounting against real packed weights."""

from __future__ import annotations

import numpy as np
import pytest

from attnquant.decoder_shapes import DecoderShapes
from attnquant.nvfp4.accounting import format_bytes, stacked_bytes, token_bytes, weight_bytes
from attnquant.nvfp4.coverage import Coverage
from attnquant.nvfp4.format import packed_bytes
from attnquant.nvfp4.reference import encode
from tests.configs import gemma3_270m, gemma4_31b

SHAPES = DecoderShapes.from_config(gemma4_31b())


@pytest.mark.parametrize(
    ("ignore", "with_head", "count", "gigabytes"),
    [
        (("*",), False, 0, "61.395 GB"),
        (("self_attn",), False, 180, "31.482 GB"),
        (("mlp",), False, 230, "49.208 GB"),
        ((), False, 410, "19.295 GB"),
        ((), True, 410, "17.269 GB"),
    ],
)
def test_gemma4_31b(ignore: tuple[str, ...], with_head: bool, count: int, gigabytes: str) -> None:
    head = SHAPES.head if with_head else None
    coverage = Coverage.of(SHAPES.projections, ignore=ignore, head=head)
    assert len(coverage.quantized) == count
    assert format_bytes(token_bytes(SHAPES, coverage).total) == gigabytes


def test_ratios_of_gemma4_31b() -> None:
    everything = token_bytes(SHAPES, Coverage.of(SHAPES.projections)).total
    mlp_only = token_bytes(SHAPES, Coverage.of(SHAPES.projections, ignore=("self_attn",))).total
    assert f"{token_bytes(SHAPES).total / everything:.2f}" == "3.18"
    assert f"{mlp_only / everything:.2f}" == "1.63"


def test_parts() -> None:
    before = token_bytes(SHAPES)
    assert before.attention == 2 * 8_477_736_960
    assert before.mlp == 2 * 20_808_990_720
    assert before.head == 2 * 1_409_286_144
    # 4 norms of 5376, q and k norms of 256 or 512, one scalar a layer; the last norm.
    assert before.norms == 2 * (60 * (4 * 5376 + 1) + 50 * 2 * 256 + 10 * 2 * 512 + 5376)
    assert before.total == before.attention + before.mlp + before.head + before.norms


def test_nothing_quantized_is_before() -> None:
    assert token_bytes(SHAPES, Coverage.none(SHAPES.projections)) == token_bytes(SHAPES)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("with_head", [True, False])
def test_memory_holds_what_a_token_reads_and_an_embedding_that_is_not_the_head(
    tied: bool, with_head: bool
) -> None:
    shapes = DecoderShapes.from_config(gemma3_270m(tie_word_embeddings=tied))
    coverage = Coverage.of(shapes.projections, head=shapes.head if with_head else None)
    for element_bytes in (2, 4):
        read = token_bytes(shapes, coverage, element_bytes)
        held = weight_bytes(shapes, coverage, element_bytes)
        embedding = 0 if tied and not with_head else element_bytes * 262144 * 640
        assert (held.embedding, held.total) == (embedding, read.total + embedding)
        assert held.norms == element_bytes * before_norms(shapes)


def before_norms(shapes: DecoderShapes) -> int:
    return 640 + sum(4 * 640 + 2 * 256 for _ in shapes.layers)


def test_unquantized_fused_groups() -> None:
    """Of a group that the coverage splits, nothing is stacked."""
    mlp = 60 * 2 * 21504 * 5376
    sliding, full = 50 * (32 + 16 + 16) * 256 * 5376, 10 * (32 + 4) * 512 * 5376
    for ignore, expected in {
        ("*",): mlp + sliding + full,
        ("mlp",): mlp,
        ("self_attn",): sliding + full,
        ("v_proj",): 0,
        ("q_proj", "k_proj"): full,
        (): 0,
    }.items():
        assert stacked_bytes(SHAPES, Coverage.of(SHAPES.projections, ignore=ignore)) == 2 * expected


def test_units() -> None:
    sizes = (0, 12, 81_920, 999_999, 1_000_000, 19_295_021_280)
    shown = ["0.0 MB", "0.0 KB", "81.9 KB", "1000.0 KB", "1.0 MB", "19.295 GB"]
    assert [format_bytes(size) for size in sizes] == shown


def test_small_model_in_full() -> None:
    """All of Gemma 3 270M in NVFP4, its head too: 150 MB a token."""
    shapes = DecoderShapes.from_config(gemma3_270m())
    coverage = Coverage.of(shapes.projections, head=shapes.head)
    assert format_bytes(token_bytes(shapes, coverage).total) == "150.9 MB"


@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (640, 1024)])
def test_packed_bytes_are_what_a_weight_holds(shape: tuple[int, int]) -> None:
    assert encode(np.ones(shape, np.float32), scales="absmax").nbytes == packed_bytes(*shape)
