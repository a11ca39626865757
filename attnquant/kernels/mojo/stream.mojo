"""Reading a matrix from memory at the rate that memory has, on all cores, several rows at once.

Rows are short next to what a core's own prefetcher needs to see a stream in them: so each load also
asks for what lies some rows below it.
"""

from std.math import ceildiv
from std.sys.intrinsics import PrefetchOptions, prefetch
from max.runtime.asyncrt import parallelism_level

comptime TASK_PRODUCTS = 1 << 18
"""Multiplications that make it worth waking another core: some 30 us, ten times the cost."""

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


def cores_of(products: Int) -> Int:
    """How many cores so many multiplications are worth."""
    return max(1, min(parallelism_level(None), products // TASK_PRODUCTS))


def tasks_of(products: Int) -> Int:
    """How many tasks to cut so many multiplications into: as many for every core, or fewer."""
    var cores = parallelism_level(None)
    var tasks = max(1, min(4 * cores, products // TASK_PRODUCTS))
    return tasks // cores * cores if tasks > cores else tasks
