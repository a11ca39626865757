"""Token embedding and output head: the two readers of tables of `[vocab, hidden]`."""

from __future__ import annotations

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.layer import Module

from attnquant.checkpoint.nvfp4_layouts import LM_HEAD
from attnquant.checkpoint.verify import EMBEDDING
from attnquant.kernels.ops import bfloat16_matmul
from attnquant.nvfp4.format import BLOCK_SIZE
from attnquant.theta import Device

TABLES = (EMBEDDING, f"{LM_HEAD}.weight")
"""The tables' names in the graph."""


def table_dtype(stored: DType, dtype: DType, hidden: int, device: Device) -> DType:
    """The dtype of a table in the graph.

    A CPU that computes in float32 reads a bfloat16 table as it is stored, which is exact: half the
    bytes a token, and no copy. Elsewhere a table has the graph's dtype.

    Args:
        stored: the table's dtype in the checkpoint.
        dtype: the graph's.
        hidden: the table's columns.
        device: where the graph runs.
    """
    kept = device == "cpu" and (stored, dtype) == (DType.bfloat16, DType.float32)
    return stored if kept and not hidden % BLOCK_SIZE else dtype


class ScaledEmbedding(Module):
    """Looks tokens up and scales them.

    Args:
        vocab: rows of the table.
        hidden: columns of the table.
        table: dtype of the table.
        dtype: of the result.
        device: where the table lies.
        scale: factor on every looked-up row, rounded to `dtype` first (as transformers does).
    """

    def __init__(
        self,
        *,
        vocab: int,
        hidden: int,
        table: DType,
        dtype: DType,
        device: DeviceRef,
        scale: float,
    ) -> None:
        super().__init__()
        self.weight = Weight("weight", table, (vocab, hidden), device)
        self.dtype = dtype
        self.scale = scale

    def __call__(self, tokens: TensorValue) -> TensorValue:
        """Maps token ids `[tokens]` to `[tokens, hidden]`."""
        return ops.cast(ops.gather(self.weight, tokens, axis=0), self.dtype) * self.scale


class Head(Module):
    """The output head, unquantized.

    Args:
        vocab: rows of its table.
        hidden: columns of its table.
        table: dtype of its table.
        device: where the table lies.
    """

    def __init__(self, *, vocab: int, hidden: int, table: DType, device: DeviceRef) -> None:
        super().__init__()
        self.weight = Weight("weight", table, (vocab, hidden), device)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Maps `[rows, hidden]` to logits `[rows, vocab]`."""
        return _logits(x, self.weight)


class TiedHead(Module):
    """The output head that is the embedding table."""

    def __init__(self, embedding: ScaledEmbedding) -> None:
        super().__init__()
        self.set_shared_weight("weight", embedding.weight)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Maps `[rows, hidden]` to logits `[rows, vocab]`."""
        return _logits(x, self.weight)


def _logits(x: TensorValue, table: Weight) -> TensorValue:
    return x @ table.T if table.dtype == x.dtype else bfloat16_matmul(x, TensorValue(table))
