"""Theta bundles: what a projection is stored as, how they are made, and how they are undone."""

from attnquant.theta.blocks import block_groups, blocks_of
from attnquant.theta.bundle import ThetaBundle, stored_bytes
from attnquant.theta.decoder import decompose_decoder
from attnquant.theta.rebuild import effective_weight

__all__ = [
    "ThetaBundle",
    "block_groups",
    "blocks_of",
    "decompose_decoder",
    "effective_weight",
    "stored_bytes",
]
