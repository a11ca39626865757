"""How fast one projection is on the CPU, and how much of the memory's bandwidth it reads W at.

The same random matrix, larger than the last-level cache, is multiplied by one and by more vectors:
as float32 by MAX's matmul, as bfloat16 and packed in NVFP4 by ours. The bandwidth beside them is a
loop over a buffer as large as the float32 matrix, on the same cores, in the same rounds. A side's
fraction of it counts the bytes of W as that side stores it, its scales included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from numpy.typing import NDArray

from attnquant.kernels import extensions
from attnquant.kernels.codec import encode
from attnquant.kernels.ops import bfloat16_matmul, nvfp4_matmul
from bench.common import Run, Sample, alternate, device, ratio, seconds, show_ratio

READ = Path(__file__).parent / "mojo"
READ_WIDTH = 256

BASE, BFLOAT16, PACKED, MEMORY = "float32, MAX", "bfloat16", "NVFP4", "memory"
# Calls that make one measurement: enough to be long next to a clock's step.
SHORTEST = 0.02

Call = Callable[[], object]


def matmuls(weight: NDArray[np.float32]) -> dict[str, tuple[int, Callable[..., Call]]]:
    """Bytes of W, and what makes a call for some vectors `[count, columns]`, by side."""
    rows, columns = weight.shape
    packed = encode(weight, scales="absmax")
    narrow = weight.astype(ml_dtypes.bfloat16)
    stored = {
        BASE: [Buffer.from_numpy(weight)],
        BFLOAT16: [Buffer.from_numpy(narrow.view(np.uint16)).view(DType.bfloat16, weight.shape)],
        PACKED: [
            Buffer.from_numpy(packed.codes),
            Buffer.from_numpy(packed.block_scales.view(np.uint8)),
            Buffer.from_numpy(packed.global_scales),
        ],
    }
    products: dict[str, Callable[..., TensorValue]] = {
        BASE: lambda x, w: x @ w.T,
        BFLOAT16: bfloat16_matmul,
        PACKED: partial(nvfp4_matmul, part_rows=(rows,)),
    }
    sides = {}
    for side, buffers in stored.items():
        types = [(DType.float32, ("vectors", columns))]
        types += [(buffer.dtype, tuple(buffer.shape)) for buffer in buffers]
        model = _compile(side, types, products[side], [] if side == BASE else [extensions()])

        def call(x: Buffer, model: Model = model, buffers: list[Buffer] = buffers) -> Call:
            return partial(model.execute, x, *buffers)

        size = sum(buffer.num_elements * buffer.dtype.size_in_bytes for buffer in buffers)
        sides[side] = (size, call)
    return sides


def reader(size: int) -> Call:
    """A call that reads so many bytes, a multiple of 256, on all cores."""
    cores = device()["cores"]

    def read(buffer: TensorValue) -> TensorValue:
        result = TensorType(DType.uint8, (cores, READ_WIDTH), DeviceRef.CPU())
        return ops.custom("attnquant_bench_read", DeviceRef.CPU(), [buffer], [result])[0].tensor

    model = _compile("read", [(DType.uint8, (size,))], read, [READ])
    buffer = Buffer.from_numpy(np.random.default_rng(0).integers(0, 256, size, np.uint8))
    return partial(model.execute, buffer)


def _compile(
    name: str,
    types: Sequence[tuple[DType, tuple[Any, ...]]],
    body: Callable[..., TensorValue],
    custom_extensions: Sequence[Path],
) -> Model:
    inputs = [TensorType(dtype, shape, DeviceRef.CPU()) for dtype, shape in types]
    with Graph(name, input_types=inputs, custom_extensions=list(custom_extensions)) as graph:
        graph.output(body(*(value.tensor for value in graph.inputs)))
    return InferenceSession(devices=[CPU()]).load(graph)


def repeated(call: Call) -> float:
    """Seconds of one call: the mean over calls that together take a while."""
    once = seconds(call)
    times = max(1, int(SHORTEST / max(once, 1e-6)))
    return seconds(lambda: [call() for _ in range(times)]) / times


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run = Run("kernel", __doc__, models=False)
    run.parser.add_argument("--rows", type=int, default=32768)
    run.parser.add_argument("--columns", type=int, default=4096)
    run.parser.add_argument("--vectors", type=int, nargs="+", default=[1, 2, 4, 8, 32, 128])
    run.parser.add_argument("--rounds", type=int, default=7)
    options = run.parse(arguments)
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((options.rows, options.columns), np.float32)
    sides = matmuls(weight)
    sizes: Mapping[str, int] = {side: size for side, (size, _) in sides.items()}
    read = partial(repeated, reader(weight.nbytes))

    rows: list[tuple[str, ...]] = [
        ("vectors", "", "ms", f"{BASE} / it", "GB/s of W", "of the memory's", "G products/s")
    ]
    figures: dict[str, Any] = {"rows": options.rows, "columns": options.columns, "bytes": sizes}
    bandwidths: list[float] = []
    for count in options.vectors:
        x = Buffer.from_numpy(generator.standard_normal((count, options.columns), np.float32))
        calls = {side: partial(repeated, make(x)) for side, (_, make) in sides.items()}
        taken = alternate(calls | {MEMORY: read}, options.rounds)
        times = {side: Sample.of(taken[side]) for side in sides}
        memory = Sample.of([weight.nbytes / time / 1e9 for time in taken[MEMORY]])
        bandwidths += memory.values
        figures[f"{count} vectors"] = {
            "seconds": times,
            "memory_gb_per_second": memory,
            "times_faster": {side: ratio(times[BASE], times[side]) for side in sides},
        }
        for side, time in times.items():
            rate = sizes[side] / time.median / 1e9
            rows.append(
                (
                    str(count) if side == BASE else "",
                    side,
                    Sample.of([1e3 * value for value in time.values]).show(2),
                    "" if side == BASE else show_ratio(ratio(times[BASE], time)),
                    f"{rate:.1f}",
                    f"{100 * rate / memory.median:.0f}%",
                    f"{count * weight.size / time.median / 1e9:.0f}",
                )
            )
    figures["memory_gb_per_second"] = Sample.of(bandwidths)
    run.report(rows, figures)
    print(f"Memory: {Sample.of(bandwidths).show(1)} GB/s, read by all cores.")


if __name__ == "__main__":
    main()
