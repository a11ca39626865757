"""Graph operations over packed NVFP4 weights, and the choice of the kernel that runs them."""

from __future__ import annotations

import enum
from functools import cache
from itertools import accumulate

from max.driver import accelerator_api, accelerator_architecture_name
from max.dtype import DType
from max.experimental import functional as F
from max.graph import DeviceRef, TensorType, TensorValue, ops
from max.nn.quant_config import QuantConfig
from max.nn.quant_ops import quantized_matmul

from attnquant.kernels import extensions
from attnquant.log import log
from attnquant.nvfp4.format import BLOCK_SIZE

MAX_PARTS = 3
"""Stacked projections that one matmul serves at most: q, k and v."""


# What MAX's own kernels ask of a weight's shape: rows of codes, and of results, that start at
# multiples of 16 bytes, since the tensor memory accelerator moves them.
_MAX_COLUMNS = 32
_MAX_ROWS = 8


class NVFP4Kernel(enum.Enum):
    """What multiplies by packed weights; the value is what the log says."""

    CPU = "attnquant's CPU kernel: weights decoded in registers, activations as float32 has them"
    WEIGHT_ONLY = "attnquant's GPU kernel: weights decoded in registers, activations as they are"
    MAX_BLOCK_SCALED = "MAX's block-scaled matmul: activations quantized to NVFP4 too (W4A4)"
    MAX_APPLE = "MAX's Apple M5 matmul: weights decoded on the way in, activations as they are"

    @classmethod
    def of(cls, device: DeviceRef, dtype: DType, rows: int, columns: int) -> NVFP4Kernel:
        """The kernel for a weight `[rows, columns]` and activations of a dtype on a device.

        MAX's own kernels are for bfloat16, on GPUs with NVFP4 units: SM100 (data center Blackwell)
        and the Apple M5. The device's architecture is that of the accelerator, or of the one that
        MAX compiles for.
        """
        if device.is_cpu():
            return cls.CPU
        if dtype == DType.bfloat16 and not columns % _MAX_COLUMNS and not rows % _MAX_ROWS:
            api, architecture = accelerator_api(), accelerator_architecture_name()
            if api == "cuda" and architecture.startswith("sm_10"):
                return cls.MAX_BLOCK_SCALED
            if api == "metal" and architecture.split("-")[0] == "5":
                return cls.MAX_APPLE
        return cls.WEIGHT_ONLY

    @property
    def quantizes_activations(self) -> bool:
        """Whether the kernel reads an `input_scale`."""
        return self is NVFP4Kernel.MAX_BLOCK_SCALED

    @property
    def scale_dtype(self) -> DType:
        """What the graph calls the bytes of block scales: MAX takes no float8 on a CPU."""
        return (
            DType.float8_e4m3fn
            if self in (NVFP4Kernel.MAX_BLOCK_SCALED, NVFP4Kernel.MAX_APPLE)
            else DType.uint8
        )


@cache
def say_once(kernel: NVFP4Kernel) -> None:
    """Says in the log, the first time, that a kernel runs."""
    log.info("NVFP4 projections run on %s", kernel.value)


