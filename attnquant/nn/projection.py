"""The projection layer: one matmul for a fused group, however its weight is stored.

How a group is stored is read off the loaded tensors (`Storage.of`), so that the graph and the
weight adapter cannot disagree. Below the group's module path (`layers.3.self_attn.qkv_proj`):

- `STACKED`, `weight`: one array. A group of one, or what the adapter had to make anyway (a dtype
  conversion, a rebuilt theta bundle): a second concatenation would only keep a second copy.
- `NVFP4`, `codes`, `block_scales`, `global_scales`: packed (`attnquant.nvfp4.format`); besides,
  `input_scale`, which is read where the kernel quantizes activations too.
- `PARTS`, `<role>.weight`: the checkpoint's own memory; the graph concatenates the parts once,
  when the model is initialised, on the model's device.
- `SPLIT`, tensors below `<role>`: the coverage splits the group, and each role is a matmul of its
  own.
- `THETA`, `output_scales` or `row_scales`: a bundle in the graph (`attnquant.nn.theta`).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.graph.weights import WeightData
from max.nn.layer import Module

from attnquant.decoder_shapes import DecoderShapes
from attnquant.kernels.layer import PackedWeight
from attnquant.kernels.ops import NVFP4Kernel, nvfp4_matmul
from attnquant.nn.theta import ThetaProjection
from attnquant.nvfp4.format import BLOCK_SIZE
from attnquant.projections import Role, fused_groups, group_module


class Storage(enum.Enum):
    """How the weight of a group is stored."""

    STACKED = "stacked"
    NVFP4 = "nvfp4"
    PARTS = "parts"
    SPLIT = "split"
    THETA = "theta"

    @classmethod
    def of(cls, names: Collection[str], module: str, roles: Sequence[str]) -> Storage:
        """Reads the storage of the group at `module` off the tensors' names."""
        if f"{module}.codes" in names:
            return cls.NVFP4
        if f"{module}.output_scales" in names or f"{module}.row_scales" in names:
            return cls.THETA
        if f"{module}.weight" in names or len(roles) == 1:
            return cls.STACKED
        dense = all(f"{module}.{role}.weight" in names for role in roles)
        return cls.PARTS if dense else cls.SPLIT


class Projection(Module):
    """`y = x @ Wᵀ` for the stacked rows of one fused group.

    Args:
        roles: what the parts are called, in row order.
        rows: the output rows of each part; `W` is `[sum(rows), columns]`.
        columns: the input's width.
        dtype: of the input, the output and unquantized weights.
        device: where the weight lies and the matmul runs.
        storage: how the weight is stored.
    """

    def __init__(
        self,
        *,
        roles: Sequence[str],
        rows: Sequence[int],
        columns: int,
        dtype: DType,
        device: DeviceRef,
        storage: Storage,
    ) -> None:
        super().__init__()
        self.rows = tuple(rows)
        self.storage = storage
        total = sum(rows)
        match storage:
            case Storage.PARTS:
                self._parts = [
                    Weight(f"{role}.weight", dtype, (part, columns), device)
                    for role, part in zip(roles, rows, strict=True)
                ]
                for role, weight in zip(roles, self._parts, strict=True):
                    setattr(self, role, weight)
            case Storage.STACKED:
                self.weight = Weight("weight", dtype, (total, columns), device)
            case Storage.NVFP4:
                self.codes = Weight("codes", DType.uint8, (total, columns // 2), device)
                kernel = NVFP4Kernel.of(device, dtype, total, columns)
                self.block_scales = Weight(
                    "block_scales", kernel.scale_dtype, (total, columns // BLOCK_SIZE), device
                )
                self.global_scales = Weight("global_scales", DType.float32, (len(rows),), device)
                self.input_scale = (
                    Weight("input_scale", DType.float32, (1,), DeviceRef.CPU())
                    if kernel.quantizes_activations
                    else None
                )

    @property
    def packed(self) -> PackedWeight | None:
        """The tensors, where they are packed."""
        if self.storage is not Storage.NVFP4:
            return None
        return PackedWeight(*map(TensorValue, (self.codes, self.block_scales, self.global_scales)))

    def __call__(self, x: TensorValue) -> TensorValue:
        """Projects `x [tokens, columns]` to `[tokens, sum(rows)]`."""
        match self.storage:
            case Storage.PARTS:
                return x @ ops.concat(self._parts, axis=0).T
            case Storage.STACKED:
                return x @ self.weight.T
            case Storage.NVFP4:
                return nvfp4_matmul(
                    x,
                    self.codes,
                    self.block_scales,
                    self.global_scales,
                    part_rows=self.rows,
                    input_scale=self.input_scale,
                )


class SplitProjection(Module):
    """A group whose members are stored differently: the same rows, from one matmul each.

    Args:
        members: each role's projection, in row order.
    """

    def __init__(self, members: Mapping[Role, Projection | ThetaProjection]) -> None:
        super().__init__()
        self.rows = tuple(rows for member in members.values() for rows in member.rows)
        self._members = list(members.values())
        for role, member in members.items():
            setattr(self, role, member)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Projects `x [tokens, columns]` to `[tokens, sum(rows)]`."""
        return ops.concat([member(x) for member in self._members], axis=-1)


GroupProjection = Projection | SplitProjection | ThetaProjection


def layer_projections(
    shapes: DecoderShapes,
    layer: int,
    tensors: Mapping[str, WeightData],
    dtype: DType,
    device: DeviceRef,
) -> dict[str, GroupProjection]:
    """The projections of one layer, by the names of their modules (`qkv_proj`, `o_proj`, ...).

    Args:
        shapes: of the decoder.
        layer: its index.
        tensors: the loaded tensors, by name.
        dtype: of activations and unquantized weights.
        device: where the layer runs.
    """
    of_role = shapes.layers[layer].projections

    def fused(module: str, *roles: Role) -> Projection | ThetaProjection:
        rows = [of_role[role][0] for role in roles]
        storage = Storage.of(tensors, module, roles)
        if storage is Storage.THETA:
            return ThetaProjection(
                module=module, rows=rows, tensors=tensors, dtype=dtype, device=device
            )
        return Projection(
            roles=roles,
            rows=rows,
            columns=of_role[roles[0]][1],
            dtype=dtype,
            device=device,
            storage=storage,
        )

    projections: dict[str, GroupProjection] = {}
    for roles in fused_groups(tuple(of_role)):
        module = group_module(layer, roles)
        projections[module.rpartition(".")[2]] = (
            SplitProjection({role: fused(f"{module}.{role}", role) for role in roles})
            if Storage.of(tensors, module, roles) is Storage.SPLIT
            else fused(module, *roles)
        )
    return projections
