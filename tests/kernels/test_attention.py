"""`cpu_attention` against float64, and against the operations that a GPU's graph is made of.

The second comparison is those operations' twin: on the CPU, where they run too, no graph of ours
calls them any more.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attnquant.nn.rotary import rotary_table
from bench.attention import EPS, MAX, OURS, Layer
from tests.kernels.cached import CachedGraph

POSITIONS, VALUE_EPS = 1024, 1e-5
TOLERANCE = 2e-5

# New tokens of three sequences, step by step: prompts on both sides of every window and of a page,
# one token each, some more, one again.
STEPS = ((3, 130, 700), (1, 1, 1), (4, 1, 9), (1, 1, 1))


# The second of two that share a cache.
layer = partial(Layer, cached_layers=2)
CASES = {
    "gemma3": layer(heads=4, kv_heads=1, head_dim=256, window=512, gain_offset=1.0),
    "full": layer(heads=4, kv_heads=1, head_dim=256, gain_offset=1.0),
    "shared values": layer(
        heads=8, kv_heads=2, head_dim=512, has_values=False, value_eps=VALUE_EPS, window=256
    ),
    "own values": layer(heads=2, kv_heads=2, head_dim=64, value_eps=VALUE_EPS, window=128),
    "small window": layer(heads=6, kv_heads=2, head_dim=32, window=16),
    "window of one": layer(heads=3, kv_heads=3, head_dim=16, window=1),
    "many heads": layer(heads=40, kv_heads=1, head_dim=128, window=200),
}
GAINS = {"query": 1.3, "key": 0.7}


TABLES = {
    case.head_dim: rotary_table(theta=1e4, head_dim=case.head_dim, positions=POSITIONS)
    for case in CASES.values()
}


@dataclass
class Reference:
    """One sequence, in float64."""

    case: Layer
    gains: dict[str, NDArray[np.float32]]
    keys: list[NDArray[np.float64]] = field(default_factory=list)
    values: list[NDArray[np.float64]] = field(default_factory=list)

    def see(self, projected: NDArray[np.float32]) -> NDArray[np.float64]:
        case = self.case
        parts = np.split(projected.astype(np.float64), np.cumsum(case.rows)[:-1], axis=-1)
        q, k, *v = (part.reshape(len(projected), -1, case.head_dim) for part in parts)
        value = v[0] if case.has_values else k
        if case.value_eps is not None:
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
        x = x * (self.gains[kind].astype(np.float64) + self.case.gain_offset)
        table = TABLES[self.case.head_dim][first : first + len(x), None].astype(np.float64)
        cosine, sine = table[..., 0::2], table[..., 1::2]
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def gains(case: Layer) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(case.head_dim)
    return {
        kind: (size * rng.uniform(0.5, 3.0, case.head_dim)).astype(np.float32)
        for kind, size in GAINS.items()
    }


def projections(case: Layer) -> list[list[NDArray[np.float32]]]:
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


def runner_of(case: Layer, *, ours: bool) -> CachedGraph:
    """MAX's operations or ours."""
    graph = case.graph(OURS if ours else MAX, POSITIONS)
    return CachedGraph(case.kv_params, graph, sequences=len(STEPS[0]), positions=POSITIONS)


def run(case: Layer, *, ours: bool) -> list[NDArray[Any]]:
    """What each step's tokens see."""
    runner = runner_of(case, ours=ours)
    found = []
    for index, new in enumerate(projections(case)):
        if index:
            runner.advance(STEPS[index])
        found.append(runner.step(new, TABLES[case.head_dim], *gains(case).values()))
    return found


def assert_float64(case: Layer, found: list[NDArray[Any]]) -> None:
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
        inputs = (TABLES[case.head_dim], *gains(case).values())
        alone = runner_of(case, ours=True).step([prompt], *inputs)
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
    case = dataclasses.replace(layer(heads=6, kv_heads=2, head_dim=32), **change)
    with pytest.raises(ValueError, match=words):
        case.graph(OURS, POSITIONS, width)