def nvfp4_matmul(
    x: TensorValue,
    codes: TensorValue,
    block_scales: TensorValue,
    global_scales: TensorValue,
    part_rows: tuple[int, ...],
    input_scale: TensorValue | None = None,
) -> TensorValue:
    """`x @ Wᵀ` with W packed, each stacked part under its own global scale.

    Runs the kernel that `NVFP4Kernel.of` chooses; the log says once which. Sums are float32 or
    wider everywhere.

    Args:
        x: float32 or bfloat16 `[vectors, columns]`, any number of vectors, none included.
        codes: uint8 `[rows, columns / 2]`, the even column in the low nibble.
        block_scales: `[rows, columns / 16]`, E4M3 scales, of the kernel's `scale_dtype`.
        global_scales: float32 `[parts]`.
        part_rows: rows of each part.
        input_scale: float32 `[1]` on the host: the global scale of x, where the kernel quantizes
            it too; 1 if None. A block of x is in range up to 6 · 448 times as much.

    Returns:
        `[vectors, rows]`, of the dtype and on the device of `x`.

    Raises:
        ValueError: the shapes or dtypes do not belong together.
    """
    device: DeviceRef = x.device
    rows, columns = int(codes.shape[0]), 2 * int(codes.shape[1])
    kernel = NVFP4Kernel.of(device, x.dtype, rows, columns)
    expected = {
        "x": ((DType.float32, DType.bfloat16), [x.shape[0], columns], x),
        "codes": ((DType.uint8,), [sum(part_rows), columns // 2], codes),
        "block_scales": ((kernel.scale_dtype,), [rows, columns // BLOCK_SIZE], block_scales),
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

    say_once(kernel)
    scales = global_scales.to(device)
    if kernel.scale_dtype == DType.float8_e4m3fn:
        packed = codes.to(device), block_scales.to(device)
        return _max_matmul(x, *packed, scales, part_rows, input_scale)
    ends = [*accumulate(part_rows), *[rows] * MAX_PARTS]
    # Unlike `max.graph.ops.custom`, this form brings its kernels into subgraphs too.
    (product,) = F.custom(
        "attnquant_nvfp4_matmul",
        device=device,
        values=[x, codes.to(device), block_scales.to(device), scales],
        out_types=[TensorType(x.dtype, (x.shape[0], rows), device)],
        parameters={"columns": columns, "bound1": ends[0], "bound2": ends[1]},
        custom_extensions=extensions(),
    )
    return TensorValue(product)


def bfloat16_matmul(x: TensorValue, weight: TensorValue) -> TensorValue:
    """`x @ Wᵀ` on the CPU, in float32, with W as it is stored: half the bytes of a float32 copy.

    Args:
        x: float32 `[vectors, columns]`, any number of vectors.
        weight: bfloat16 `[rows, columns]`, columns a multiple of 16.

    Returns:
        float32 `[vectors, rows]`.

    Raises:
        ValueError: the shapes or dtypes do not belong together, or it is not the CPU.
    """
    rows, columns = map(int, weight.shape)
    found = (x.dtype, x.shape[1], weight.dtype, columns % BLOCK_SIZE, x.device.is_cpu())
    if found != (DType.float32, columns, DType.bfloat16, 0, True):
        raise ValueError(
            f"found x {x.dtype} {x.shape} on {x.device}, weight {weight.dtype} {weight.shape}; "
            f"expected float32 and bfloat16, equal columns, a multiple of {BLOCK_SIZE}, on the CPU"
        )
    (product,) = F.custom(
        "attnquant_bfloat16_matmul",
        device=x.device,
        values=[x, weight],
        out_types=[TensorType(DType.float32, (x.shape[0], rows), x.device)],
        custom_extensions=extensions(),
    )
    return TensorValue(product)


def _max_matmul(
    x: TensorValue,
    codes: TensorValue,
    block_scales: TensorValue,
    global_scales: TensorValue,
    part_rows: tuple[int, ...],
    input_scale: TensorValue | None,
) -> TensorValue:
    """MAX's matmul, without global scales, and each row times its part's scale afterwards.

    MAX takes one global scale for all rows. Its result is bfloat16, whose range the product
    without the scale does not leave; the multiplication is one elementwise step, which MAX fuses
    into what follows.
    """
    one = ops.constant(1.0, DType.float32, DeviceRef.CPU())
    product = quantized_matmul(
        x,
        codes,
        block_scales,
        input_scale=one if input_scale is None else input_scale.reshape(()),
        weight_scale_2=one,
        quant_config=QuantConfig.nvfp4(mlp_quantized_layers=(), attn_quantized_layers=()),
    )
    factors = ops.concat(
        [ops.broadcast_to(global_scales[part], (rows,)) for part, rows in enumerate(part_rows)]
    )
    return ops.cast(ops.cast(product, DType.float32) * factors, x.dtype)
