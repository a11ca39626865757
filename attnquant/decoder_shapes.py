"""What a decoder's config.json says about its weights: which there are, and their shapes.

Everything that must agree on shapes asks here: the graph, the weight adapters, the theta
decomposition, the byte accounting, and `inspect`, which has nothing but a config.json. The text
decoders of Gemma 3, Gemma 4 and Qwen3 differ in data only:

- Gemma 4's full-attention layers have their own head size (`global_head_dim`); with
  `attention_k_eq_v` they also have their own number of key-value heads and no `v_proj`, since
  values are the keys before their norm;
- Gemma 4 multiplies each layer's output by one stored number, `layer_scalar`;
- Qwen3's layers all attend to everything, have norms before their blocks only, and its head is
  untied unless the config says otherwise.

Field names and defaults are those of transformers' `Gemma3TextConfig`, `Gemma4TextConfig`,
`Gemma4UnifiedTextConfig` and `Qwen3Config`. A field that has no default there that every checkpoint
shares is required here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr  # shortens what a hostile config puts into a message
from typing import Any, Literal, get_args

from attnquant.errors import CheckpointError, UnsupportedError
from attnquant.projections import ProjectionKey, Role

LayerType = Literal["sliding_attention", "full_attention"]
Family = Literal["gemma3", "gemma4", "qwen3"]

_FAMILIES: dict[str, Family] = {
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
    "Qwen3ForCausalLM": "qwen3",
}

# A text config that was taken out of its wrapper names no architecture, only its own type.
_ARCHITECTURE_OF_TEXT: dict[str, str] = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForConditionalGeneration",
    "gemma4_unified_text": "Gemma4UnifiedForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
}

# A hundred times what decoders have: what a broken number must not make us build.
MOST_LAYERS = 10_000

# Every sixth layer attends to everything, where a config says nothing else.
_DEFAULT_PATTERN = 6

# Features that change which weights there are, and the value that turns each off.
_UNSUPPORTED: dict[str, tuple[str, Any]] = {
    "attention_bias": ("biases on attention projections", False),
    "hidden_size_per_layer_input": ("per-layer input embeddings", 0),
    "num_kv_shared_layers": ("layers that share key-value projections", 0),
    "enable_moe_block": ("mixture-of-experts blocks", False),
    "use_sliding_window": ("Qwen3's sliding windows", False),
}


@dataclass(frozen=True, kw_only=True)
class LayerShapes:
    """One decoder layer.

    Attributes:
        kind: which attention it has.
        head_dim: size of a query or key head.
        kv_heads: number of key-value heads.
        projections: `(out, in)` of each role it has, in the order of `ROLES`.
        vectors: elements of each norm weight, and of `layer_scalar`, by name below the layer.
    """

    kind: LayerType
    head_dim: int
    kv_heads: int
    projections: Mapping[Role, tuple[int, int]]
    vectors: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class DecoderShapes:
    """A decoder's weights.

    Attributes:
        architecture: as config.json names it.
        vocab: rows of the embedding and of the head.
        hidden: width of the residual stream.
        heads: query heads of every layer.
        tied: the head is the embedding.
        layers: from the first to the last.
    """

    architecture: str
    vocab: int
    hidden: int
    heads: int
    tied: bool
    layers: tuple[LayerShapes, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DecoderShapes:
        """Reads config.json's fields, or those of a text config taken out of it.

        Raises:
            CheckpointError: a field is missing or impossible; names it.
            UnsupportedError: the architecture, or a feature that the config turns on, is not one
                of those that attnquant serves.
        """
        architecture = _architecture(config)
        family = _FAMILIES[architecture]
        text = ConfigFields(text_config(config))
        _refuse_unsupported(text)
        hidden, heads = text.positive("hidden_size"), text.positive("num_attention_heads")
        kinds = layer_types(text, family)
        if family == "gemma4" and kinds[-1] != "full_attention":
            # transformers would change it to full attention, and so ask for other shapes.
            raise CheckpointError(
                f"config.json: layer_types ends in {kinds[-1]!r}, expected full_attention, "
                f"the only kind that {architecture} may end in"
            )
        layer_of = {kind: _layer(text, family, kind, hidden, heads) for kind in set(kinds)}
        return cls(
            architecture=architecture,
            vocab=text.positive("vocab_size"),
            hidden=hidden,
            heads=heads,
            tied=is_tied(config, text, family != "qwen3"),
            layers=tuple(layer_of[kind] for kind in kinds),
        )

    @property
    def projections(self) -> dict[ProjectionKey, tuple[int, int]]:
        """`(out, in)` of every projection, layer by layer."""
        return {
            ProjectionKey(layer=index, role=role): shape
            for index, layer in enumerate(self.layers)
            for role, shape in layer.projections.items()
        }

    @property
    def head(self) -> tuple[int, int]:
        """`(vocab, hidden)` of the output head, tied or not."""
        return self.vocab, self.hidden

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of a checkpoint, by its name below the decoder."""
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": self.head}
        for index, layer in enumerate(self.layers):
            shapes |= {f"layers.{index}.{name}": (size,) for name, size in layer.vectors.items()}
        shapes |= {f"{key.module}.weight": shape for key, shape in self.projections.items()}
        shapes["norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = self.head
        return shapes


class ConfigFields:
    """Reads one object of config.json, and names the field that it cannot use.

    Args:
        values: the object.
        path: what stands before a field's name in a message: `vision_config.`.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path

    def get(self, name: str, default: Any) -> Any:
        """The field's value, or the default where it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def positive(self, name: str, default: int | None = None) -> int:
        """A whole number above 0; required if there is no default."""
        value = self.get(name, default)
        if value is None:
            raise CheckpointError(
                f"config.json: {self.path}{name} is missing, expected a whole number above 0"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"config.json: {self.path}{name} is {repr(value)}, expected a whole number above 0"
            )
        return value


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder's own fields: those of `text_config`, which multimodal configs nest.

    Raises:
        CheckpointError: `text_config` is not an object.
    """
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config is {repr(text)}, expected an object")
    return text


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    own = [name for text, name in _ARCHITECTURE_OF_TEXT.items() if text == config.get("model_type")]
    if names is None and own:
        return own[0]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"config.json: architectures is {repr(names)}, expected a list with one of "
            f"{', '.join(_FAMILIES)}"
        )
    if served := [name for name in _FAMILIES if name in names]:
        return served[0]
    raise UnsupportedError(
        f"config.json: architectures is {repr(names)}, attnquant serves {', '.join(_FAMILIES)}"
    )


def _refuse_unsupported(text: ConfigFields) -> None:
    for name, (feature, off) in _UNSUPPORTED.items():
        value = text.get(name, off)
        if value != off:
            raise UnsupportedError(
                f"config.json: {name} is {repr(value)}; attnquant does not serve {feature}"
            )


def layer_types(text: ConfigFields, family: Family) -> tuple[LayerType, ...]:
    count = text.positive("num_hidden_layers")
    if count > MOST_LAYERS:
        raise CheckpointError(
            f"config.json: num_hidden_layers is {count}, expected at most {MOST_LAYERS}"
        )
    kinds = text.get("layer_types", None)
    if kinds is None and family == "qwen3":
        kinds = ["full_attention"] * count
    if kinds is None:
        pattern = text.positive("sliding_window_pattern", _DEFAULT_PATTERN)
        kinds = [
            "sliding_attention" if (index + 1) % pattern else "full_attention"
            for index in range(count)
        ]
    allowed = get_args(LayerType) if family != "qwen3" else ("full_attention",)
    if not isinstance(kinds, list) or len(kinds) != count:
        found = f"has {len(kinds)} entries" if isinstance(kinds, list) else f"is {repr(kinds)}"
        raise CheckpointError(
            f"config.json: layer_types {found}, expected a list of num_hidden_layers = {count}"
        )
    for index, kind in enumerate(kinds):
        if kind not in allowed:
            raise CheckpointError(
                f"config.json: layer_types[{index}] is {repr(kind)}, expected "
                f"{' or '.join(allowed)}"
            )
    return tuple(kinds)


def _layer(
    text: ConfigFields, family: Family, kind: LayerType, hidden: int, heads: int
) -> LayerShapes:
    """A layer of this kind: all of a decoder's layers of one kind have equal shapes."""
    head_field, kv_field, has_values = "head_dim", "num_key_value_heads", True
    if family == "gemma4" and kind == "full_attention":
        head_field = "global_head_dim"
        if text.get("attention_k_eq_v", False):
            has_values = False
            if text.get("num_global_key_value_heads", None) is not None:
                kv_field = "num_global_key_value_heads"
    head_dim, kv_heads = text.positive(head_field), text.positive(kv_field)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: {kv_field} is {kv_heads}, expected a divisor of num_attention_heads = "
            f"{heads}"
        )
    queries, keys = heads * head_dim, kv_heads * head_dim
    inner = text.positive("intermediate_size")
    projections: dict[Role, tuple[int, int]] = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
    }
    if has_values:
        projections["v_proj"] = (keys, hidden)
    projections |= {
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    vectors = {
        "input_layernorm.weight": hidden,
        "post_attention_layernorm.weight": hidden,
        "self_attn.q_norm.weight": head_dim,
        "self_attn.k_norm.weight": head_dim,
    }
    if family != "qwen3":
        vectors["pre_feedforward_layernorm.weight"] = hidden
        vectors["post_feedforward_layernorm.weight"] = hidden
    if family == "gemma4":
        vectors["layer_scalar"] = 1
    return LayerShapes(
        kind=kind, head_dim=head_dim, kv_heads=kv_heads, projections=projections, vectors=vectors
    )


def is_tied(config: Mapping[str, Any], text: ConfigFields, default: bool) -> bool:
    """The outer config decides, as in transformers; where neither says it, the family does."""
    value = config.get("tie_word_embeddings")
    if value is None:
        value = text.get("tie_word_embeddings", default)
    if not isinstance(value, bool):
        raise CheckpointError(
            f"config.json: tie_word_embeddings is {repr(value)}, expected true or false"
        )
    return value
