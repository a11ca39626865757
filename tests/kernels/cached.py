"""Graphs over a KV cache on the CPU, run step by step."""

from __future__ import annotations

import numpy as np
from max import tree
from max.driver import CPU, Buffer
from max.engine import InferenceSession
from max.graph import Graph
from max.nn.kv_cache import MHAKVCacheParams
from max.pipelines.context import TextContext
from max.pipelines.context.tokens import TokenBuffer
from max.pipelines.kv_cache.registry import load_kv_manager
from numpy.typing import NDArray

Array = NDArray[np.float32]


class CachedGraph:
    """A compiled graph, and a cache for a few sequences.

    Args:
        params: of the cache.
        graph: from rows of new tokens, where each sequence begins in them, other inputs, and the
            cache's, to as many rows.
        sequences: at most.
        positions: of each, at most.
    """

    def __init__(
        self, params: MHAKVCacheParams, graph: Graph, *, sequences: int, positions: int
    ) -> None:
        session = InferenceSession(devices=[CPU()])
        self._positions = positions
        self._cache = load_kv_manager(
            params=params,
            max_batch_size=sequences,
            max_seq_len=positions,
            session=session,
            available_cache_memory=40 * params.bytes_per_block,
            is_di_enabled=False,
            model_name="cached",
            max_num_input_tokens=None,
        )
        self._model = session.load(graph)
        self._contexts: list[TextContext] = []

    def step(self, new: list[Array], *others: NDArray[np.generic]) -> Array:
        """What becomes of the new tokens' rows, sequence after sequence."""
        if not self._contexts:
            for rows in new:
                tokens = TokenBuffer(np.zeros(len(rows), np.int64))
                self._contexts.append(TextContext(max_length=self._positions, tokens=tokens))
                self._cache.claim(self._contexts[-1], replica_idx=0)
        for context in self._contexts:
            self._cache.alloc(context).synchronize()
        offsets = np.cumsum([0, *map(len, new)], dtype=np.uint32)
        kv = tree.leaves(self._cache.runtime_inputs([self._contexts]))
        inputs = (np.concatenate(new), offsets, *others)
        (result,) = self._model.execute(*map(Buffer.from_numpy, inputs), *kv)
        return np.array(result.to_numpy())

    def advance(self, counts: tuple[int, ...]) -> None:
        """Makes so many new tokens of each sequence active, behind those that were."""
        for context, count in zip(self._contexts, counts, strict=True):
            for _ in range(count):
                context.update(0)
            self._cache.step(context)
            context.tokens.rewind_processing(count - 1)
