"""Token embedding and output head."""

from __future__ import annotations

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.layer import Module


class ScaledEmbedding(Module):
    """Looks tokens up and scales them.

    Args:
        vocab: rows of the table.
        hidden: columns of the table.
        dtype: of the table and the result.
        device: where the table lies.
        scale: factor on every looked-up row, rounded to `dtype` first (as transformers does).
    """

    def __init__(
        self, *, vocab: int, hidden: int, dtype: DType, device: DeviceRef, scale: float
    ) -> None:
        super().__init__()
        self.weight = Weight("weight", dtype, (vocab, hidden), device)
        self.scale = scale

    def __call__(self, tokens: TensorValue) -> TensorValue:
        """Maps token ids `[tokens]` to `[tokens, hidden]`."""
        return ops.gather(self.weight, tokens, axis=0) * self.scale


class TiedHead(Module):
    """The output head that is the embedding table."""

    def __init__(self, embedding: ScaledEmbedding) -> None:
        super().__init__()
        self.set_shared_weight("weight", embedding.weight)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Maps `[rows, hidden]` to logits `[rows, vocab]`."""
        return x @ self.weight.T
