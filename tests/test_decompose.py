"""Fidelity and size against blocks and rank; `pytest tests/test_decompose.py -s` prints the tables.

Size is the numbers that are stored over the numbers in the weights, so it is the ratio of bytes
when both have one dtype. Error is the relative Frobenius error of the effective weights.

Two decoders: one made to have what the decomposition looks for (layers that are multiples of each
other row by row, up to a part of low rank), and the real Gemma 3 270M. Sharing pays for the first
and not for the second: its layers have so little in common that bundles of half the size are off
by more than half of the weights' norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attnquant.checkpoint import Checkpoint
from attnquant.decoder_shapes import DecoderShapes
from attnquant.projections import ROLES, ProjectionKey, Role
from attnquant.theta import ThetaBundle, decompose_decoder, effective_weight, stored_bytes
from tests.tiny.stable_random import gaussian

Load = Callable[[ProjectionKey], NDArray[Any]]
Shapes = Mapping[ProjectionKey, tuple[int, int]]
Row = tuple[float, ...]

SYNTHETIC_ROLE: Role = "o_proj"
SYNTHETIC_SHAPES: Shapes = {
    ProjectionKey(layer=layer, role=SYNTHETIC_ROLE): (192, 128) for layer in range(8)
}
SYNTHETIC_RANK = 4


def truncated(bundle: ThetaBundle, rank: int) -> ThetaBundle:
    """Columns are in the order of their singular values: the first are the smaller rank's."""
    return replace(bundle, u=bundle.u[:, :rank], v=bundle.v[:, :rank])


def rows_of(
    shapes: Shapes, load: Load, blocks: int, ranks: Sequence[int]
) -> dict[tuple[int, int], Row]:
    """By `(blocks, rank)`: the size, the error of all weights, and that of each role."""
    made: dict[ProjectionKey, ThetaBundle] = {}
    for group in decompose_decoder(shapes, load, blocks=blocks, rank=max(ranks)):
        made |= group
    weights = {key: load(key).astype(np.float32) for key in shapes}
    roles = [role for role in ROLES if any(key.role == role for key in shapes)]
    rows = {}
    for rank in ranks:
        bundles = {key: truncated(bundle, rank) for key, bundle in made.items()}
        wrong, total = dict.fromkeys(roles, 0.0), dict.fromkeys(roles, 0.0)
        for key, bundle in bundles.items():
            difference = effective_weight(bundle, np.float32) - weights[key]
            wrong[key.role] += float(np.vdot(difference, difference))
            total[key.role] += float(np.vdot(weights[key], weights[key]))
        numbers = sum(weight.size for weight in weights.values())
        stored = stored_bytes(bundles.values()) / next(iter(bundles.values())).w0.itemsize
        all_roles = np.sqrt(sum(wrong.values()) / sum(total.values()))
        errors = [np.sqrt(wrong[role] / total[role]) for role in roles]
        rows[blocks, rank] = (stored / numbers, float(all_roles), *map(float, errors))
    return rows


def print_table(title: str, roles: Sequence[str], table: Mapping[tuple[int, int], Row]) -> None:
    print(f"\n{title}\nblocks  rank    size   error  " + "  ".join(f"{role:>9}" for role in roles))
    for (blocks, rank), (size, error, *by_role) in table.items():
        tail = "  ".join(f"{value:9.4f}" for value in by_role)
        print(f"{blocks:6}  {rank:4}  {size:6.3f}  {error:6.4f}  {tail}")


@pytest.fixture(scope="module")
def synthetic() -> dict[tuple[int, int], Row]:
    def load(key: ProjectionKey) -> NDArray[Any]:
        rows, columns = SYNTHETIC_SHAPES[key]
        shared = gaussian("shared", (rows, columns))
        scale = 1 + 0.5 * gaussian(f"scale {key.layer}", (rows, 1))
        left = gaussian(f"left {key.layer}", (rows, SYNTHETIC_RANK))
        right = gaussian(f"right {key.layer}", (SYNTHETIC_RANK, columns))
        noise = gaussian(f"noise {key.layer}", (rows, columns))
        return (scale * shared + 0.1 * left @ right + 0.01 * noise).astype(np.float32)

    table = {}
    for blocks in (8, 4, 2, 1):
        ranks = (0,) if blocks == 8 else (0, 4, 8, 16, 32)
        table |= rows_of(SYNTHETIC_SHAPES, load, blocks, ranks)
    print_table(
        f"layers that share a block, and differ by rank {SYNTHETIC_RANK}", [SYNTHETIC_ROLE], table
    )
    return table


@pytest.fixture(scope="module")
def demo(demo_directory: Path) -> dict[tuple[int, int], Row]:
    checkpoint = Checkpoint.open(demo_directory)
    shapes = DecoderShapes.from_config(checkpoint.config).projections

    def load(key: ProjectionKey) -> NDArray[Any]:
        return checkpoint.array(f"model.{key.module}.weight")

    table = rows_of(shapes, load, 18, (0,))
    for blocks in (9, 6):
        table |= rows_of(shapes, load, blocks, (0, 16, 32, 64))
    print_table("Gemma 3 270M", ROLES, table)
    return table


@pytest.fixture(params=["synthetic", "demo"])
def table(request: pytest.FixtureRequest) -> dict[tuple[int, int], Row]:
    found: dict[tuple[int, int], Row] = request.getfixturevalue(request.param)
    return found


def test_as_many_blocks_as_layers_is_exact(table: dict[tuple[int, int], Row]):
    size, *errors = table[max(blocks for blocks, _ in table), 0]
    assert size == 1
    assert set(errors) == {0}


def test_rank_buys_fidelity(table: dict[tuple[int, int], Row]):
    for (blocks, rank), row in table.items():
        higher = [other for (b, r), other in table.items() if b == blocks and r > rank]
        assert all(other[0] > row[0] for other in higher)
        assert all(
            better < worse
            for other in higher
            for better, worse in zip(other[1:], row[1:], strict=True)
        )


def test_fewer_blocks_cost_fidelity(demo: dict[tuple[int, int], Row]):
    for (blocks, rank), row in demo.items():
        coarser = [other for (b, r), other in demo.items() if b < blocks and r == rank]
        assert all(other[0] < row[0] and other[1] > row[1] for other in coarser)


def test_sharing_pays_where_layers_share(synthetic: dict[tuple[int, int], Row]):
    """What a layer differs by has the rank of all parts of its group: beyond it is only noise."""
    for blocks in (4, 2, 1):
        size, error, _ = synthetic[blocks, SYNTHETIC_RANK * 8 // blocks]
        assert size < 0.65
        assert error < 0.02
        assert synthetic[blocks, 0][1] > 8 * error


def test_sharing_does_not_pay_for_gemma(demo: dict[tuple[int, int], Row]):
    size, error, *_ = demo[6, 64]
    assert 0.4 < size < 0.5 < error < 0.6
