"""The checkpoint that stands for the 31B, and what is worked out from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attnquant.decoder_shapes import DecoderShapes
from bench import load
from bench.common import ROOT
from tests.configs import gemma4_31b


def test_sixty_layers_are_the_31b() -> None:
    whole = DecoderShapes.from_config(load.config(60))
    assert whole == DecoderShapes.from_config(gemma4_31b())


def test_two_layers_are_one_of_each_kind() -> None:
    kinds = [layer.kind for layer in DecoderShapes.from_config(load.config(2)).layers]
    assert kinds == ["sliding_attention", "full_attention"]


def test_a_small_one_goes_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = load.config(2)
    fields["text_config"] |= {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 32}
    shapes = DecoderShapes.from_config(fields)
    figures = load.measure(load.write(tmp_path, shapes), fields)
    assert figures["projections"] == 13
    assert figures["whole"]["projections"] == 410
    assert figures["whole"]["packed_bytes"] == (8_477_736_960 + 20_808_990_720) * 9 // 16 + 410 * 4
    rate = figures["seconds"] / sum(map(np.prod, shapes.projections.values()))
    assert figures["whole"]["seconds"] == pytest.approx(rate * (8_477_736_960 + 20_808_990_720))


# In a process of its own: one that ran other tests gives memory back meanwhile.
HOLD = """
import time
import numpy as np
from bench import load

def hold():
    held = np.ones(50_000_000, np.uint8)
    time.sleep(0.5)  # longer than a busy machine lets the watcher wait
    return int(held.sum())

print(*load.with_peak(hold))
"""


def test_a_call_s_own_memory_is_seen() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLD], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result, peak = map(int, done.stdout.split())
    assert result == 50_000_000
    assert 45e6 < peak < 100e6
