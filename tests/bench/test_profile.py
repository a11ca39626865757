"""The FLOPs that a profile is said to take."""

from __future__ import annotations

from attnquant.decoder_shapes import DecoderShapes
from bench.load import config
from bench.profile import flops


def test_flops_are_counted_as_by_hand() -> None:
    layers = DecoderShapes.from_config(config(60)).layers
    weights = 8_477_736_960 + 20_808_990_720
    pairs = sum(range(1, 513))
    # 50 sliding layers of 32 heads of 256, 10 full ones of 32 heads of 512.
    attention = 4 * pairs * 32 * (50 * 256 + 10 * 512)
    assert flops(layers, 512) == 2 * 512 * weights + attention
    assert flops(layers, 4096) == 8 * flops(layers, 512)
    assert flops(layers, 513) == flops(layers, 512) + 2 * weights + attention // pairs
