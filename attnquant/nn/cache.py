"""The decoders' KV cache, which takes a Linux host's memory only where something is in it.

MAX writes zeros over the whole of a new cache. On a CPU that makes all of it resident, for as long
as the process lives and however few tokens come. Pages given back to Linux read as zeros still, and
take memory when something is written there.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from max.driver import Buffer
from max.nn.kv_cache import MultiKVCacheParams
from max.nn.kv_cache.cache_params import KVCacheBufferInterface
from numpy.lib.array_utils import byte_bounds
from typing_extensions import override

# How much is looked at, and given back, at once.
_CHUNK = 1 << 20


class DecoderCacheParams(MultiKVCacheParams):
    """MAX's, for a cache that gives zeros back as it is made."""

    @override
    def slab_to_buffer_views(
        self,
        buffers: Sequence[Buffer],
        padded_page_bytes: Mapping[str, int] | None = None,
        _prefix: str = "",
    ) -> KVCacheBufferInterface:
        """As MAX's, which calls it on what it has just filled with zeros."""
        for buffer in buffers:
            if buffer.device.is_host:
                buffer.device.synchronize()  # before it, zeros may be on their way still
                give_back_zeros(buffer)
        return super().slab_to_buffer_views(buffers, padded_page_bytes, _prefix)


def give_back_zeros(buffer: Buffer) -> int:
    """Gives a buffer's pages of zeros back to Linux; what the buffer holds stays what it is.

    Does nothing where the operating system is another.

    Args:
        buffer: on the host, contiguous; nothing else may write to it meanwhile.

    Returns:
        The bytes that were given back.
    """
    given = 0
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        low, high = byte_bounds(buffer.to_numpy())
        first = -(-low // mmap.PAGESIZE) * mmap.PAGESIZE
        last = high // mmap.PAGESIZE * mmap.PAGESIZE
        for address in range(first, last, _CHUNK):
            size = min(_CHUNK, last - address)
            chunk = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            if not chunk.max() and not libc.madvise(address, size, mmap.MADV_DONTNEED):
                given += size
    return given
