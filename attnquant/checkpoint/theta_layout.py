"""How theta bundles lie in checkpoints.

The layers of a block group have these tensors in the place of a projection's `weight`, below its
module (`model.layers.3.self_attn.q_proj`), with r = min(rank, out, in):

    w0             [out, in]        the shared block, only in the group's first layer
    s              [out] float32    the scale of each row
    u, v           [out, r] [in, r] the correction, of w0's dtype; absent where rank is 0

W_eff = s·w0 + u·vᵀ. A block in NVFP4 is `w0` (codes, uint8 [out, in / 2]), `w0_scale` (E4M3,
[out, in / 16]) and `w0_scale_2` (float32), as ModelOpt would store a weight of that name. A group
of one layer shares nothing and keeps its `weight`, in ModelOpt's layout where it is quantized.

config.json's "attnquant" object has `format` (1), `blocks` and `rank`, from which it follows which
layers share (`attnquant.theta.block_groups`) and so which tensors there must be; and `quant` and
`quant_ignore`, how the blocks were quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr  # shortens what a hostile config puts into a message
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnquant.checkpoint.json_file import quote
from attnquant.checkpoint.nvfp4_layouts import DENSE_DTYPES, StoredWeight
from attnquant.checkpoint.safetensors import TensorSpec, directory_of, where
from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import CheckpointError, SettingsError, UnsupportedError
from attnquant.nvfp4.format import BLOCK_SIZE, NVFP4Weight
from attnquant.projections import ProjectionKey, parse_projection, strip_prefix
from attnquant.settings import FORMAT, Settings
from attnquant.theta import HeldBundles, ThetaBundle, block_keys

FORMAT_VERSION = 1
SECTION = "attnquant"

_BLOCK, _PACKED_BLOCK = ("w0",), ("w0", "w0_scale", "w0_scale_2")
_SUFFIXES = (*_PACKED_BLOCK, "s", "u", "v")
_ANY_DENSE = "any of DENSE_DTYPES"
_AGAIN = "export the checkpoint again"


@dataclass(frozen=True, kw_only=True)
class StoredBundle(StoredWeight):
    """How one projection's bundle lies in a checkpoint; `layout` is its block's.

    Attributes:
        block: the shared block, of the group's first layer.
        scales: the tensor s.
        factors: the tensors u and v, if there is a correction.
    """

    block: StoredWeight
    scales: str
    factors: tuple[str, str] | None

    @classmethod
    def of(
        cls, module: str, block: StoredWeight, scales: str, factors: tuple[str, str] | None
    ) -> StoredBundle:
        """The bundle of `module` that has these parts."""
        return cls(
            module=module,
            shape=block.shape,
            layout=block.layout,
            names=(*block.names, scales, *(factors or ())),
            block=block,
            scales=scales,
            factors=factors,
        )


def is_bundle_part(name: str) -> bool:
    """Whether a tensor is a part of a theta bundle."""
    path, _, suffix = strip_prefix(name).rpartition(".")
    return suffix in _SUFFIXES and parse_projection(path) is not None


def stored_bundles(
    tensors: Mapping[str, TensorSpec], shapes: DecoderShapes, config: Mapping[str, Any]
) -> dict[str, StoredBundle]:
    """The bundles that a checkpoint holds; none if it is no theta checkpoint.

    Args:
        tensors: what the checkpoint's tensors are, by name.
        shapes: of the decoder.
        config: config.json.

    Returns:
        By path below the decoder: `layers.3.self_attn.q_proj`.

    Raises:
        CheckpointError: a part is missing, surplus, or of the wrong shape or dtype; names it.
        UnsupportedError: the format is one of a later version.
    """
    parts: dict[str, str] = {}
    for name in filter(is_bundle_part, tensors):
        short = strip_prefix(name)
        if short in parts:
            raise CheckpointError(
                f"{where(name, tensors[name])}: found {quote(parts[short])} too, the same part "
                "under another prefix; remove one of the two"
            )
        parts[short] = name
    declared = _declared(config)
    if declared is None:
        if parts:
            name = next(iter(parts.values()))
            raise CheckpointError(
                f"{where(name, tensors[name])}: found a part of a theta bundle, but config.json's "
                f'"{SECTION}" object has no {FORMAT}, which every theta checkpoint has; {_AGAIN}'
            )
        return {}
    reader, shape_of = _Reader(tensors, parts), shapes.projections
    bundles: dict[str, StoredBundle] = {}
    for keys in _shared_keys(shapes, declared.blocks):
        block = reader.block(keys[0], shape_of[keys[0]])
        for key in keys:
            bundles[key.module] = reader.bundle(key, block, declared.rank)
    if surplus := parts.keys() - reader.used:
        name = parts[min(surplus)]
        raise CheckpointError(
            f"{where(name, tensors[name])}: unknown, expected only the parts that {declared.blocks}"
            f" blocks of rank {declared.rank} have, as config.json says; {_AGAIN}"
        )
    return bundles


def held_bundles(
    config: Mapping[str, Any], stored: Mapping[str, StoredWeight]
) -> HeldBundles | None:
    """What a checkpoint holds, given `stored_bundles`' answer; None if it holds no bundles."""
    bundles = [weight for weight in stored.values() if isinstance(weight, StoredBundle)]
    declared = _declared(config)
    if declared is None or not bundles:
        return None
    return replace(declared, packed=any(bundle.is_nvfp4 for bundle in bundles))


