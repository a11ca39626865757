"""How a decoder's bundles are served: decided once, from settings and headers.

`W_eff` can be made in three places, and what is the fastest does not depend on the model. A token
reads the weights of every layer, shared or not, since between two layers of a group lie all the
weights of the first. So plain weights, made on the host, read `out·in` numbers a layer, the
factored path reads `r·(out + in)` more of them in two more matmuls, and a graph that rebuilds W_eff
reads and writes the weight on top. What the factored path saves is memory: a block is stored once
for its layers. Hence the default is the host, and `GEMM_OF` picks among the other two. A small
model's block may stay in a cache from layer to layer; then the factored path is the faster one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import SettingsError
from attnquant.log import log
from attnquant.nvfp4.coverage import Coverage
from attnquant.projections import ROLES, ProjectionKey
from attnquant.settings import Settings
from attnquant.theta.blocks import block_groups, layer_kinds

Device = Literal["cpu", "gpu"]
Path = Literal["weights", "outside", "dense", "factored"]
"""`weights`: nothing is shared. `outside`: W_eff on the host. The others: bundles in the graph."""

# What `ATTNQUANT_GEMM=auto` is, and why. Both rows follow from the bytes of a decode step: of a
# layer of Gemma 3 270M at rank 32, factored reads the blocks and 12% beside them; rebuilding reads
# as much, and writes and reads W_eff on top. `python -m bench.theta --paths` on two cores of an AMD
# EPYC that other work shared: 20 ± 5 ms against 37 ± 3, and 36 ± 5 from plain weights.
GEMM_OF: Mapping[Device, tuple[Literal["dense", "factored"], str]] = {
    "cpu": ("factored", "measured: about half the time of rebuilding"),
    "gpu": ("factored", "it reads the fewest bytes of the two; no GPU was measured"),
}


@dataclass(frozen=True, kw_only=True)
class HeldBundles:
    """What a theta checkpoint holds.

    Attributes:
        blocks: of each role.
        rank: of the corrections.
        packed: some blocks are in NVFP4.
    """

    blocks: int
    rank: int
    packed: bool


@dataclass(frozen=True, kw_only=True)
class ThetaPlan:
    """How bundles are served.

    Attributes:
        groups: the layers of each block group.
        rank: of the corrections.
        path: where W_eff is made, or why it is not.
        reason: why this path.
    """

    groups: tuple[tuple[int, ...], ...]
    rank: int
    path: Path
    reason: str

    @property
    def in_graph(self) -> bool:
        """Whether the graph holds bundles."""
        return self.path in ("dense", "factored")

    def log(self) -> None:
        """Says once what is done; at passthrough there is nothing to say."""
        if self.path != "weights":
            layers = sum(map(len, self.groups))
            log.info(
                "theta: %d blocks for %d layers, rank %d, %s: %s",
                *(len(self.groups), layers, self.rank, self.path, self.reason),
            )


def plan_of(
    settings: Settings,
    shapes: DecoderShapes,
    coverage: Coverage,
    *,
    packed: Collection[str] = (),
    held: HeldBundles | None = None,
    device: Device = "cpu",
) -> ThetaPlan:
    """Decides how a decoder's bundles are served.

    Args:
        settings: what the user asked for.
        shapes: of the decoder.
        coverage: what runs from NVFP4.
        packed: module paths below the decoder of what the checkpoint holds in NVFP4.
        held: the bundles that the checkpoint holds, if it is a theta checkpoint.
        device: where the graph runs.

    Raises:
        SettingsError: the settings contradict each other, the decoder or the checkpoint.
    """
    layers = len(shapes.layers)
    blocks = layers if settings.blocks is None else settings.blocks
    if held is not None:
        _check_held(settings, held, blocks)
    elif blocks == layers and settings.rank:
        raise SettingsError(
            f"ATTNQUANT_RANK={settings.rank} corrects shared blocks, and with ATTNQUANT_BLOCKS="
            f"{blocks}, a block for each layer, none is shared; set fewer blocks or unset it"
        )
    groups = block_groups(layer_kinds(shapes.projections), blocks)
    if blocks == layers:
        return ThetaPlan(groups=groups, rank=0, path="weights", reason="nothing is shared")
    if held is None and any(key.module in packed for key in shapes.projections):
        raise SettingsError(
            f"ATTNQUANT_BLOCKS={blocks}: the checkpoint holds projections in NVFP4, which keep "
            f"their bits; set it to {layers}, the number of layers, or unset it"
        )
    path, reason = _path(settings, held, groups, coverage, device)
    return ThetaPlan(groups=groups, rank=settings.rank, path=path, reason=reason)


def _check_held(settings: Settings, held: HeldBundles, blocks: int) -> None:
    if blocks != held.blocks:
        raise SettingsError(
            f"ATTNQUANT_BLOCKS={blocks}: the checkpoint holds bundles of {held.blocks} blocks; "
            "unset it, or export the checkpoint again from the original"
        )
    if settings.rank > held.rank:
        raise SettingsError(
            f"ATTNQUANT_RANK={settings.rank}: the checkpoint holds corrections of rank "
            f"{held.rank}, which can only be cut; set a smaller one or unset it"
        )


def _path(
    settings: Settings,
    held: HeldBundles | None,
    groups: Collection[tuple[int, ...]],
    coverage: Coverage,
    device: Device,
) -> tuple[Path, str]:
    held_packed = held is not None and held.packed
    if settings.precompute_outside and held_packed:
        raise SettingsError(
            "ATTNQUANT_PRECOMPUTE_OUTSIDE=1: the checkpoint's shared blocks are in NVFP4, which "
            "keep their bits; unset it"
        )
    if settings.precompute_outside is not False and not held_packed:
        asked = settings.precompute_outside is True
        return "outside", "as asked" if asked else "plain weights take the fewest steps and bytes"
    packed = _packed_groups(groups, coverage)
    if packed and settings.gemm == "dense":
        raise SettingsError(
            "ATTNQUANT_GEMM=dense rebuilds weights in the graph, where they cannot be packed to "
            "NVFP4; set it to factored, or ATTNQUANT_PRECOMPUTE_OUTSIDE=1"
        )
    if packed:
        return "factored", "blocks in NVFP4 stay packed"
    if settings.gemm != "auto":
        return settings.gemm, "as asked"
    return GEMM_OF[device]


def _packed_groups(groups: Collection[tuple[int, ...]], coverage: Coverage) -> bool:
    """Whether any shared block is to be in NVFP4; layers that share one need one answer."""
    found = False
    for group in (group for group in groups if len(group) > 1):
        for role in ROLES:
            keys = [ProjectionKey(layer=layer, role=role) for layer in group]
            answers = {coverage.is_quantized(key) for key in keys if key in coverage.reasons}
            if len(answers) > 1:
                raise SettingsError(
                    f"ATTNQUANT_QUANT_IGNORE names {role} in some of the layers "
                    f"{', '.join(map(str, group))}, which share one block; name all or none"
                )
            found |= True in answers
    return found
