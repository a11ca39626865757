"""Theta bundles in a graph: a block shared by layers, and what makes it this layer's weight.

A fused group of one layer is stored as follows, below the group's module
(`layers.3.self_attn.qkv_proj`), with R the sum of its parts' ranks:

- `FACTORED`, `y = s·(W0 x) + U·(Vᵀ x)`: `output_scales [rows]`, `u [rows, R]`, `v [columns, R]`;
- `REBUILT`, `x @ (s·W0 + U·Vᵀ)ᵀ`: `row_scales [rows, 1]`, `u [rows, R]`, `vt [R, columns]`.

Scales are float32, and so is the sum; the others have the graph's dtype. Without a correction there
are no `u` and `v`. The block lies once for all its layers, beside them and named after them
(`blocks.3-4-5.self_attn.qkv_proj`): `weight [rows, columns]`, or NVFP4's `codes`, `block_scales`
and `global_scales`.

So q, k and v (gate and up) take three matmuls where they would take nine. The price is U: it is
block-diagonal, a part's columns being 0 in the rows of the others, and so it is read `parts` times.
For Gemma 3 27B's q, k and v at rank 64 that is 2 MB more, of 90, and on a GPU of several TB/s less
than the time of a launch. A batched matmul would pad the parts to the same rows, and so read as
much, and transpose its input and its result.

Layers are compiled as subgraphs, which see no weight of the graph around them: the decoder passes
the blocks to each layer's call (`use_block`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.graph.weights import WeightData
from max.nn.layer import Module

from attnquant.kernels.ops import NVFP4Kernel, nvfp4_matmul
from attnquant.nvfp4.format import BLOCK_SIZE

BLOCKS = "blocks"
_BLOCK_TENSORS = ("weight", "codes", "block_scales", "global_scales")


def block_module(layers: Sequence[int], module: str) -> str:
    """Where the block of these layers lies, given the group's module in one of them."""
    _, _, below = module.split(".", 2)
    return f"{BLOCKS}.{'-'.join(map(str, layers))}.{below}"


class ThetaProjection(Module):
    """`y = x @ W_effᵀ` for the stacked rows of one fused group, from its bundle.

    Args:
        module: the group's path below the decoder.
        rows: the output rows of each part.
        tensors: the loaded tensors, by name.
        dtype: of the input and the output.
        device: where the bundle lies and the matmuls run.
    """

    def __init__(
        self,
        *,
        module: str,
        rows: Sequence[int],
        tensors: Mapping[str, WeightData],
        dtype: DType,
        device: DeviceRef,
    ) -> None:
        super().__init__()
        self.rows = tuple(rows)
        self._values: Sequence[TensorValue] = ()
        for name in ("output_scales", "row_scales", "u", "v", "vt"):
            found = tensors.get(f"{module}.{name}")
            weight = None if found is None else Weight(name, found.dtype, found.shape, device)
            setattr(self, name, weight)
        # The block's tensors. They belong to the decoder, not to this module.
        self.block: list[Weight] = []
        block = _block_of(module, tensors)
        for name in _BLOCK_TENSORS:
            if (found := tensors.get(f"{block}.{name}")) is None:
                continue
            kind = found.dtype
            if name == "block_scales":
                columns = int(found.shape[1]) * BLOCK_SIZE
                kind = NVFP4Kernel.of(device, dtype, sum(rows), columns).scale_dtype
            self.block.append(Weight(f"{block}.{name}", kind, found.shape, device))

    def use_block(self, values: Sequence[TensorValue]) -> None:
        """Says what `block` is in the graph that is being built."""
        self._values = values

    def __call__(self, x: TensorValue) -> TensorValue:
        """Projects `x [tokens, columns]` to `[tokens, sum(rows)]`."""
        if self.row_scales is not None:
            weight = ops.cast(self._values[0], DType.float32) * self.row_scales
            if self.u is not None:
                weight = weight + ops.cast(self.u @ self.vt, DType.float32)
            return x @ ops.cast(weight, x.dtype).T
        if len(self._values) == 1:
            shared = x @ self._values[0].T
        else:
            codes, block_scales, global_scales = self._values
            shared = nvfp4_matmul(x, codes, block_scales, global_scales, part_rows=self.rows)
        y = ops.cast(shared, DType.float32) * self.output_scales
        if self.u is not None:
            y = y + ops.cast((x @ self.v) @ self.u.T, DType.float32)
        return ops.cast(y, x.dtype)


def theta_projections(module: Module) -> Iterator[ThetaProjection]:
    """Those within a layer, in a fixed order."""
    if isinstance(module, ThetaProjection):
        yield module
    for below in module.sublayers.values():
        yield from theta_projections(below)


def use_blocks(layer: Module, blocks: Sequence[TensorValue]) -> None:
    """Deals a layer's blocks out to its projections, in the order of `theta_projections`."""
    remaining = iter(blocks)
    for projection in theta_projections(layer):
        projection.use_block([next(remaining) for _ in projection.block])


def _block_of(module: str, tensors: Mapping[str, WeightData]) -> str:
    """The block that a layer's group has, found by the layers in its name."""
    _, layer, below = module.split(".", 2)
    for name in tensors:
        if name.startswith(f"{BLOCKS}."):
            _, layers, path = name.split(".", 2)
            if path.rpartition(".")[0] == below and layer in layers.split("-"):
                return f"{BLOCKS}.{layers}.{below}"
    raise KeyError(f"{module} has no block")
