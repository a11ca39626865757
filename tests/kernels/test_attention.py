"""`cpu_attention` against float64, and against the operations that a GPU's graph is made of.

The second comparison is those operations' twin: on the CPU, where they run too, no graph of ours
calls them any more.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
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
from numpy.typing import NDArray

from attnquant.kernels import extensions
from attnquant.kernels.attention import HeadNorms, cpu_attention
from attnquant.nn.attention import Attention
from attnquant.nn.projection import Projection, Storage
from attnquant.nn.rotary import rotary_table

CPU_REF = DeviceRef.CPU()
POSITIONS, EPS, VALUE_EPS, LAYERS = 1024, 1e-6, 1e-5, 2
TOLERANCE = 2e-5

# New tokens of three sequences, step by step: prompts on both sides of every window and of a page,
# one token each, some more, one again.
STEPS = ((3, 130, 700), (1, 1, 1), (4, 1, 9), (1, 1, 1))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Heads, a window, and what is done to values."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    has_values: bool = True
    norms_values: bool = False
    offset: float = 0.0

    @property
    def rows(self) -> tuple[int, ...]:
        kv = self.kv_heads * self.head_dim
        return (self.heads * self.head_dim, kv, *([kv] if self.has_values else []))

    @property
    def kv_params(self) -> MHAKVCacheParams:
        return MHAKVCacheParams(
            dtype=DType.float32,
            n_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_layers=LAYERS,
            devices=[CPU_REF],
        )

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def value_eps(self) -> float | None:
        return VALUE_EPS if self.norms_values else None


CASES = {
    "gemma3": Case(heads=4, kv_heads=1, head_dim=256, window=512, offset=1.0),
    "full": Case(heads=4, kv_heads=1, head_dim=256, offset=1.0),
    "shared values": Case(
        heads=8, kv_heads=2, head_dim=512, has_values=False, norms_values=True, window=256
    ),
    "own values": Case(heads=2, kv_heads=2, head_dim=64, norms_values=True, window=128),
    "small window": Case(heads=6, kv_heads=2, head_dim=32, window=16),
    "window of one": Case(heads=3, kv_heads=3, head_dim=16, window=1),
    "many heads": Case(heads=40, kv_heads=1, head_dim=128, window=200),
}
GAINS = {"query": 1.3, "key": 0.7}


def graph(case: Case, *, ours: bool, width: int | None = None) -> Graph:
    """A case's graph: our operation, or MAX's."""
    params = case.kv_params
    kv_types = tree.leaves(params.get_symbolic_inputs())
    types = [
        TensorType(DType.float32, ("tokens", width or sum(case.rows)), CPU_REF),
        TensorType(DType.uint32, ("offsets",), CPU_REF),
        TensorType(DType.float32, (POSITIONS, case.head_dim), CPU_REF),
        TensorType(DType.float32, (case.head_dim,), CPU_REF),
        TensorType(DType.float32, (case.head_dim,), CPU_REF),
    ]
    with Graph("see", input_types=[*types, *kv_types], custom_extensions=[extensions()]) as g:
        projected, offsets, table, query_gain, key_gain = (
            value.tensor for value in g.inputs[: len(types)]
        )
        kv = params.unflatten_kv_inputs(iter(g.inputs[len(types) :]))
        cache = tree.leaves(kv, leaf=KVCacheInputsPerDevice)[0]
        layer = ops.constant(LAYERS - 1, DType.uint32, device=CPU_REF)
        if ours:
            norms = HeadNorms(
                query_gain=query_gain,
                key_gain=key_gain,
                gain_offset=case.offset,
                eps=EPS,
                value_eps=case.value_eps,
            )
            seen = cpu_attention(
                projected,
                params,
                cache,
                offsets,
                table,
                layer,
                heads=case.heads,
                norms=norms,
                scale=case.scale,
                window=case.window,
            )
        else:
            module = attention(case)
            module.q_norm.weight, module.k_norm.weight = query_gain, key_gain
            seen = module.see(projected, cache, offsets, table, layer)
        g.output(seen)
    return g


class Runner:
    """A case's graph, and a cache; MAX's operations or ours."""

    def __init__(self, case: Case, *, ours: bool) -> None:
        self.case = case
        params = case.kv_params
        session = InferenceSession(devices=[CPU()])
        self._cache = load_kv_manager(
            params=params,
            max_batch_size=len(STEPS[0]),
            max_seq_len=POSITIONS,
            session=session,
            available_cache_memory=40 * params.bytes_per_block,
            is_di_enabled=False,
            model_name="attention",
            max_num_input_tokens=None,
        )
        self._model = session.load(graph(case, ours=ours))
        self._contexts: list[TextContext] = []

    def step(
        self, new: list[NDArray[np.float32]], gains: dict[str, NDArray[np.float32]]
    ) -> NDArray[np.float32]:
        """What the new tokens of each sequence see, from their projections."""
        if not self._contexts:
            for rows in new:
                tokens = TokenBuffer(np.zeros(len(rows), np.int64))
                self._contexts.append(TextContext(max_length=POSITIONS, tokens=tokens))
                self._cache.claim(self._contexts[-1], replica_idx=0)
        for context in self._contexts:
            self._cache.alloc(context).synchronize()
        offsets = np.cumsum([0, *map(len, new)], dtype=np.uint32)
        kv = tree.leaves(self._cache.runtime_inputs([self._contexts]))
        inputs = (np.concatenate(new), offsets, TABLES[self.case.head_dim], *gains.values())
        (seen,) = self._model.execute(*map(Buffer.from_numpy, inputs), *kv)
        return np.array(seen.to_numpy())

    def advance(self, counts: tuple[int, ...]) -> None:
        """Makes so many new tokens of each sequence active, behind those that were."""
        for context, count in zip(self._contexts, counts, strict=True):
            for _ in range(count):
                context.update(0)
            self._cache.step(context)
            context.tokens.rewind_processing(count - 1)


TABLES = {
    case.head_dim: rotary_table(theta=1e4, head_dim=case.head_dim, positions=POSITIONS)
    for case in CASES.values()
}


def attention(case: Case) -> Attention:
    def projection(*rows: int) -> Projection:
        return Projection(
            roles=["part"] * len(rows),
            rows=rows,
            columns=16,
            dtype=DType.float32,
            device=CPU_REF,
            storage=Storage.STACKED,
        )

    def norm() -> RMSNorm:
        return RMSNorm(case.head_dim, DType.float32, EPS, weight_offset=case.offset)

    return Attention(
        qkv_proj=projection(*case.rows),
        o_proj=projection(16),
        q_norm=norm(),
        k_norm=norm(),
        kv_params=case.kv_params,
        scale=case.scale,
        window=case.window,
        value_eps=case.value_eps,
    )


@dataclass
class Reference:
    """One sequence, in float64."""

    case: Case
    gains: dict[str, NDArray[np.float32]]
    keys: list[NDArray[np.float64]] = field(default_factory=list)
    values: list[NDArray[np.float64]] = field(default_factory=list)

    def see(self, projected: NDArray[np.float32]) -> NDArray[np.float64]:
        case = self.case
        parts = np.split(projected.astype(np.float64), np.cumsum(case.rows)[:-1], axis=-1)
        q, k, *v = (part.reshape(len(projected), -1, case.head_dim) for part in parts)
        value = v[0] if case.has_values else k
        if case.norms_values:
            value = value / np.sqrt(np.mean(value**2, axis=-1, keepdims=True) + VALUE_EPS)
        first = len(self.keys)
        self.keys += list(self._rotated(k, "key", first))
        self.values += list(value)
        rows = []
        for index, queries in enumerate(self._rotated(q, "query", first)):
            last = first + index + 1
            start = max(0, last - case.window) if case.window else 0
            group = case.heads // case.kv_heads
            keys = np.repeat(np.stack(self.keys[start:last]), group, axis=1)
            values = np.repeat(np.stack(self.values[start:last]), group, axis=1)
            scores = np.einsum("hd,khd->hk", queries, keys) * case.scale
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            rows.append(np.einsum("hk,khd->hd", weights, values).reshape(-1))
        return np.stack(rows)

    def _rotated(self, x: NDArray[np.float64], kind: str, first: int) -> NDArray[np.float64]:
        x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS)
        x = x * (self.gains[kind].astype(np.float64) + self.case.offset)
        table = TABLES[self.case.head_dim][first : first + len(x), None].astype(np.float64)
        cosine, sine = table[..., 0::2], table[..., 1::2]
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def gains(case: Case) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(case.head_dim)
    return {
        kind: (size * rng.uniform(0.5, 3.0, case.head_dim)).astype(np.float32)
        for kind, size in GAINS.items()
    }


def projections(case: Case) -> list[list[NDArray[np.float32]]]:
    rng = np.random.default_rng(case.heads)
    # Queries, keys and values of different magnitude.
    factors = np.repeat([0.5, 3.0, 20.0][: len(case.rows)], case.rows)
    return [
        [
            (rng.standard_normal((count, sum(case.rows))) * factors).astype(np.float32)
            for count in counts
        ]
        for counts in STEPS
    ]


def run(case: Case, *, ours: bool) -> list[NDArray[Any]]:
    """What each step's tokens see."""
    runner = Runner(case, ours=ours)
    found = []
    for index, new in enumerate(projections(case)):
        if index:
            runner.advance(STEPS[index])
        found.append(runner.step(new, gains(case)))
    return found


