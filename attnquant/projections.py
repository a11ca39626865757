"""The one table of projections: their roles, the fused groups, and their names in checkpoints.

Everything that must agree on "which weights are projections" asks here: the graph, the weight
adapters, the quantizer, the byte accounting and the theta decomposition.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Block = Literal["self_attn", "mlp"]

ROLES: tuple[Role, ...] = get_args(Role)

BLOCK_OF_ROLE: dict[Role, Block] = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}

# The roles that one matmul can serve, in the order in which their rows are stacked.
FUSED_ROLES: tuple[tuple[Role, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)

# What a fused group's module is called; a group of one is called by its role.
_GROUP_NAMES: dict[tuple[Role, ...], str] = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("q_proj", "k_proj"): "qk_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
}

# What may stand in front of `layers.` in a checkpoint: plain text models, multimodal wrappers of
# transformers 4 and 5, and checkpoints saved from the inner model alone.
PREFIXES: tuple[str, ...] = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
    "",
)

_PROJECTION = re.compile(
    rf"(?:{'|'.join(map(re.escape, PREFIXES))})layers\.(\d+)\.(self_attn|mlp)\.(\w+_proj)"
)


@dataclass(frozen=True, kw_only=True, order=True)
class ProjectionKey:
    """Which projection: the decoder layer's index (from 0) and its role."""

    layer: int
    role: Role

    @property
    def module(self) -> str:
        """Path below the decoder, without any checkpoint prefix: `layers.3.self_attn.q_proj`."""
        return f"layers.{self.layer}.{BLOCK_OF_ROLE[self.role]}.{self.role}"


def parse_projection(name: str) -> ProjectionKey | None:
    """Parses a module path such as `model.layers.3.self_attn.q_proj`, with any known prefix.

    A trailing `.weight` is accepted. Returns None for everything that is not one of the seven
    roles in its own block (embeddings, norms, vision towers, biases).
    """
    match = _PROJECTION.fullmatch(name.removesuffix(".weight"))
    if match is None:
        return None
    layer, block, role = match.groups()
    if role not in BLOCK_OF_ROLE or BLOCK_OF_ROLE[role] != block:
        return None
    return ProjectionKey(layer=int(layer), role=role)


def strip_prefix(name: str) -> str:
    """A tensor's name below the decoder: `model.layers.0.input_layernorm.weight` without `model.`.

    `lm_head.` stands beside the decoder in every layout and is kept.
    """
    for prefix in PREFIXES:
        rest = name.removeprefix(prefix)
        if rest.startswith(("layers.", "embed_tokens.", "norm.", "lm_head.")):
            return rest
    return name


def fused_groups(roles: tuple[Role, ...]) -> tuple[tuple[Role, ...], ...]:
    """The fused groups of a layer that has these roles: without `v_proj`, `q+k` is a group."""
    groups = (tuple(role for role in group if role in roles) for group in FUSED_ROLES)
    return tuple(group for group in groups if group)


def group_module(layer: int, group: tuple[Role, ...]) -> str:
    """Path of a fused group's module below the decoder: `layers.3.self_attn.qkv_proj`."""
    name = _GROUP_NAMES[group] if len(group) > 1 else group[0]
    return f"layers.{layer}.{BLOCK_OF_ROLE[group[0]]}.{name}"
