"""From theta bundles, made or read, to the tensors that `attnquant.nn.theta` finds in a graph.

A decomposition at load leaves in `data` and `stored` what a theta checkpoint holds (`keep`), so
that what follows (`corrections`) does not know where a bundle came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from max.driver import is_virtual_device_mode
from max.dtype import DType
from max.graph.weights import WeightData
from numpy.typing import NDArray

from attnquant.checkpoint.nvfp4_layouts import StoredWeight
from attnquant.checkpoint.theta_layout import StoredBundle
from attnquant.decoder_shapes import DecoderShapes
from attnquant.nn.tensors import State, from_numpy, max_dtype, numpy_dtype, to_numpy
from attnquant.projections import ProjectionKey
from attnquant.theta import ThetaBundle, ThetaPlan, block_keys, decompose_decoder, effective_weight

Data = MutableMapping[str, WeightData]


def bundles_of(
    data: Mapping[str, WeightData],
    stored: Mapping[str, StoredWeight],
    shapes: DecoderShapes,
    plan: ThetaPlan,
) -> Iterator[dict[ProjectionKey, ThetaBundle]]:
    """A decoder's bundles, block group by block group: from the checkpoint, or made now."""
    blocks = len(plan.groups)

    def load(key: ProjectionKey) -> NDArray[Any]:
        return to_numpy(data[stored[key.module].names[0]])

    held = any(isinstance(weight, StoredBundle) for weight in stored.values())
    if held or is_virtual_device_mode():
        for keys in block_keys(shapes.projections, blocks):
            if len(keys) > 1:
                read = _read if held else _blank
                yield read(data, [(key, stored[key.module]) for key in keys], plan.rank)
    else:
        yield from decompose_decoder(shapes.projections, load, blocks=blocks, rank=plan.rank)


def rebuild(
    data: Data,
    stored: MutableMapping[str, StoredWeight],
    bundles: Mapping[ProjectionKey, ThetaBundle],
    dtype: DType,
) -> None:
    """Puts W_eff, in the graph's dtype, where the checkpoint has a weight or a bundle."""
    for key, bundle in bundles.items():
        if bundle.is_passthrough:
            continue
        # Compiling for a device that is elsewhere needs the shapes only.
        if is_virtual_device_mode():
            weight = np.empty(bundle.w0.shape, numpy_dtype(dtype))
        else:
            weight = effective_weight(bundle, numpy_dtype(dtype))
        module = stored[key.module].module
        stored[key.module] = _dense(data, module, f"{module}.weight", weight)


def keep(
    data: Data,
    stored: MutableMapping[str, StoredWeight],
    bundles: Mapping[ProjectionKey, ThetaBundle],
) -> None:
    """Puts a block group's bundles where the checkpoint has weights."""
    block: StoredWeight | None = None
    for key, bundle in bundles.items():
        if bundle.s is None:
            continue
        weight = stored[key.module]
        del data[weight.names[0]]
        if block is None:
            block = _dense(data, weight.module, f"{weight.module}.w0", bundle.w0)
        parts = {f"{weight.module}.s": bundle.s}
        if bundle.rank:
            parts |= {f"{weight.module}.u": bundle.u, f"{weight.module}.v": bundle.v}
        data.update({name: _tensor(name, array) for name, array in parts.items()})
        scales, *factors = parts
        stored[key.module] = StoredBundle.of(
            weight.module, block, scales, (factors[0], factors[1]) if factors else None
        )


def bundle_at(stored: Mapping[str, StoredWeight], key: ProjectionKey) -> StoredBundle:
    """A projection's bundle, where it must be one."""
    bundle = stored[key.module]
    assert isinstance(bundle, StoredBundle), key.module
    return bundle


def corrections(
    data: Mapping[str, WeightData],
    module: str,
    bundles: Sequence[StoredBundle],
    plan: ThetaPlan,
    dtype: DType,
) -> State:
    """One layer's own tensors of a fused group: `output_scales` or `row_scales`, and the factors.

    Args:
        data: the bundles' tensors, by name.
        module: the group's path below the decoder.
        bundles: of its parts, in row order.
        plan: which path and, at most, which rank.
        dtype: of the factors.
    """
    scales = np.concatenate([to_numpy(data[bundle.scales]) for bundle in bundles])
    factored = plan.path == "factored"
    arrays = {"output_scales": scales} if factored else {"row_scales": scales[:, None]}
    state = {
        f"{module}.{name}": from_numpy(array, DType.float32, f"{module}.{name}")
        for name, array in arrays.items()
    }
    # Columns are in the order of their singular values: the first are the smaller rank's.
    factors = [
        tuple(to_numpy(data[name])[:, : plan.rank] for name in bundle.factors or ())
        for bundle in bundles
    ]
    if plan.rank == 0 or not all(factors):
        return state
    rows = [bundle.shape[0] for bundle in bundles]
    ranks = [u.shape[1] for u, _ in factors]
    kind = numpy_dtype(dtype)
    u = np.zeros((sum(rows), sum(ranks)), kind)
    v = np.empty((bundles[0].shape[1], sum(ranks)), kind)
    row = column = 0
    for (left, right), height, rank in zip(factors, rows, ranks, strict=True):
        u[row : row + height, column : column + rank] = left
        v[:, column : column + rank] = right
        row, column = row + height, column + rank
    right_name, right_factor = ("v", v) if factored else ("vt", np.ascontiguousarray(v.T))
    for name, array in (("u", u), (right_name, right_factor)):
        state[f"{module}.{name}"] = from_numpy(array, dtype, f"{module}.{name}")
    return state


def _read(
    data: Mapping[str, WeightData], weights: Sequence[tuple[ProjectionKey, StoredWeight]], rank: int
) -> dict[ProjectionKey, ThetaBundle]:
    """The bundles of a block group that a checkpoint holds, cut to a rank."""
    bundles: dict[ProjectionKey, ThetaBundle] = {}
    for key, weight in weights:
        assert isinstance(weight, StoredBundle), key.module
        w0 = to_numpy(data[weight.block.names[0]])
        u, v = np.empty((weight.shape[0], 0), w0.dtype), np.empty((weight.shape[1], 0), w0.dtype)
        if weight.factors is not None:
            u, v = (to_numpy(data[name])[:, :rank] for name in weight.factors)
        bundles[key] = ThetaBundle(w0=w0, s=to_numpy(data[weight.scales]), u=u, v=v)
    return bundles


def _blank(
    data: Mapping[str, WeightData], weights: Sequence[tuple[ProjectionKey, StoredWeight]], rank: int
) -> dict[ProjectionKey, ThetaBundle]:
    """Bundles of the right shapes and dtypes, without values."""
    (rows, columns), name = weights[0][1].shape, weights[0][1].names[0]
    dtype = numpy_dtype(data[name].dtype)
    rank = min(rank, rows, columns)
    bundle = ThetaBundle(
        w0=np.zeros((rows, columns), dtype),
        s=np.zeros(rows, np.float32),
        u=np.zeros((rows, rank), dtype),
        v=np.zeros((columns, rank), dtype),
    )
    return {key: bundle for key, _ in weights}


def _dense(data: Data, module: str, name: str, array: NDArray[Any]) -> StoredWeight:
    data[name] = _tensor(name, array)
    rows, columns = array.shape
    return StoredWeight(module=module, shape=(rows, columns), layout="dense", names=(name,))


def _tensor(name: str, array: NDArray[Any]) -> WeightData:
    return from_numpy(array, max_dtype(array.dtype), name)
