"""Graph operations over packed NVFP4 weights."""

from __future__ import annotations

from itertools import accumulate

from max.dtype import DType
from max.experimental import functional as F
from max.graph import DeviceRef, TensorType, TensorValue

from attnquant.kernels import extensions
from attnquant.nvfp4.format import BLOCK_SIZE

MAX_PARTS = 3
"""Stacked projections that one matmul serves at most: q, k and v."""


def nvfp4_matmul(
    x: TensorValue,
    codes: TensorValue,
    block_scales: TensorValue,
    global_scales: TensorValue,
    part_rows: tuple[int, ...],
) -> TensorValue:
    """`x @ Wᵀ` with W packed, each stacked part under its own global scale.

    On a CPU the activations are taken to 15 bits per block of 16 columns; on a GPU they stay as
    they are, and W is decoded in registers. Sums are float32 or wider everywhere.

    Args:
        x: float32 or bfloat16 `[vectors, columns]`, any number of vectors, none included.
        codes: uint8 `[rows, columns / 2]`, the even column in the low nibble.
        block_scales: uint8 `[rows, columns / 16]`, the bytes of E4M3 scales (MAX takes no float8
            tensors on a CPU).
        global_scales: float32 `[parts]`.
        part_rows: rows of each part.

    Returns:
        `[vectors, rows]`, of the dtype and on the device of `x`.

    Raises:
        ValueError: the shapes or dtypes do not belong together.
    """
    device: DeviceRef = x.device
    rows, columns = int(codes.shape[0]), 2 * int(codes.shape[1])
    expected = {
        "x": ((DType.float32, DType.bfloat16), [x.shape[0], columns], x),
        "codes": ((DType.uint8,), [sum(part_rows), columns // 2], codes),
        "block_scales": ((DType.uint8,), [rows, columns // BLOCK_SIZE], block_scales),
        "global_scales": ((DType.float32,), [len(part_rows)], global_scales),
    }
    for name, (dtypes, shape, value) in expected.items():
        if value.dtype not in dtypes or list(value.shape) != shape or columns % BLOCK_SIZE:
            raise ValueError(
                f"{name}: found {value.dtype} {value.shape}, expected {dtypes[-1]} {shape}, "
                f"columns a multiple of {BLOCK_SIZE}"
            )
    if not 1 <= len(part_rows) <= MAX_PARTS:
        raise ValueError(f"part_rows: found {part_rows}, expected 1 to {MAX_PARTS} parts")

    ends = [*accumulate(part_rows), *[rows] * MAX_PARTS]
    # Unlike `max.graph.ops.custom`, this form brings its kernels into subgraphs too.
    (product,) = F.custom(
        "attnquant_nvfp4_matmul",
        device=device,
        values=[x, codes.to(device), block_scales.to(device), global_scales.to(device)],
        out_types=[TensorType(x.dtype, (x.shape[0], rows), device)],
        parameters={"columns": columns, "bound1": ends[0], "bound2": ends[1]},
        custom_extensions=extensions(),
    )
    return TensorValue(product)
