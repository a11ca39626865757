"""Reading a matrix from memory at the rate that memory has, several rows at once.

Rows are short next to what a core's own prefetcher needs to see a stream in them: so each load also
asks for what lies some rows below it.
"""

from std.math import ceildiv
from std.sys.intrinsics import PrefetchOptions, prefetch

comptime AHEAD_BYTES = 1 << 12
"""What a core reads in a few times the latency of memory."""


@always_inline
def ahead_of(tile: Int) -> Int:
    """How far ahead to fetch, in bytes: some whole tiles of so many bytes, each one contiguous."""
    return ceildiv(AHEAD_BYTES, max(tile, 1)) * tile


@always_inline
def fetch(bytes: Pointer[UInt8, _], ahead: Int):
    """Asks for the cache line that lies `ahead` bytes behind; past the matrix it does no harm."""
    comptime options = PrefetchOptions().for_read().high_locality().to_data_cache()
    prefetch[options](bytes.unsafe_offset(ahead))
