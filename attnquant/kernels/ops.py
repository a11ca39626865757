"""Graph operations over packed NVFP4 weights."""

from __future__ import annotations

from itertools import accumulate

from max.experimental import functional as F
from max.graph import TensorType, TensorValue

from attnquant.kernels import EXTENSIONS

MAX_PARTS = 3


def nvfp4_matmul(
    x: TensorValue,
    codes: TensorValue,
    block_scales: TensorValue,
    global_scales: TensorValue,
    part_rows: tuple[int, ...],
) -> TensorValue:
    rows, _ = codes.shape
    bounds = [*accumulate(part_rows)][:-1]
    bounds += [sum(part_rows)] * (MAX_PARTS - 1 - len(bounds))
    device = x.device
    # This form of MAX's custom op brings its kernels into subgraphs too.
    (out,) = F.custom(
        "attnquant_nvfp4_matmul",
        device=device,
        values=[x, codes.to(device), block_scales.to(device), global_scales.to(device)],
        out_types=[TensorType(x.dtype, (x.shape[0], rows), device)],
        parameters={"bound1": bounds[0], "bound2": bounds[1]},
        custom_extensions=EXTENSIONS,
    )
    return TensorValue(out)
