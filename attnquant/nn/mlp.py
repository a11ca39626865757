"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from max.graph import TensorValue, ops
from max.nn.layer import Module

from attnquant.config_values import Activation
from attnquant.nn.projection import GroupProjection

ACTIVATIONS: dict[Activation, Callable[[TensorValue], TensorValue]] = {
    "gelu_pytorch_tanh": partial(ops.gelu, approximate="tanh"),
    "silu": ops.silu,
}
"""By their names in Hugging Face configs."""


class GatedMLP(Module):
    """`down(activation(gate(x)) * up(x))`, gate and up in one matmul.

    Args:
        gate_up_proj: the fused projection; its parts are gate and up.
        down_proj: the output projection.
        activation: elementwise, on the gate.
    """

    def __init__(
        self,
        *,
        gate_up_proj: GroupProjection,
        down_proj: GroupProjection,
        activation: Activation,
    ) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.activation = activation

    def __call__(self, x: TensorValue) -> TensorValue:
        """Maps `[tokens, hidden]` to `[tokens, hidden]`."""
        gate, up = ops.split(self.gate_up_proj(x), self.gate_up_proj.rows, axis=-1)
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up)
