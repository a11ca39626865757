"""Gemma 4's drafter: a few layers that guess the tokens after the next one.

One row of it stands for a token that the target has just chosen. Its input is that token's
embedding, the target's own, beside the hidden state that the target chose it from; its layers have
queries only, and look into the target's cache up to the token before. What it gives is logits for
the token after, and a hidden state that takes the target's place when it guesses on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.graph.weights import WeightData, Weights
from max.nn.kv_cache import PagedCacheValues
from max.nn.layer import LayerList, Module
from max.nn.norm import RMSNorm
from max.nn.transformer import ReturnLogits
from max.nn.transformer.transformer import logits_postprocess
from max.pipelines.lib import PipelineConfig
from typing_extensions import Self

from attnquant.config_values import Activation
from attnquant.drafter_shapes import DrafterShapes
from attnquant.errors import UnsupportedError
from attnquant.gemma4.model_config import Gemma4Config
from attnquant.nn import DecoderLayer, GatedMLP, Projection, RaggedDecoder, Storage
from attnquant.nn.attention import QueryAttention
from attnquant.nn.config import text_config
from attnquant.nn.embedding import Head
from attnquant.nn.mlp import ACTIVATIONS
from attnquant.nn.tensors import State, from_numpy, numpy_dtype, to_numpy

DRAFT = "draft."
"""What stands before the names of the drafter's weights."""

_GATE, _UP, _STACKED = "gate_proj.", "up_proj.", "gate_up_proj."


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """What the drafter is built from, beside its target.

    Attributes:
        shapes: its sizes.
        rms_norm_eps: added to the mean square.
        hidden_activation: as its config.json names it.
    """

    shapes: DrafterShapes
    rms_norm_eps: float
    hidden_activation: Activation

    @classmethod
    def initialize(cls, pipeline_config: PipelineConfig) -> Self:
        """Reads the drafter that MAX was given beside the target.

        Raises:
            CheckpointError, UnsupportedError: as `DrafterShapes.from_config`.
        """
        draft, target = pipeline_config.draft_model, pipeline_config.model
        assert draft is not None
        return cls.from_huggingface(draft.huggingface_config, target.huggingface_config)

    @classmethod
    def from_huggingface(cls, config: Any, target: Any) -> Self:
        """Reads the drafter's Hugging Face config, and compares it with the target's.

        Raises:
            CheckpointError, UnsupportedError: as `DrafterShapes.from_config`.
        """
        text = text_config(config)
        if text.hidden_activation not in ACTIVATIONS:
            raise UnsupportedError(
                f"the drafter's config.json: hidden_activation is {text.hidden_activation!r}, "
                f"expected one of {', '.join(ACTIVATIONS)}"
            )
        return cls(
            shapes=DrafterShapes.from_config(config.to_dict(), target.to_dict()),
            rms_norm_eps=text.rms_norm_eps,
            hidden_activation=text.hidden_activation,
        )


