"""How fast one projection is, and how much of the memory's bandwidth it reads W at.

The same random matrix, larger than the last-level cache, is multiplied by one and by more vectors.
On a CPU: as float32 by MAX's matmul, as bfloat16 and packed in NVFP4 by ours. On a GPU, in
bfloat16: by MAX's matmul, and packed. The bandwidth beside them is a loop over a buffer as large as
the widest matrix, on the same device, in the same rounds; on a GPU, MAX adds 1 to each element, and
reads and writes both count. A side's fraction of it counts the bytes of W as that side stores it,
its scales included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from max.driver import CPU, Accelerator, Buffer, Device, accelerator_count
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from numpy.typing import NDArray

from attnquant.kernels import extensions
from attnquant.kernels.codec import encode
from attnquant.kernels.ops import NVFP4Kernel, bfloat16_matmul, nvfp4_matmul
from bench.common import Run, Sample, alternate, device, ratio, seconds, show_ratio

READ = Path(__file__).parent / "mojo"
READ_WIDTH = 256

FLOAT32, BFLOAT16, BFLOAT16_MAX = "float32, MAX", "bfloat16", "bfloat16, MAX"
PACKED, MEMORY = "NVFP4", "memory"
# Calls that make one measurement: enough to be long next to a clock's step.
SHORTEST = 0.02

Call = Callable[[], object]


def _transposed(x: TensorValue, weight: TensorValue) -> TensorValue:
    return x @ weight.T


def matmuls(
    weight: NDArray[np.float32], where: Device
) -> dict[str, tuple[int, Callable[[NDArray[np.float32]], Call]]]:
    """Bytes of W, and what makes a call for vectors `[count, columns]`, by side."""
    rows, columns = weight.shape
    dtype = DType.float32 if where.is_host else DType.bfloat16
    kernel = NVFP4Kernel.of(DeviceRef.from_device(where), dtype, rows, columns)
    packed = encode(weight, scales="absmax")
    scales = Buffer.from_numpy(packed.block_scales.view(np.uint8))
    narrow = _bfloat16(weight)
    product = partial(nvfp4_matmul, part_rows=(rows,))
    dense: dict[str, tuple[list[Buffer], Callable[..., TensorValue]]] = (
        {
            FLOAT32: ([Buffer.from_numpy(weight)], _transposed),
            BFLOAT16: ([narrow], bfloat16_matmul),
        }
        if where.is_host
        else {BFLOAT16_MAX: ([narrow], _transposed)}
    )
    codes, factor = Buffer.from_numpy(packed.codes), Buffer.from_numpy(packed.global_scales)
    scales = scales.view(kernel.scale_dtype, scales.shape)
    stored: dict[str, tuple[list[Buffer], Callable[..., TensorValue]]] = dense | {
        PACKED: ([codes, scales, factor], product)
    }
    sides: dict[str, tuple[int, Callable[[NDArray[np.float32]], Call]]] = {}
    for side, (buffers, body) in stored.items():
        types = [(dtype, ("vectors", columns))]
        types += [(buffer.dtype, tuple(buffer.shape)) for buffer in buffers]
        ours = body is not _transposed
        model = _compile(side, types, body, [extensions()] if ours else [], where)
        held = [buffer.to(where) for buffer in buffers]

        def call(x: NDArray[np.float32], model: Model = model, held: list[Buffer] = held) -> Call:
            vectors = Buffer.from_numpy(x) if dtype == DType.float32 else _bfloat16(x)
            return _synchronized(partial(model.execute, vectors.to(where), *held), where)

        size = sum(buffer.num_elements * buffer.dtype.size_in_bytes for buffer in buffers)
        sides[side] = (size, call)
    return sides


def reader(size: int, where: Device) -> tuple[int, Call]:
    """A call that goes through so many bytes, a multiple of 256, and the bytes that it moves."""
    ref = DeviceRef.from_device(where)

    def read(buffer: TensorValue) -> TensorValue:
        if not where.is_host:
            return buffer + 1
        result = TensorType(DType.uint8, (device()["cores"], READ_WIDTH), ref)
        return ops.custom("attnquant_bench_read", ref, [buffer], [result])[0].tensor

    types = [(DType.uint8, (size,))]
    model = _compile("read", types, read, [READ] if where.is_host else [], where)
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    buffer = Buffer.from_numpy(content).to(where)
    call = _synchronized(partial(model.execute, buffer), where)
    return (size if where.is_host else 2 * size), call


def _bfloat16(array: NDArray[np.float32]) -> Buffer:
    bits = array.astype(ml_dtypes.bfloat16).view(np.uint16)
    return Buffer.from_numpy(bits).view(DType.bfloat16, array.shape)


def _synchronized(call: Call, where: Device) -> Call:
    """The call, until the device has done it."""
    if where.is_host:
        return call

    def run() -> None:
        call()
        where.synchronize()

    return run


def _compile(
    name: str,
    types: Sequence[tuple[DType, tuple[Any, ...]]],
    body: Callable[..., TensorValue],
    custom_extensions: Sequence[Path],
    where: Device,
) -> Model:
    ref = DeviceRef.from_device(where)
    inputs = [TensorType(dtype, shape, ref) for dtype, shape in types]
    with Graph(name, input_types=inputs, custom_extensions=list(custom_extensions)) as graph:
        graph.output(body(*(value.tensor for value in graph.inputs)))
    return InferenceSession(devices=[where]).load(graph)


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
    where = Accelerator() if accelerator_count() else CPU()
    sides = matmuls(weight, where)
    sizes: Mapping[str, int] = {side: size for side, (size, _) in sides.items()}
    base = next(iter(sides))
    moved, call = reader(max(sizes.values()), where)
    read = partial(repeated, call)

    rows: list[tuple[str, ...]] = [
        ("vectors", "", "ms", f"{base} / it", "GB/s of W", "of the memory's", "G products/s")
    ]
    figures: dict[str, Any] = {
        "accelerator": None if where.is_host else where.architecture_name,
        "rows": options.rows,
        "columns": options.columns,
        "bytes": sizes,
    }
    bandwidths: list[float] = []
    for count in options.vectors:
        x = generator.standard_normal((count, options.columns), np.float32)
        calls = {side: partial(repeated, make(x)) for side, (_, make) in sides.items()}
        taken = alternate(calls | {MEMORY: read}, options.rounds)
        times = {side: Sample.of(taken[side]) for side in sides}
        memory = Sample.of([moved / time / 1e9 for time in taken[MEMORY]])
        bandwidths += memory.values
        figures[f"{count} vectors"] = {
            "seconds": times,
            "memory_gb_per_second": memory,
            "times_faster": {side: ratio(times[base], times[side]) for side in sides},
        }
        for side, time in times.items():
            rate = sizes[side] / time.median / 1e9
            rows.append(
                (
                    str(count) if side == base else "",
                    side,
                    Sample.of([1e3 * value for value in time.values]).show(2),
                    "" if side == base else show_ratio(ratio(times[base], time)),
                    f"{rate:.1f}",
                    f"{100 * rate / memory.median:.0f}%",
                    f"{count * weight.size / time.median / 1e9:.0f}",
                )
            )
    figures["memory_gb_per_second"] = Sample.of(bandwidths)
    run.report(rows, figures)
    print(f"Memory: {Sample.of(bandwidths).show(1)} GB/s.")


if __name__ == "__main__":
    main()
