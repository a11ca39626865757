"""What config.json says about Gemma 4's drafter: its weights, and that it fits its target.

A drafter (`Gemma4AssistantForCausalLM`) is a decoder of a few layers that has no keys and values of
its own. It reads those of the target's last layer of each kind, the target's embedding of the last
token, and the target's last hidden state. So it must have been made for that target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr  # shortens what a hostile config puts into a message
from typing import Any

from attnquant.decoder_shapes import (
    ConfigFields,
    DecoderShapes,
    LayerType,
    is_tied,
    layer_types,
    text_config,
)
from attnquant.errors import AttnquantError, CheckpointError, UnsupportedError

DRAFTER = "Gemma4AssistantForCausalLM"
_TARGET = "Gemma4ForConditionalGeneration"

# What stands before the names of the weights that are not those into and out of the target.
_PREFIX = "model."

# Fields of the two text configs that must be equal where both say something.
_SHARED = ("vocab_size", "head_dim", "global_head_dim", "sliding_window")

_HEADS = "num_attention_heads"
_AGAIN = "give the drafter that was made for this target"


@dataclass(frozen=True, kw_only=True)
class DrafterShapes:
    """A drafter's sizes.

    Attributes:
        vocab: rows of its embedding and of its head.
        hidden: width of its residual stream.
        backbone: width of the target's.
        inner: width of its feed-forward blocks.
        heads: query heads of every layer.
        head_dims: size of a head, by the kind of layer.
        layers: the kind of each layer.
        tied: its head is its embedding.
    """

    vocab: int
    hidden: int
    backbone: int
    inner: int
    heads: int
    head_dims: Mapping[LayerType, int]
    layers: tuple[LayerType, ...]
    tied: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any], target: Mapping[str, Any]) -> DrafterShapes:
        """Reads a drafter's config.json.

        Args:
            config: the drafter's config.json.
            target: the target's.

        Raises:
            CheckpointError: a field is missing, impossible, or not the target's; names it.
            UnsupportedError: it is no drafter that attnquant serves.
        """
        shapes = DecoderShapes.from_config(target)
        try:
            return cls._of(config, shapes, text_config(target))
        except AttnquantError as error:
            raise type(error)(f"the drafter's {error}") from None

    @classmethod
    def _of(
        cls, config: Mapping[str, Any], target: DecoderShapes, target_text: Mapping[str, Any]
    ) -> DrafterShapes:
        names = config.get("architectures")
        if not isinstance(names, list) or DRAFTER not in names or target.architecture != _TARGET:
            raise UnsupportedError(
                f"config.json: architectures is {repr(names)}, and the target is a "
                f"{target.architecture}; attnquant serves {DRAFTER} with {_TARGET}"
            )
        if config.get("use_ordered_embeddings"):
            raise UnsupportedError(
                "config.json: use_ordered_embeddings is set; attnquant does not serve drafters "
                "that score a part of the vocabulary"
            )
        outer, text = ConfigFields(config), ConfigFields(text_config(config))
        backbone, heads = outer.positive("backbone_hidden_size"), text.positive(_HEADS)
        if backbone != target.hidden:
            raise CheckpointError(
                f"config.json: backbone_hidden_size is {backbone}, expected {target.hidden}, the "
                f"target's hidden_size; {_AGAIN}"
            )
        kinds = layer_types(text, "gemma4")
        _check_shared(text.values, target_text, kinds)
        of_kind = {layer.kind: layer for layer in target.layers}
        for kind in kinds:
            if kind not in of_kind:
                raise CheckpointError(
                    f"config.json: layer_types has {kind!r}, and the target has no such layer; "
                    f"{_AGAIN}"
                )
            if heads % of_kind[kind].kv_heads:
                raise CheckpointError(
                    f"config.json: {_HEADS} is {heads}, expected a multiple of the target's "
                    f"{of_kind[kind].kv_heads} key-value heads; {_AGAIN}"
                )
        return cls(
            vocab=text.positive("vocab_size"),
            hidden=text.positive("hidden_size"),
            backbone=backbone,
            inner=text.positive("intermediate_size"),
            heads=heads,
            head_dims={kind: of_kind[kind].head_dim for kind in kinds},
            layers=kinds,
            tied=is_tied(config, text, True),
        )

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of a checkpoint, by its name there."""
        shapes: dict[str, tuple[int, ...]] = {
            f"{_PREFIX}embed_tokens.weight": (self.vocab, self.hidden),
            f"{_PREFIX}norm.weight": (self.hidden,),
            "pre_projection.weight": (self.hidden, 2 * self.backbone),
            "post_projection.weight": (self.backbone, self.hidden),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        for index, kind in enumerate(self.layers):
            queries = self.heads * self.head_dims[kind]
            layer: dict[str, tuple[int, ...]] = {
                "self_attn.q_proj.weight": (queries, self.hidden),
                "self_attn.q_norm.weight": (self.head_dims[kind],),
                "self_attn.o_proj.weight": (self.hidden, queries),
                "mlp.gate_proj.weight": (self.inner, self.hidden),
                "mlp.up_proj.weight": (self.inner, self.hidden),
                "mlp.down_proj.weight": (self.hidden, self.inner),
                "input_layernorm.weight": (self.hidden,),
                "post_attention_layernorm.weight": (self.hidden,),
                "pre_feedforward_layernorm.weight": (self.hidden,),
                "post_feedforward_layernorm.weight": (self.hidden,),
                "layer_scalar": (1,),
            }
            shapes |= {f"{_PREFIX}layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes

    def check(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """Compares a checkpoint's tensors, their shapes by name, with what they must be.

        Raises:
            CheckpointError: one is missing, unknown or of another shape; names it.
        """
        expected = self.tensors
        for name in [*expected, *found]:
            if name not in found:
                problem = f"{name} is missing, expected {list(expected[name])}"
            elif name not in expected:
                problem = f"{repr(name)} is none of a drafter's"
            elif found[name] != expected[name]:
                problem = f"{name} is {list(found[name])}, expected {list(expected[name])}"
            else:
                continue
            raise CheckpointError(
                f"the drafter's tensor {problem}, as its config.json implies; download or convert "
                "it again"
            )


def _check_shared(
    own: Mapping[str, Any], target: Mapping[str, Any], kinds: tuple[LayerType, ...]
) -> None:
    """Compares what the drafter's queries must have in common with the target's keys.

    Raises:
        CheckpointError: names the first field that differs.
    """
    pairs = {name: (own.get(name), target.get(name)) for name in _SHARED}
    ropes, others = (
        {} if found is None else found
        for found in (own.get("rope_parameters"), target.get("rope_parameters"))
    )
    if isinstance(ropes, Mapping) and isinstance(others, Mapping):
        pairs |= {f"rope_parameters.{kind}": (ropes.get(kind), others.get(kind)) for kind in kinds}
    for name, (found, expected) in pairs.items():
        if None not in (found, expected) and found != expected:
            raise CheckpointError(
                f"config.json: {name} is {repr(found)}, expected {repr(expected)}, as in the "
                f"target's; {_AGAIN}"
            )
