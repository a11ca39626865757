"""What memory can deliver at most: all cores read a buffer once, and do nearly nothing with it."""

import extensibility
from extensibility import InputTensor, OutputTensor
from std.math import ceildiv
from max.algorithm import sync_parallelize
from max.runtime.asyncrt import parallelism_level

comptime WIDTH = 256
"""Bytes at once: some registers, so that loads do not wait for each other."""


@extensibility.register("attnquant_bench_read")
struct ReadBytes:
    """The exclusive or of all bytes, a column of 256 for each core; the length is a multiple."""

    @staticmethod
    def execute(
        output: OutputTensor[dtype=DType.uint8, rank=2, ...],
        buffer: InputTensor[dtype=DType.uint8, rank=1, ...],
    ):
        var bytes = buffer.unsafe_ptr()
        var result = output.unsafe_ptr()
        var steps = buffer.dim_size(0) // WIDTH
        var cores = output.dim_size(0)
        var share = ceildiv(steps, cores)

        def work(core: Int) {imm}:
            var sum = SIMD[DType.uint8, WIDTH](0)
            for step in range(core * share, min((core + 1) * share, steps)):
                sum ^= bytes.unsafe_load[width=WIDTH](step * WIDTH)
            result.unsafe_store(core * WIDTH, sum)

        sync_parallelize(work, cores)
