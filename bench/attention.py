"""How fast is attention on a CPU: MAX's operations and ours, for one layer.

From the fused projection of new tokens to what their queries see: norms per head, rotation, the
cache's update and attention. A prompt is that many new tokens in an empty cache; a step is one new
token behind so many. Both sides run the same layer, sliding or full, on the same cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from max import tree
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from max.nn.kv_cache import KVCacheInputsPerDevice, MHAKVCacheParams
from max.nn.norm import RMSNorm
from max.pipelines.context import TextContext
from max.pipelines.context.tokens import TokenBuffer
from max.pipelines.kv_cache.registry import load_kv_manager

from attnquant.kernels import extensions
from attnquant.nn.attention import Attention
from attnquant.nn.projection import Projection, Storage
from attnquant.nn.rotary import rotary_table
from bench.common import Run, Sample, alternate, ratio, show_ratio
from bench.kernel import repeated

MAX, OURS = "MAX", "attnquant"
HOST = DeviceRef.CPU()
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What attention in a layer is over."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    has_values: bool = True
    value_eps: float | None = None
    gain_offset: float = 0.0
    cached_layers: int = 1

    @property
    def rows(self) -> tuple[int, ...]:
        """Of the fused projection."""
        keys = self.kv_heads * self.head_dim
        return self.heads * self.head_dim, keys, *([keys] if self.has_values else [])

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.head_dim**-0.5

    @property
    def kv_params(self) -> MHAKVCacheParams:
        """Of its cache."""
        return MHAKVCacheParams(
            dtype=DType.float32,
            n_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_layers=self.cached_layers,
            devices=[HOST],
        )

    def module(self) -> Attention:
        """The layer, whose norms' gains are weights."""

        def projection(*rows: int) -> Projection:
            return Projection(
                roles=["rows"] * len(rows),
                rows=rows,
                columns=self.head_dim,
                dtype=DType.float32,
                device=HOST,
                storage=Storage.STACKED,
            )

        def norm() -> RMSNorm:
            return RMSNorm(self.head_dim, DType.float32, EPS, weight_offset=self.gain_offset)

        return Attention(
            qkv_proj=projection(*self.rows),
            o_proj=projection(self.head_dim),
            q_norm=norm(),
            k_norm=norm(),
            kv_params=self.kv_params,
            scale=self.scale,
            window=self.window,
            value_eps=self.value_eps,
        )

    def graph(self, side: str, positions: int, width: int | None = None) -> Graph:
        """From `[tokens, width]` to what its queries see, in the last layer of the cache.

        The inputs are the projection, where each sequence begins in it, the rotary table of so many
        positions, the gains of the norms of queries and of keys, and the cache.
        """
        kv_types = tree.leaves(self.kv_params.get_symbolic_inputs())
        types = [
            TensorType(DType.float32, ("tokens", width or sum(self.rows)), HOST),
            TensorType(DType.uint32, ("offsets",), HOST),
            TensorType(DType.float32, (positions, self.head_dim), HOST),
            TensorType(DType.float32, (self.head_dim,), HOST),
            TensorType(DType.float32, (self.head_dim,), HOST),
        ]
        with Graph(
            "attention", input_types=[*types, *kv_types], custom_extensions=[extensions()]
        ) as graph:
            values: list[Any] = [value.tensor for value in graph.inputs[: len(types)]]
            projected, offsets, table, *gains = values
            kv = self.kv_params.unflatten_kv_inputs(iter(graph.inputs[len(types) :]))
            module = self.module()
            module.q_norm.weight, module.k_norm.weight = gains
            see = module.see if side == MAX else module.see_on_cpu
            inputs = module.inputs(
                tree.leaves(kv, leaf=KVCacheInputsPerDevice)[0],
                offsets,
                table,
                ops.constant(self.cached_layers - 1, DType.uint32, device=HOST),
            )
            graph.output(see(projected, inputs))
        return graph


LAYERS = {
    "Gemma 3 270M, sliding": Layer(heads=4, kv_heads=1, head_dim=256, window=512, gain_offset=1.0),
    "Gemma 3 270M, full": Layer(heads=4, kv_heads=1, head_dim=256, gain_offset=1.0),
}


class Side:
    """A compiled layer with a cache of its own."""

    def __init__(self, layer: Layer, side: str, positions: int) -> None:
        self._layer, self._positions = layer, positions
        session = InferenceSession(devices=[CPU()])
        params = layer.kv_params
        pages = -(-positions // params.page_size) + 1
        self._cache = load_kv_manager(
            params=params,
            max_batch_size=1,
            max_seq_len=positions,
            session=session,
            available_cache_memory=pages * params.bytes_per_block,
            is_di_enabled=False,
            model_name="attention",
            max_num_input_tokens=None,
        )
        table = rotary_table(theta=1e4, head_dim=layer.head_dim, positions=positions)
        gain = np.ones(layer.head_dim, np.float32)
        self._held = [Buffer.from_numpy(array) for array in (table, gain, gain)]
        self._model = session.load(layer.graph(side, positions))

    def call(self, past: int, new: int) -> Callable[[], Any]:
        """A call of so many new tokens behind so many that the cache holds."""
        context = TextContext(
            max_length=self._positions, tokens=TokenBuffer(np.zeros(past + new, np.int64))
        )
        self._cache.claim(context, replica_idx=0)
        self._cache.alloc(context).synchronize()
        if past:
            context.tokens.skip_processing(past)
        kv = tree.leaves(self._cache.runtime_inputs([[context]]))
        x = np.random.default_rng(0).standard_normal((new, sum(self._layer.rows)), np.float32)
        offsets = Buffer.from_numpy(np.array([0, new], np.uint32))
        self._cache.release(context)
        return partial(self._model.execute, Buffer.from_numpy(x), offsets, *self._held, *kv)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run = Run("attention", __doc__, models=False)
    run.parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    run.parser.add_argument("--prompt", type=int, default=512)
    run.parser.add_argument("--rounds", type=int, default=7)
    options = run.parse(arguments)
    positions = max(*options.contexts, options.prompt) + 1

    rows: list[tuple[str, ...]] = [("layer", "", "MAX, ms", "attnquant, ms", "MAX / attnquant")]
    figures: dict[str, Any] = {}
    tasks = {f"prompt of {options.prompt}": (0, options.prompt)}
    tasks |= {f"one token after {past}": (past, 1) for past in options.contexts}
    for name, layer in LAYERS.items():
        sides = {side: Side(layer, side, positions) for side in (MAX, OURS)}
        figures[name] = {}
        for task, (past, new) in tasks.items():
            taken = alternate(
                {side: partial(repeated, made.call(past, new)) for side, made in sides.items()},
                options.rounds,
            )
            times = {side: Sample.of(values) for side, values in taken.items()}
            faster = ratio(times[MAX], times[OURS])
            figures[name][task] = {"seconds": times, "times_faster": faster}
            shown = [Sample.of([1e3 * t for t in time.values]).show(3) for time in times.values()]
            rows.append((name, task, *shown, show_ratio(faster)))
    run.report(rows, figures)


if __name__ == "__main__":
    main()
