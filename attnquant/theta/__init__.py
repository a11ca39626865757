"""Theta bundles: what a projection is stored as, how they are made, and how they are undone."""

from attnquant.theta.blocks import block_groups, layer_kinds
from attnquant.theta.bundle import ThetaBundle, stored_bytes
from attnquant.theta.decoder import block_keys, decompose_decoder
from attnquant.theta.plan import Device, HeldBundles, ThetaPlan, plan_of
from attnquant.theta.rebuild import effective_weight

__all__ = [
    "Device",
    "HeldBundles",
    "ThetaBundle",
    "ThetaPlan",
    "block_groups",
    "block_keys",
    "decompose_decoder",
    "effective_weight",
    "layer_kinds",
    "plan_of",
    "stored_bytes",
]
