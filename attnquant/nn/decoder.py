"""A decoder layer with norms on both sides of each block, and the graph around the layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from max import tree
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorValue, Type, Weight, ops
from max.graph import Module as GraphModule
from max.nn.kv_cache import KVCacheInputsPerDevice, MultiKVCacheParams, PagedCacheValues
from max.nn.layer import LayerList, Module
from max.nn.norm import RMSNorm
from max.nn.transformer import ReturnLogits
from max.nn.transformer.transformer import forward_sequential_layers, logits_postprocess
from max.pipelines.lib.interfaces.batch_processor import ragged_batch_inputs
from numpy.typing import NDArray

from attnquant.nn.attention import Attention
from attnquant.nn.embedding import ScaledEmbedding
from attnquant.nn.mlp import GatedMLP
from attnquant.nn.tensors import State, from_numpy, numpy_dtype


class DecoderLayer(Module):
    """`x + post(attention(pre(x)))`, then `x + post(mlp(pre(x)))`.

    The attributes carry the names that the norms have in Gemma checkpoints.
    """

    def __init__(
        self,
        *,
        self_attn: Attention,
        mlp: GatedMLP,
        input_layernorm: RMSNorm,
        post_attention_layernorm: RMSNorm,
        pre_feedforward_layernorm: RMSNorm,
        post_feedforward_layernorm: RMSNorm,
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = input_layernorm
        self.post_attention_layernorm = post_attention_layernorm
        self.pre_feedforward_layernorm = pre_feedforward_layernorm
        self.post_feedforward_layernorm = post_feedforward_layernorm

    def __call__(
        self,
        x: TensorValue,
        kv: PagedCacheValues,
        row_offsets: TensorValue,
        freqs_cis: TensorValue,
        cache_layer: TensorValue,
    ) -> TensorValue:
        """Maps `[tokens, hidden]` to `[tokens, hidden]`; see `Attention` for the others."""
        attended = self.self_attn(self.input_layernorm(x), kv, row_offsets, freqs_cis, cache_layer)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class RaggedDecoder(Module):
    """Embedding, layers, norm and head over a ragged batch, with a hybrid KV cache.

    Args:
        embed_tokens: token ids to hidden states.
        layers: each layer, and its kind: the name of its cache and of its rotary table.
        norm: the final norm.
        lm_head: hidden states to logits, a `Projection` or a `TiedHead`.
        kv_params: the caches, by kind.
        ropes: the rotary tables (`rotary_table`), by kind.
        return_logits: the last token's, a variable number, or all.
        softcap: logits become `softcap · tanh(logits / softcap)`; None leaves them.
        device: where the graph runs.
    """

    def __init__(
        self,
        *,
        embed_tokens: ScaledEmbedding,
        layers: Sequence[tuple[DecoderLayer, str]],
        norm: RMSNorm,
        lm_head: Module,
        kv_params: MultiKVCacheParams,
        ropes: Mapping[str, NDArray[np.float32]],
        return_logits: ReturnLogits,
        softcap: float | None,
        device: DeviceRef,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = LayerList([layer for layer, _ in layers])
        self.norm = norm
        self.lm_head = lm_head
        self.kv_params = kv_params
        self.return_logits = return_logits
        self.softcap = softcap
        self.device = device
        self._ropes = {
            kind: Weight(f"rope.{kind}", embed_tokens.weight.dtype, table.shape, device)
            for kind, table in ropes.items()
        }
        self._tables = ropes
        for kind, weight in self._ropes.items():
            setattr(self, f"rope_{kind}", weight)
        self._kinds = [kind for _, kind in layers]

    def bind(self, weights: State) -> None:
        """Binds the checkpoint's weights, and the rotary tables beside them."""
        tables = {
            weight.name: from_numpy(
                self._tables[kind].astype(numpy_dtype(weight.dtype)), weight.dtype, weight.name
            )
            for kind, weight in self._ropes.items()
        }
        # Tensors in a checkpoint file are aligned to their element size at most.
        self.load_state_dict(weights | tables, weight_alignment=1)

    def input_tree(self) -> OrderedDict[str, object]:
        """The graph's inputs, named: its leaves, in order, are the buffer ABI.

        `batch`: tokens int64 `[total_seq_len]`, row_offsets uint32 `[batch + 1]`, return_n_logits
        int64 `[1]` on the host. `kv`: what MAX's cache manager passes.
        """
        return OrderedDict(
            batch=ragged_batch_inputs(self.device), kv=self.kv_params.get_symbolic_inputs()
        )

    def trace(
        self,
        *input_types: Type[Any],
        name: str | None = None,
        module: GraphModule | None = None,
        custom_extensions: Iterable[Path] = (),
        is_device_graph: bool = False,
    ) -> Graph:
        """Traces the graph whose inputs are `input_tree`'s leaves."""

        def forward(tokens: Any, row_offsets: Any, return_n_logits: Any, *kv: Any) -> Any:
            return self(
                tokens.tensor,
                row_offsets.tensor,
                return_n_logits.tensor,
                self.kv_params.unflatten_kv_inputs(iter(kv)),
            )

        return Graph(
            name or type(self).__qualname__,
            forward,
            input_types=input_types,
            custom_extensions=list(custom_extensions),
            module=module,
            is_device_graph=is_device_graph,
        )

    def __call__(
        self,
        tokens: TensorValue,
        row_offsets: TensorValue,
        return_n_logits: TensorValue,
        kv: Any,
    ) -> tuple[TensorValue, ...]:
        """Returns float32 logits `[batch, vocab]`; unless only the last token's are wanted, also
        the wanted logits `[rows, vocab]` and each sequence's offset among them."""
        caches = {kind: tree.leaves(kv[kind], leaf=KVCacheInputsPerDevice)[0] for kind in kv}
        x = self.embed_tokens(tokens)

        def inputs(index: int, hidden: list[TensorValue]) -> list[Any]:
            kind = self._kinds[index]
            cache_layer = self._kinds[:index].count(kind)
            host_index = ops.constant(cache_layer, DType.uint32, device=DeviceRef.CPU())
            table = TensorValue(self._ropes[kind])
            return [hidden[0], caches[kind], row_offsets, table, host_index]

        (x,) = forward_sequential_layers(
            list(self.layers),
            inputs_for_layer=inputs,
            initial_hidden_states=[x],
            subgraph_layer_groups=self._equal_layers(),
            name_for_subgraph=lambda group: f"layers_{group}",
            weight_prefix_for_layer=lambda index: f"layers.{index}.",
        )
        outputs: tuple[TensorValue, ...] = logits_postprocess(
            x, row_offsets, return_n_logits, self.norm, self._logits, self.return_logits
        )
        return outputs

    def _equal_layers(self) -> list[list[int]]:
        """Layers of the same kind whose weights have the same names, dtypes and shapes.

        The compiler sees each such group once, which is what keeps compilation short.
        """
        groups: dict[object, list[int]] = {}
        for index, (layer, kind) in enumerate(zip(self.layers, self._kinds, strict=True)):
            weights = layer.raw_state_dict()
            signature = tuple((name, w.dtype, tuple(w.shape)) for name, w in weights.items())
            groups.setdefault((kind, signature), []).append(index)
        return list(groups.values())

    def _logits(self, x: TensorValue) -> TensorValue:
        logits = ops.cast(self.lm_head(x), DType.float32)
        if self.softcap is None:
            return logits
        return ops.tanh(logits / self.softcap) * self.softcap
