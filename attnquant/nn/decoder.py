"""The graph around a decoder's layers."""

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
from max.nn.kv_cache import KVCacheInputsPerDevice, MultiKVCacheParams
from max.nn.layer import LayerList, Module
from max.nn.norm import RMSNorm
from max.nn.transformer import ReturnHiddenStates, ReturnLogits
from max.nn.transformer.transformer import forward_sequential_layers, logits_postprocess
from max.pipelines.lib.interfaces.batch_processor import ragged_batch_inputs, vision_merge_inputs
from max.pipelines.lib.vlm_utils import merge_multimodal_embeddings
from numpy.typing import NDArray

from attnquant.nn.embedding import TABLES, ScaledEmbedding
from attnquant.nn.layer import DecoderLayer
from attnquant.nn.tensors import State, from_numpy, numpy_dtype, viewed
from attnquant.nn.theta import theta_projections

# MAX asks for the dtype of a tower's output where it knows no more than config.json: one that holds
# the values of every dtype a tower may run in.
EMBEDDINGS_DTYPE = DType.float32

_SCALES, _INPUT_SCALE = ".block_scales", ".input_scale"


class RaggedDecoder(Module):
    """Embedding, layers, norm and head over a ragged batch, with a hybrid KV cache.

    Args:
        embed_tokens: token ids to hidden states.
        layers: each layer, and its kind: the name of its cache and of its rotary table.
        norm: the final norm.
        lm_head: hidden states to logits: a `Head`, a `TiedHead`, or a packed `Projection`.
        kv_params: the caches, by kind.
        ropes: the rotary tables (`rotary_table`), by kind.
        return_logits: the last token's, a variable number, or all.
        softcap: logits become `softcap · tanh(logits / softcap)`; None leaves them.
        device: where the graph runs.
        takes_embeddings: the graph has two more inputs, with which some tokens' embeddings are
            replaced by others, such as a vision tower's.
        return_hidden_states: which tokens' states are returned after the logits.

    Attributes:
        prefix: what stands before the names of its weights, where it is a part of another module.
    """

    prefix: str = ""

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
        takes_embeddings: bool = False,
        return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = LayerList([layer for layer, _ in layers])
        self.norm = norm
        self.lm_head = lm_head
        self.kv_params = kv_params
        self.return_logits = return_logits
        self.return_hidden_states = return_hidden_states
        self.softcap = softcap
        self.device = device
        self.takes_embeddings = takes_embeddings
        self._ropes = {
            kind: Weight(f"rope.{kind}", embed_tokens.dtype, table.shape, device)
            for kind, table in ropes.items()
        }
        self._tables = ropes
        for kind, weight in self._ropes.items():
            setattr(self, f"rope_{kind}", weight)
        self._kinds = [kind for _, kind in layers]
        # A shared block is one weight of the decoder, whichever layer it is met in first.
        self._blocks = {
            weight.name: weight
            for layer, _ in reversed(layers)
            for projection in theta_projections(layer)
            for weight in projection.block
        }
        for name, weight in self._blocks.items():
            setattr(self, name.replace(".", "_"), weight)

    def bind(self, weights: State) -> None:
        """Binds the checkpoint's weights, and the rotary tables beside them."""
        # Tensors in a checkpoint file are aligned to their element size at most.
        self.load_state_dict(self.bound(weights), weight_alignment=1)

    def bound(self, weights: State) -> State:
        """What `bind` binds, by name: what the graph reads of the checkpoint's weights, and the
        rotary tables."""
        tables = {
            weight.name: from_numpy(
                self._tables[kind].astype(numpy_dtype(weight.dtype)), weight.dtype, weight.name
            )
            for kind, weight in self._ropes.items()
        }
        declared = self.raw_state_dict()
        # The bytes of block scales are float8 to the graph where a kernel asks for it, and not
        # every kernel reads input scales.
        bound = {
            name: viewed(tensor, declared[name].dtype)
            if name in declared and name.endswith(_SCALES)
            else tensor
            for name, tensor in weights.items()
            if name in declared or not name.endswith(_INPUT_SCALE)
        }
        return bound | tables

    @property
    def calls_kernels(self) -> bool:
        """Whether the graph calls kernels of this package: on a CPU, on packed weights, or on a
        table whose dtype is not the graph's."""
        weights = self.raw_state_dict()
        tables = [weights[name].dtype for name in TABLES if name in weights]
        packed = any(name.endswith(".codes") for name in weights)
        as_stored = any(dtype != self.embed_tokens.dtype for dtype in tables)
        return self.device.is_cpu() or packed or as_stored

    def input_tree(self) -> OrderedDict[str, object]:
        """The graph's inputs, named: its leaves, in order, are the buffer ABI.

        `batch`: tokens int64 `[total_seq_len]`, row_offsets uint32 `[batch + 1]`, return_n_logits
        int64 `[1]` on the host. `vision`, if the graph takes embeddings: image_embeddings float32
        `[rows, hidden]` and image_token_indices int32 `[rows]`, the tokens that they replace; a
        batch without images has no rows. `kv`: what MAX's cache manager passes.
        """
        inputs: OrderedDict[str, object] = OrderedDict(batch=ragged_batch_inputs(self.device))
        if self.takes_embeddings:
            hidden = int(self.embed_tokens.weight.shape[1])
            inputs["vision"] = vision_merge_inputs(
                [self.device], EMBEDDINGS_DTYPE, hidden, rows_dim="image_tokens"
            )
        inputs["kv"] = self.kv_params.get_symbolic_inputs()
        return inputs

    def trace(
        self,
        *input_types: Type[Any],
        name: str | None = None,
        module: GraphModule | None = None,
        custom_extensions: Iterable[Path] = (),
        is_device_graph: bool = False,
    ) -> Graph:
        """Traces the graph whose inputs are `input_tree`'s leaves."""

        def forward(tokens: Any, row_offsets: Any, return_n_logits: Any, *rest: Any) -> Any:
            embeddings, kv = (rest[:2], rest[2:]) if self.takes_embeddings else ((), rest)
            return self(
                tokens.tensor,
                row_offsets.tensor,
                return_n_logits.tensor,
                self.kv_params.unflatten_kv_inputs(iter(kv)),
                *(value.tensor for value in embeddings),
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
        image_embeddings: TensorValue | None = None,
        image_token_indices: TensorValue | None = None,
    ) -> tuple[TensorValue, ...]:
        """Returns float32 logits `[batch, vocab]`; unless only the last token's are wanted, also
        the wanted logits `[rows, vocab]` and each sequence's offset among them; last, the hidden
        states `[rows, hidden]`, if any are wanted."""
        caches = {kind: tree.leaves(kv[kind], leaf=KVCacheInputsPerDevice)[0] for kind in kv}
        x = self.embed_tokens(tokens)
        if self.takes_embeddings:
            x = merge_multimodal_embeddings(x, image_embeddings, image_token_indices)

        def inputs(index: int, hidden: list[TensorValue]) -> list[Any]:
            kind = self._kinds[index]
            cache_layer = self._kinds[:index].count(kind)
            host_index = ops.constant(cache_layer, DType.uint32, device=DeviceRef.CPU())
            common = [hidden[0], caches[kind], row_offsets, self.rope(kind), host_index]
            blocks = [TensorValue(self._blocks[name]) for name in self._block_names(index)]
            return [*common, blocks] if blocks else common

        (x,) = forward_sequential_layers(
            list(self.layers),
            inputs_for_layer=inputs,
            initial_hidden_states=[x],
            subgraph_layer_groups=self._equal_layers(),
            name_for_subgraph=lambda group: f"layers_{group}",
            weight_prefix_for_layer=lambda index: f"{self.prefix}layers.{index}.",
        )
        outputs: tuple[TensorValue, ...] = logits_postprocess(
            x,
            row_offsets,
            return_n_logits,
            self.norm,
            self._logits,
            self.return_logits,
            self.return_hidden_states,
        )
        return outputs

    def rope(self, kind: str) -> TensorValue:
        """The rotary table of a kind of layer."""
        return TensorValue(self._ropes[kind])

    def last_of_kind(self, kind: str) -> int:
        """The index of the last layer of a kind, within the cache of that kind."""
        return self._kinds.count(kind) - 1

    def _equal_layers(self) -> list[list[int]]:
        """Layers of the same kind whose weights have the same names, dtypes and shapes.

        The compiler sees each such group once, which is what keeps compilation short.
        """
        groups: dict[object, list[int]] = {}
        for index, (layer, kind) in enumerate(zip(self.layers, self._kinds, strict=True)):
            weights = list(layer.raw_state_dict().items())
            # Which block does not matter, since it is an input.
            weights += [("", self._blocks[name]) for name in self._block_names(index)]
            signature = tuple((name, w.dtype, tuple(w.shape)) for name, w in weights)
            groups.setdefault((kind, signature), []).append(index)
        return list(groups.values())

    def _block_names(self, index: int) -> list[str]:
        """The shared blocks that a layer takes, as its call takes them."""
        projections = theta_projections(self.layers[index])
        return [
            # Binding gives the one that is the decoder's its full name.
            weight.name.removeprefix(self.prefix)
            for projection in projections
            for weight in projection.block
        ]

    def _logits(self, x: TensorValue) -> TensorValue:
        logits = ops.cast(self.lm_head(x), DType.float32)
        if self.softcap is None:
            return logits
        return ops.tanh(logits / self.softcap) * self.softcap
