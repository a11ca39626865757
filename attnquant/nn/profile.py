"""Profiles a decoder: runs random tokens through it, one layer at a time, and listens.

The layers are those that serve (`build_layer`), in graphs whose weights are inputs: one graph
serves all layers of equal shapes, and only one layer's weights are in memory. A listener stands
before each fused projection. Where a sequence is no longer than the window, a sliding layer is a
full one, and both are one graph too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from max import tree
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.nn.kv_cache import KVCacheInputsPerDevice
from max.nn.kv_cache.cache_params import MHAKVCacheParams
from max.pipelines.context import TextContext
from max.pipelines.context.tokens import TokenBuffer
from max.pipelines.kv_cache.registry import load_kv_manager
from numpy.typing import NDArray
from tqdm import tqdm

from attnquant.nn.build import build_layer, layer_rope
from attnquant.nn.config import DecoderConfig
from attnquant.nn.layer import DecoderLayer
from attnquant.nn.projection import GroupProjection
from attnquant.nn.tensors import State, from_numpy, numpy_dtype
from attnquant.nvfp4.profile import SEED, SEQUENCE_TOKENS, Profile, random_tokens
from attnquant.projections import fused_groups, group_module

Floats = NDArray[Any]

# A sequence, and what the manager keeps for itself.
_CACHE_PAGES = 8


class Listener:
    """Stands before a projection, and keeps what the graph says of its input."""

    def __init__(self, projection: GroupProjection) -> None:
        self.rows = projection.rows
        self._projection = projection
        self.heard: list[TensorValue] = []

    def __call__(self, x: TensorValue) -> TensorValue:
        """Projects `x [tokens, columns]`; hears the squares' sum and the magnitudes' maximum over
        all tokens but the first, each float32 `[1, columns]`."""
        rest = ops.cast(x[1:], DType.float32)
        self.heard = [ops.sum(rest * rest, axis=0), ops.max(ops.abs(rest), axis=0)]
        return self._projection(x)


def profile_decoder(
    config: DecoderConfig,
    layer_weights: Callable[[int], State],
    embeddings: Callable[[NDArray[np.int64]], Floats],
    *,
    tokens: int,
    device: Device,
    seed: int = SEED,
) -> Profile:
    """Profiles a decoder's projections.

    Args:
        config: the decoder's configuration.
        layer_weights: a layer's tensors, by their names below the layer, each fused group stacked
            and dense, in `config.dtype`.
        embeddings: token ids to what enters the first layer, `[tokens, hidden]` in `config.dtype`.
        tokens: how many random tokens, 2 or more.
        device: where to run.
        seed: of the random tokens.
    """
    sequences = random_tokens(tokens, config.shapes.vocab, seed)
    hidden = [_buffer(embeddings(ids), config.dtype, device) for ids in sequences]
    counted = sum(len(ids) - 1 for ids in sequences)
    session = InferenceSession(devices=[device])
    runners: dict[object, _LayerRunner] = {}
    squares: dict[str, NDArray[np.float32]] = {}
    largest: dict[str, float] = {}
    for index, layer in enumerate(
        tqdm(config.shapes.layers, desc="profile", unit="layer", disable=None)
    ):
        window = config.window if layer.kind == "sliding_attention" else None
        if window is not None and window >= min(tokens, SEQUENCE_TOKENS):
            window = None
        weights = layer_weights(index)
        key = (window, tuple(layer.projections.items()), tuple(layer.vectors.items()))
        if key not in runners:
            runners[key] = _LayerRunner(config, index, weights, window, session, device)
        table = layer_rope(config, layer, SEQUENCE_TOKENS)
        heard = runners[key].run(weights, table, hidden)
        groups = fused_groups(tuple(layer.projections))
        for roles, (sums, peak) in zip(groups, heard, strict=True):
            module = group_module(index, roles)
            squares[module] = (sums / counted).astype(np.float32)
            largest[module] = peak
        del weights  # before the next layer's are read
    return Profile(mean_squares=squares, largest=largest)


class _LayerRunner:
    """One compiled layer, for every layer of the same shapes."""

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        weights: State,
        window: int | None,
        session: InferenceSession,
        device: Device,
    ) -> None:
        (self._ref,) = config.devices
        layer = config.shapes.layers[index]
        self._dtype = config.dtype
        self._device = device
        self._names = sorted(weights)
        self._kv_params = MHAKVCacheParams(
            dtype=config.dtype,
            n_kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            num_layers=1,
            devices=[self._ref],
        )
        self._cache = load_kv_manager(
            params=self._kv_params,
            max_batch_size=1,
            max_seq_len=SEQUENCE_TOKENS,
            session=session,
            available_cache_memory=_CACHE_PAGES * self._kv_params.bytes_per_block,
            is_di_enabled=False,
            model_name="attnquant_profile",
            max_num_input_tokens=None,
        )
        prefixed = {f"layers.{index}.{name}": tensor for name, tensor in weights.items()}
        built = build_layer(config, index, prefixed, self._kv_params, window)
        self._model = session.load(self._graph(built, weights, layer.head_dim))

    def run(
        self, weights: State, table: NDArray[np.float32], hidden: list[Buffer]
    ) -> list[tuple[NDArray[np.float64], float]]:
        """Takes the hidden states of all sequences through a layer, in place.

        Returns:
            For each fused group, the sum of squares of each channel, and the largest magnitude.
        """
        held = [weights[name].to_buffer().to(self._device) for name in self._names]
        rope = _buffer(table.astype(numpy_dtype(self._dtype)), self._dtype, self._device)
        sums: list[Any] = []
        peaks: list[Any] = []
        for place, x in enumerate(hidden):
            length = int(x.shape[0])
            offsets = Buffer.from_numpy(np.array([0, length], np.uint32)).to(self._device)
            # The cache counts tokens; which ones they are does not matter to it.
            tokens = TokenBuffer(np.zeros(length, np.int64))
            context = TextContext(max_length=SEQUENCE_TOKENS, tokens=tokens)
            self._cache.claim(context, replica_idx=0)
            self._cache.alloc(context).synchronize()
            kv = tree.leaves(self._cache.runtime_inputs([[context]]))
            hidden[place], *heard = self._model.execute(x, offsets, rope, *kv, *held)
            values = [value.to_numpy()[0].astype(np.float64) for value in heard]
            self._cache.release(context)
            sums = (
                values[0::2]
                if not place
                else [a + b for a, b in zip(sums, values[0::2], strict=True)]
            )
            peaks.append([float(value.max()) for value in values[1::2]])
        return list(zip(sums, np.max(peaks, axis=0).tolist(), strict=True))

    def _graph(self, layer: DecoderLayer, weights: State, head_dim: int) -> Graph:
        kv_types = tree.leaves(self._kv_params.get_symbolic_inputs())
        hidden = int(weights["input_layernorm.weight"].shape[0])
        inputs = [
            TensorType(self._dtype, ("tokens", hidden), self._ref),
            TensorType(DType.uint32, (2,), self._ref),
            TensorType(self._dtype, (SEQUENCE_TOKENS, head_dim), self._ref),
            *kv_types,
            *(TensorType(self._dtype, weights[name].shape, self._ref) for name in self._names),
        ]
        with Graph("attnquant_profile_layer", input_types=inputs) as graph:
            x, row_offsets, table, *rest = graph.inputs
            kv = self._kv_params.unflatten_kv_inputs(iter(rest[: len(kv_types)]))
            for name, value in zip(self._names, rest[len(kv_types) :], strict=True):
                _put(layer, name, value.tensor)
            listeners = _listen(layer)
            out = layer(
                x.tensor,
                tree.leaves(kv, leaf=KVCacheInputsPerDevice)[0],
                row_offsets.tensor,
                table.tensor,
                ops.constant(0, DType.uint32, device=DeviceRef.CPU()),
            )
            graph.output(out, *(value for listener in listeners for value in listener.heard))
        return graph


def _put(layer: DecoderLayer, name: str, value: TensorValue) -> None:
    """Puts a graph's input where the layer has a weight."""
    *path, attribute = name.split(".")
    module: Any = layer
    for step in path:
        module = getattr(module, step)
    setattr(module, attribute, value)


def _listen(layer: DecoderLayer) -> list[Listener]:
    """Puts a listener before each fused projection; in the order of `fused_groups`."""
    listeners = []
    for block in (layer.self_attn, layer.mlp):
        for name, projection in list(vars(block).items()):
            if isinstance(projection, GroupProjection):
                listeners.append(Listener(projection))
                setattr(block, name, listeners[-1])
    return listeners


def _buffer(array: Floats, dtype: DType, device: Device) -> Buffer:
    return from_numpy(np.ascontiguousarray(array), dtype, "").to_buffer().to(device)
