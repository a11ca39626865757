"""The second start encodes nothing, and takes nothing that is not the same checkpoint's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from max.dtype import DType
from max.graph.weights import WeightData, load_weights

from attnquant.log import LOGGER
from attnquant.nn import packed_cache, quantize
from attnquant.nn.tensors import to_numpy
from attnquant.nn.weights import decoder_weights
from attnquant.settings import Settings
from tests.tiny.gemma3 import CASES

CASE = CASES["pattern2-scalar"]
SETTINGS = Settings(quant="nvfp4", quant_scales="absmax", quant_lm_head="nvfp4")
SMALL = Settings(quant="nvfp4", quant_scales="absmax", cache_gb=0)

Encodes = Callable[[], int]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packed_cache, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "attnquant" / "packed"


@pytest.fixture
def encodes(monkeypatch: pytest.MonkeyPatch) -> Encodes:
    """How many weights were encoded since the last call."""
    count = 0
    encode = quantize.encode

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return encode(*arguments, **options)

    def since() -> int:
        nonlocal count
        found, count = count, 0
        return found

    monkeypatch.setattr(quantize, "encode", counted)
    return since


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return CASE.write(tmp_path / "checkpoint")


def load(directory: Path, settings: Settings = SETTINGS) -> dict[str, WeightData]:
    files = sorted(directory.glob("*.safetensors"))
    return decoder_weights(
        dict(load_weights(files).items()),
        config=CASE.config(),
        dtype=DType.bfloat16,
        settings=settings,
        files=files,
    )


def content(state: dict[str, WeightData]) -> dict[str, bytes]:
    return {name: to_numpy(tensor).tobytes() for name, tensor in state.items()}


def table(text: str) -> list[str]:
    """The load table without the seconds."""
    return [line.partition("; scales")[0] for line in text.splitlines() if "NVFP4:" not in line]


def test_the_second_start_takes_the_same_bytes_and_says_so(
    checkpoint: Path, cache: Path, encodes: Encodes, capsys: pytest.CaptureFixture[str]
) -> None:
    first = content(load(checkpoint))
    said = capsys.readouterr().err
    assert encodes() == 7 * len(CASE.config()["layer_types"]) + 1
    second = content(load(checkpoint))
    assert encodes() == 0
    assert second == first
    again = capsys.readouterr().err
    assert table(again) == table(said)
    assert "packed by an earlier start" in again
    assert "packed by an earlier start" not in said
    assert len(list(cache.iterdir())) == 1


def test_another_way_of_quantizing_is_another_file(
    checkpoint: Path, cache: Path, encodes: Encodes
) -> None:
    load(checkpoint)
    for changed in (
        Settings(quant="nvfp4", quant_scales="mse", quant_lm_head="nvfp4"),
        Settings(quant="nvfp4", quant_scales="absmax"),
        Settings(quant="nvfp4", quant_scales="absmax", quant_ignore=("o_proj",)),
        Settings(quant="nvfp4", quant_scales="absmax", blocks=2, rank=1),
    ):
        encodes()
        load(checkpoint, changed)
        assert encodes()
    assert len(list(cache.iterdir())) == 5


def test_a_changed_checkpoint_is_encoded_again(
    checkpoint: Path, cache: Path, encodes: Encodes
) -> None:
    load(checkpoint)
    encodes()
    (file,) = checkpoint.glob("*.safetensors")
    before = os.stat(file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    # The same size and the same time of change, as a copy that keeps times leaves it.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = load(checkpoint)
    assert encodes()
    assert content(changed) == content(load(checkpoint, SMALL)) | {
        name: value for name, value in content(changed).items() if name.startswith("lm_head.")
    }


@pytest.mark.parametrize("damage", ["truncated", "emptied", "not safetensors"])
def test_a_damaged_file_is_made_again(
    checkpoint: Path, cache: Path, encodes: Encodes, damage: str
) -> None:
    first = content(load(checkpoint))
    encodes()
    (kept,) = cache.iterdir()
    data = kept.read_bytes()
    kept.write_bytes({"truncated": data[:-1], "emptied": b"", "not safetensors": data[8:]}[damage])
    assert content(load(checkpoint)) == first
    assert encodes()
    assert content(load(checkpoint)) == first
    assert not encodes()


def test_0_keeps_nothing_and_takes_nothing(checkpoint: Path, cache: Path, encodes: Encodes) -> None:
    load(checkpoint, SMALL)
    assert not cache.exists()
    load(checkpoint, Settings(quant="nvfp4", quant_scales="absmax"))
    encodes()
    load(checkpoint, SMALL)
    assert encodes()


def test_what_was_not_used_the_longest_makes_room(tmp_path: Path, cache: Path) -> None:
    files = sorted(CASE.write(tmp_path / "checkpoint").glob("*.safetensors"))
    state = {"a.codes": packed_cache.from_numpy(np.zeros(1000, np.uint8), DType.uint8, "a.codes")}
    caches = []
    for number in range(3):
        one = packed_cache.PackedCache(files, (number,), limit=3000)
        one.keep(state, {"a": [0.5, None]})
        caches.append(one._path)
        os.utime(caches[0])  # the first is in use
    assert [path.exists() for path in caches] == [True, False, True]
    found, errors = packed_cache.PackedCache(files, (0,), limit=3000).group("a")
    assert errors == [0.5, None]
    assert content(found) == content(state)


def test_what_cannot_be_kept_is_said(
    checkpoint: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the directory should be")
    with caplog.at_level("WARNING", LOGGER):
        load(checkpoint)
    assert "The packed weights are not kept for the next start" in caplog.text
