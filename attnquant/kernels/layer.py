"""Graph operation: a whole decoder layer on a CPU, for layers whose projections are all packed."""

from __future__ import annotations

from dataclasses import dataclass

from max.dtype import DType
from max.experimental import functional as F
from max.graph import TensorType, TensorValue, ops

from attnquant.config_values import Activation
from attnquant.kernels import extensions
from attnquant.kernels.attention import AttentionInputs
from attnquant.kernels.ops import NVFP4Kernel, say_once

# As in mojo/operands.mojo.
_ACTIVATIONS: dict[Activation, int] = {"gelu_pytorch_tanh": 2, "silu": 3}


@dataclass(frozen=True)
class PackedWeight:
    """The tensors of a packed projection: `nvfp4_matmul`'s.

    Attributes:
        codes: uint8 `[rows, columns / 2]`.
        block_scales: uint8 `[rows, columns / 16]`.
        global_scales: float32 `[parts]`.
    """

    codes: TensorValue
    block_scales: TensorValue
    global_scales: TensorValue


@dataclass(frozen=True)
class LayerGains:
    """Gains of a layer's norms, float32 `[hidden]`; they share what the heads' norms add.

    Attributes:
        before_attention: of the layer's input.
        after_attention: of what attention gives, before it is added; None where that is added as
            it is.
        before_mlp: of the sum.
        after_mlp: of what the feed-forward block gives; None as above.
    """

    before_attention: TensorValue
    after_attention: TensorValue | None
    before_mlp: TensorValue
    after_mlp: TensorValue | None


def cpu_layer(
    x: TensorValue,
    inputs: AttentionInputs,
    gains: LayerGains,
    projections: tuple[PackedWeight, ...],
    activation: Activation,
    factor: TensorValue | None,
) -> TensorValue:
    """A layer in one operation: what lies between a step's small parts costs as much as they do.

    Args:
        x: float32 `[tokens, hidden]`.
        inputs: what attention reads.
        gains: of the layer's norms.
        projections: fused queries, keys and values; attention's output; gate and up; down.
        activation: of the gate.
        factor: float32 `[1]`, of the layer's result; None is 1.

    Returns:
        float32 `[tokens, hidden]`.

    Raises:
        ValueError: the shapes or dtypes do not belong together, or it is not the CPU.
    """
    say_once(NVFP4Kernel.CPU)
    qkv, output, _, _ = projections
    heads = 2 * int(output.codes.shape[1]) // inputs.kv_params.head_dim
    parameters = inputs.parameters(heads, int(qkv.codes.shape[0]))
    one = ops.constant([1.0], DType.float32, device=x.device)
    after = (gains.after_attention, gains.after_mlp)
    if (after[0] is None) != (after[1] is None):
        raise ValueError("a layer has norms after both blocks, or after neither")
    values = inputs.operands(x)
    for weight in projections:
        values += [weight.codes, weight.block_scales, weight.global_scales]
    for gain in (gains.before_attention, after[0], gains.before_mlp, after[1], factor):
        values.append(one if gain is None else gain)
    (result,) = F.inplace_custom(
        "attnquant_layer",
        device=x.device,
        values=values,
        out_types=[TensorType(DType.float32, x.shape, x.device)],
        parameters=parameters
        | {"activation": _ACTIVATIONS[activation], "normed_after": int(after[0] is not None)},
        custom_extensions=extensions(),
    )
    return TensorValue(result)