def assert_float64(case: Case, found: list[NDArray[Any]]) -> None:
    references = [Reference(case, gains(case)) for _ in STEPS[0]]
    for new, seen in zip(projections(case), found, strict=True):
        expected = np.concatenate(
            [reference.see(x) for reference, x in zip(references, new, strict=True)]
        )
        assert np.abs(seen - expected).max() < TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str) -> None:
    assert_float64(CASES[name], run(CASES[name], ours=True))


# MAX's attention takes long to compile, so two cases stand for all: with values, and without.
@pytest.mark.parametrize("name", ["gemma3", "shared values"])
def test_the_operations_of_a_gpus_graph_equal_float64(name: str) -> None:
    assert_float64(CASES[name], run(CASES[name], ours=False))


def test_a_sequence_sees_the_same_alone() -> None:
    """To the last bit: how its keys are cut depends on nothing else."""
    case = CASES["gemma3"]
    (prompts, *_), together = projections(case), run(case, ours=True)
    ends = np.cumsum([0, *STEPS[0]])
    for index, prompt in enumerate(prompts):
        alone = Runner(case, ours=True).step([prompt], gains(case))
        assert np.array_equal(alone, together[0][ends[index] : ends[index + 1]])


@pytest.mark.parametrize(
    ("change", "width", "words"),
    [
        ({"heads": 5}, None, "5 heads over 2"),
        ({"head_dim": 24}, None, "a multiple of 16"),
        ({}, 330, "a width of one of"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    change: dict[str, int], width: int | None, words: str
) -> None:
    case = dataclasses.replace(Case(heads=6, kv_heads=2, head_dim=32), **change)
    with pytest.raises(ValueError, match=words):
        graph(case, ours=True, width=width)