def theta_section(held: HeldBundles, quantization: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's "attnquant" object of a checkpoint that holds these bundles."""
    return {FORMAT: FORMAT_VERSION, "blocks": held.blocks, "rank": held.rank, **quantization}


def bundle_specs(
    modules: Sequence[str], shape: tuple[int, int], rank: int, dtype: str, *, packed: bool
) -> dict[str, TensorSpec]:
    """The tensors of a block group's bundles, by name; `modules` are its layers'."""
    specs = _block_specs(modules[0], shape, dtype, packed=packed)
    for module in modules:
        specs |= _correction_specs(module, shape, rank, dtype)
    return specs


def bundle_tensors(
    modules: Sequence[str], bundles: Sequence[ThetaBundle], packed: NVFP4Weight | None
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The values of those tensors, in their order; `packed` is the block where it is quantized."""
    block: list[NDArray[Any]] = [bundles[0].w0]
    if packed is not None:
        (scale,) = packed.global_scales
        block = [packed.codes, packed.block_scales, np.full((), scale, np.float32)]
    names = _BLOCK if packed is None else _PACKED_BLOCK
    yield from zip((f"{modules[0]}.{name}" for name in names), block, strict=True)
    for module, bundle in zip(modules, bundles, strict=True):
        assert bundle.s is not None
        yield f"{module}.s", bundle.s
        if bundle.rank:
            yield f"{module}.u", bundle.u
            yield f"{module}.v", bundle.v


def _block_specs(
    module: str, shape: tuple[int, int], dtype: str, *, packed: bool
) -> dict[str, TensorSpec]:
    out, columns = shape
    if not packed:
        return {f"{module}.w0": TensorSpec(dtype=dtype, shape=shape)}
    return {
        f"{module}.w0": TensorSpec(dtype="U8", shape=(out, columns // 2)),
        f"{module}.w0_scale": TensorSpec(dtype="F8_E4M3", shape=(out, columns // BLOCK_SIZE)),
        f"{module}.w0_scale_2": TensorSpec(dtype="F32", shape=()),
    }


def _correction_specs(
    module: str, shape: tuple[int, int], rank: int, dtype: str
) -> dict[str, TensorSpec]:
    rank = min(rank, *shape)
    specs = {f"{module}.s": TensorSpec(dtype="F32", shape=shape[:1])}
    if rank:
        specs[f"{module}.u"] = TensorSpec(dtype=dtype, shape=(shape[0], rank))
        specs[f"{module}.v"] = TensorSpec(dtype=dtype, shape=(shape[1], rank))
    return specs


def _declared(config: Mapping[str, Any]) -> HeldBundles | None:
    """What config.json says that the checkpoint holds; None if it is no theta checkpoint."""
    section = config.get(SECTION)
    if not isinstance(section, Mapping) or FORMAT not in section:
        return None
    if section[FORMAT] != FORMAT_VERSION or section[FORMAT] is True:
        raise UnsupportedError(
            f"config.json: {SECTION}.{FORMAT} is {repr(section[FORMAT])}, expected "
            f"{FORMAT_VERSION}; install the version of attnquant that wrote this checkpoint"
        )
    settings = Settings.read(section, environ={})
    if settings.blocks is None:
        raise CheckpointError(
            f"config.json: {SECTION}.blocks is missing, expected the number of shared blocks; "
            f"{_AGAIN}"
        )
    return HeldBundles(blocks=settings.blocks, rank=settings.rank, packed=False)


def _shared_keys(shapes: DecoderShapes, blocks: int) -> list[list[ProjectionKey]]:
    try:
        groups = block_keys(shapes.projections, blocks)
    except SettingsError as error:
        message = str(error).removeprefix(f"ATTNQUANT_BLOCKS={blocks} ")
        raise CheckpointError(
            f"config.json: {SECTION}.blocks is {blocks}, which {message}; {_AGAIN}"
        ) from None
    return [keys for keys in groups if len(keys) > 1]


class _Reader:
    """Finds parts by path, checks what they are, and knows which were asked for.

    Args:
        tensors: what the checkpoint's tensors are, by name.
        parts: the name of each part by its name below the decoder.
    """

    def __init__(self, tensors: Mapping[str, TensorSpec], parts: Mapping[str, str]) -> None:
        self._tensors = tensors
        self._parts = parts
        self.used: set[str] = set()

    def block(self, key: ProjectionKey, shape: tuple[int, int]) -> StoredWeight:
        packed = f"{key.module}.w0_scale" in self._parts
        specs = _block_specs(key.module, shape, _ANY_DENSE, packed=packed)
        names = [self._part(name, spec) for name, spec in specs.items()]
        return StoredWeight(
            module=names[0].removesuffix(".w0"),
            shape=shape,
            layout="modelopt" if packed else "dense",
            names=tuple(names),
        )

    def bundle(self, key: ProjectionKey, block: StoredWeight, rank: int) -> StoredBundle:
        dtype = _ANY_DENSE if block.is_nvfp4 else self._tensors[block.names[0]].dtype
        specs = _correction_specs(key.module, block.shape, rank, dtype)
        scales, *factors = [self._part(name, spec) for name, spec in specs.items()]
        return StoredBundle.of(
            scales.removesuffix(".s"), block, scales, (factors[0], factors[1]) if factors else None
        )

    def _part(self, path: str, wanted: TensorSpec) -> str:
        """The name of a part, which must be there and as wanted."""
        name = self._parts.get(path)
        if name is None:
            raise CheckpointError(
                f"{directory_of(self._tensors)}tensor {path} is missing, a part of a theta bundle "
                f"that config.json implies; {_AGAIN}"
            )
        found = self._tensors[name]
        dtypes = DENSE_DTYPES if wanted.dtype == _ANY_DENSE else (wanted.dtype,)
        if found.dtype not in dtypes or found.shape != wanted.shape:
            raise CheckpointError(
                f"{where(name, found)}: found {found.dtype} {list(found.shape)}, expected "
                f"{' or '.join(dtypes)} {list(wanted.shape)} as config.json implies; {_AGAIN}"
            )
        self.used.add(path)
        return name