class Drafter(Module):
    """The drafter of a target on the same device.

    Args:
        config: its configuration.
        target_config: the target's.
        target: the target, whose embedding and rotary tables it shares.
    """

    def __init__(
        self, config: DrafterConfig, target_config: Gemma4Config, target: RaggedDecoder
    ) -> None:
        super().__init__()
        shapes, (device,) = config.shapes, target_config.devices
        dtype = target_config.dtype

        def projection(role: str, rows: int, columns: int) -> Projection:
            return Projection(
                roles=(role,),
                rows=(rows,),
                columns=columns,
                dtype=dtype,
                device=device,
                storage=Storage.STACKED,
            )

        def norm(width: int) -> RMSNorm:
            return RMSNorm(
                width,
                dtype=dtype,
                eps=config.rms_norm_eps,
                weight_offset=target_config.norm_offset,
            )

        def layer(kind: Any) -> DecoderLayer:
            hidden, queries = shapes.hidden, shapes.heads * shapes.head_dims[kind]
            return DecoderLayer(
                self_attn=QueryAttention(
                    q_proj=projection("q_proj", queries, hidden),
                    o_proj=projection("o_proj", hidden, queries),
                    q_norm=norm(shapes.head_dims[kind]),
                    kv_params=target_config.kv_params.children[kind],
                    scale=target_config.attention_scale,
                    window=target_config.window if kind == "sliding_attention" else None,
                ),
                mlp=GatedMLP(
                    gate_up_proj=Projection(
                        roles=("gate_proj", "up_proj"),
                        rows=(shapes.inner, shapes.inner),
                        columns=hidden,
                        dtype=dtype,
                        device=device,
                        storage=Storage.STACKED,
                    ),
                    down_proj=projection("down_proj", hidden, shapes.inner),
                    activation=config.hidden_activation,
                ),
                input_layernorm=norm(hidden),
                post_attention_layernorm=norm(hidden),
                pre_feedforward_layernorm=norm(hidden),
                post_feedforward_layernorm=norm(hidden),
                layer_scalar=Weight("layer_scalar", dtype, (1,), device),
            )

        self.pre_projection = projection("pre_projection", shapes.hidden, 2 * shapes.backbone)
        self.layers = LayerList([layer(kind) for kind in shapes.layers])
        self.norm = norm(shapes.hidden)
        self.lm_head = Head(vocab=shapes.vocab, hidden=shapes.hidden, table=dtype, device=device)
        self.post_projection = projection("post_projection", shapes.backbone, shapes.hidden)
        self._kinds = shapes.layers
        # In a list, so that its weights are not this module's too.
        self._target = [target]

    def __call__(
        self,
        tokens: TensorValue,
        hidden: TensorValue,
        kv: Mapping[str, PagedCacheValues],
        row_offsets: TensorValue,
    ) -> TensorValue:
        """Runs the layers.

        Args:
            tokens: int64 `[rows]`, the tokens that the rows stand for.
            hidden: `[rows, backbone]`, what each was chosen from.
            kv: the target's caches, by kind, with the lengths before the rows.
            row_offsets: uint32 `[batch + 1]`, where each sequence begins in the rows.

        Returns:
            `[rows, hidden]`, after the norm; see `logits` and `post_projection`.
        """
        (target,) = self._target
        x = self.pre_projection(ops.concat([target.embed_tokens(tokens), hidden], axis=-1))
        for kind, layer in zip(self._kinds, self.layers, strict=True):
            index = ops.constant(target.last_of_kind(kind), DType.uint32, device=DeviceRef.CPU())
            x = layer(x, kv[kind], row_offsets, target.rope(kind), index)
        normalised: TensorValue = self.norm(x)
        return normalised

    def logits(self, x: TensorValue) -> TensorValue:
        """float32 logits `[rows, vocab]` for the token after each row's."""
        return ops.cast(self.lm_head(x), DType.float32)

    def last_logits(
        self, x: TensorValue, row_offsets: TensorValue, return_n_logits: TensorValue
    ) -> TensorValue:
        """Those of each sequence's last rows only, `[batch * return_n_logits, vocab]`."""
        logits: TensorValue = logits_postprocess(
            x, row_offsets, return_n_logits, lambda rows: rows, self.logits, ReturnLogits.VARIABLE
        )[1]
        return logits


def drafter_weights(tensors: Mapping[str, Weights], shapes: DrafterShapes, dtype: DType) -> State:
    """A drafter's checkpoint to the weights that `Drafter` binds, by name.

    Args:
        tensors: the checkpoint's, by their names there.
        shapes: what they must be.
        dtype: the graph's; tensors of another one are converted.

    Raises:
        CheckpointError: as `DrafterShapes.check`.
    """
    data = {name: weights.data() for name, weights in tensors.items()}
    shapes.check({name: tuple(map(int, tensor.shape)) for name, tensor in data.items()})
    arrays = {name.removeprefix("model."): to_numpy(tensor) for name, tensor in data.items()}
    embedding = arrays.pop("embed_tokens.weight")
    arrays.setdefault("lm_head.weight", embedding)
    for gate in [name for name in arrays if f".{_GATE}" in name]:
        parts = [arrays.pop(gate), arrays.pop(gate.replace(_GATE, _UP))]
        arrays[gate.replace(_GATE, _STACKED)] = np.concatenate(parts)
    return {name: _tensor(array, dtype, name) for name, array in arrays.items()}


def _tensor(array: Any, dtype: DType, name: str) -> WeightData:
    return from_numpy(array.astype(numpy_dtype(dtype), copy=False), dtype, name)
