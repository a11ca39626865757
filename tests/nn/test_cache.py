"""A KV cache on a CPU takes a Linux host's memory only where something is in it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef
from max.nn.kv_cache import MHAKVCacheParams, MultiKVCacheParams
from max.pipelines.kv_cache.registry import load_kv_manager

from attnquant.nn.cache import DecoderCacheParams, give_back_zeros

SIZE = 64 << 20

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: its madvise")


def resident() -> int:
    """Bytes of this process's own memory."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


@only_linux
def test_pages_of_zeros_are_given_back_and_nothing_else_is() -> None:
    values = np.zeros(SIZE, np.uint8)
    values[:] = 0  # written, and so resident
    values[[5, SIZE // 2, SIZE - 1]] = (1, 2, 3)
    before = resident()
    given = give_back_zeros(Buffer.from_numpy(values))
    freed = before - resident()
    assert given > 0.9 * SIZE
    assert freed > 0.9 * given
    assert np.flatnonzero(values).tolist() == [5, SIZE // 2, SIZE - 1]
    assert values[[5, SIZE // 2, SIZE - 1]].tolist() == [1, 2, 3]


@only_linux
@given(st.integers(0, 5 << 20), st.lists(st.integers(0, (5 << 20) - 1), max_size=20))
def test_a_buffer_holds_what_it_held(size: int, places: list[int]) -> None:
    values = np.zeros(size, np.uint8)
    for place in places:
        if place < size:
            values[place] = 1 + place % 255
    expected = values.copy()
    give_back_zeros(Buffer.from_numpy(values))
    np.testing.assert_array_equal(values, expected)


@only_linux
def test_a_new_cache_is_not_resident() -> None:
    def growth(kind: type[MultiKVCacheParams]) -> int:
        params = MHAKVCacheParams(
            dtype=DType.float32,
            n_kv_heads=2,
            head_dim=64,
            num_layers=4,
            devices=[DeviceRef.CPU()],
        )
        device = CPU()
        session = InferenceSession(devices=[device])
        before = resident()
        manager = load_kv_manager(
            params=kind.from_params({"full_attention": params}),
            max_batch_size=8,
            max_seq_len=2048,
            session=session,
            available_cache_memory=SIZE,
            is_di_enabled=False,
            model_name="new",
            max_num_input_tokens=None,
        )
        device.synchronize()  # MAX writes its zeros later
        grown = resident() - before
        del manager
        return grown

    assert growth(MultiKVCacheParams) > 0.9 * SIZE
    assert growth(DecoderCacheParams) < 0.2 * SIZE
