"""A short, seeded fuzz that runs everywhere; `fuzz/checkpoint.py` is the long, guided one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.fuzzing import BAD_SEEDS, SEEDS, Directories, open_any

MUTATIONS = 4000
CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus" / "checkpoint"
TOKENS = (
    b'{}', b'[]', b'"', b",", b":", b"\\", b"\\ud800", b"-1", b"1e9", b"9" * 30, b"null", b"true",
    b"[[[[", b"\0", b"\xff", b" ", b'"a"', b'"dtype"', b'"shape"', b'"data_offsets"', b'"F64"',
    b"__metadata__", b"../", b"/", b".safetensors", b"18446744073709551616",
)  # fmt: skip


def _flip(data: bytearray, random: random.Random) -> None:
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _replace_byte(data: bytearray, random: random.Random) -> None:
    data[random.randrange(len(data))] = random.randrange(256)


def _cut(data: bytearray, random: random.Random) -> None:
    start = random.randrange(len(data))
    del data[start : start + random.randrange(1, 20)]


def _double(data: bytearray, random: random.Random) -> None:
    start = random.randrange(len(data))
    data[start:start] = data[start : start + random.randrange(1, 60)]


def _insert(data: bytearray, random: random.Random) -> None:
    start = random.randrange(len(data) + 1)
    data[start:start] = random.choice(TOKENS)


def _length(data: bytearray, random: random.Random) -> None:
    data[1:9] = random.choice([0, 1, len(data), 2**31, 2**63, random.randrange(200)]).to_bytes(
        8, "little"
    )


KINDS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip,
    _replace_byte,
    _cut,
    _double,
    _insert,
    _length,
)


def test_only_checkpoint_errors_escape(tmp_path: Path) -> None:
    generator = random.Random(20_260_101)
    directories, good = Directories(tmp_path / "files"), 0
    for _ in range(MUTATIONS):
        data = bytearray(generator.choice(SEEDS))
        for _ in range(generator.randrange(1, 4)):
            if len(data) > 1:
                generator.choice(KINDS)(data, generator)
        good += open_any(bytes(data), directories)
    assert 20 < good < MUTATIONS / 2  # neither extreme would test much


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_seeds(seed: int, tmp_path: Path) -> None:
    assert open_any(SEEDS[seed], Directories(tmp_path / "files")) == (seed not in BAD_SEEDS)


def test_corpus(tmp_path: Path) -> None:
    inputs, directories = sorted(CORPUS.iterdir()), Directories(tmp_path / "files")
    assert inputs
    for path in inputs:
        open_any(path.read_bytes(), directories)
