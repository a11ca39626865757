"""What config.json says of a decoder beside its shapes: the numbers that a graph computes with.

transformers checks these too, but imports for seconds first, answers with a traceback, and lets
through what no model has: a rotary base of -5, a width of 10^30. What is missing has a default in
transformers; what is there must be of the type and the range below, and all that is not is said
at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from reprlib import repr  # shortens what a hostile config puts into a message
from typing import Any, Literal, get_args

from attnquant.decoder_shapes import DecoderShapes, LayerType, text_config
from attnquant.errors import CheckpointError

Activation = Literal["gelu_pytorch_tanh", "silu"]

# Whole numbers beyond this end in an overflow somewhere.
_MOST = 2**31 - 1

# By architecture: the model's type, and that of the text config in it.
MODEL_TYPES: dict[str, tuple[str, str]] = {
    "Gemma3ForCausalLM": ("gemma3_text", "gemma3_text"),
    "Gemma4ForConditionalGeneration": ("gemma4", "gemma4_text"),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified", "gemma4_unified_text"),
    "Qwen3ForCausalLM": ("qwen3", "qwen3"),
}

Test = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_decimal(value: Any) -> bool:
    return isinstance(value, float) and _is_number(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MOST


def _is_token(value: Any) -> bool:
    return type(value) is int and -1 <= value <= _MOST


def _or_null(test: Test) -> Test:
    return lambda value: value is None or test(value)


_COUNT = (_is_count, f"a whole number from 1 to {_MOST}")
_NATURAL = (lambda value: type(value) is int and 0 <= value <= _MOST, "a whole number, 0 or more")
_POSITIVE = (lambda value: _is_number(value) and value > 0, "a number above 0")
_TEXT = (lambda value: value is None or isinstance(value, str), "a string")
_TOKEN = (_or_null(_is_token), "a token's id")
_SWITCH = (lambda value: isinstance(value, bool), "true or false")

_ACTIVATION = (lambda value: value in get_args(Activation), " or ".join(get_args(Activation)))

# transformers takes no whole number where it wants a decimal one.
_FIELDS: dict[str, tuple[Test, str]] = {
    "max_position_embeddings": _COUNT,
    "query_pre_attn_scalar": _COUNT,
    "sliding_window": _COUNT,
    "rms_norm_eps": (lambda v: _is_decimal(v) and 0 < v < 1, "a decimal number between 0 and 1"),
    "final_logit_softcapping": (
        _or_null(lambda value: _is_decimal(value) and value > 0),
        "a decimal number above 0, or null",
    ),
    "hidden_activation": _ACTIVATION,
    "hidden_act": _ACTIVATION,
    "initializer_range": (_is_decimal, "a decimal number"),
    "attention_dropout": (_or_null(_is_number), "a number"),
    "use_cache": _SWITCH,
    "tie_word_embeddings": _SWITCH,
    "attention_bias": _SWITCH,
    "attention_k_eq_v": _SWITCH,
    "enable_moe_block": _SWITCH,
    "hidden_size_per_layer_input": _NATURAL,
    "num_kv_shared_layers": _NATURAL,
    "num_global_key_value_heads": (_or_null(_COUNT[0]), _COUNT[1]),
    "sliding_window_pattern": _COUNT,
    "dtype": _TEXT,
    "torch_dtype": _TEXT,
    "transformers_version": _TEXT,
    "bos_token_id": _TOKEN,
    "pad_token_id": _TOKEN,
    "eos_token_id": (
        lambda v: _or_null(_is_token)(v) or (isinstance(v, list) and all(map(_is_token, v))),
        "a token's id, or a list of them",
    ),
    # Where rotary parameters stood before transformers 5.
    "rope_theta": _POSITIVE,
    "rope_local_base_freq": _POSITIVE,
}
# Of a multimodal model's own fields, beside its text config's.
_OUTER: dict[str, tuple[Test, str]] = {
    name: _FIELDS[name] for name in ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
} | {
    "audio_config": (_or_null(lambda value: isinstance(value, Mapping)), "an object, or null"),
    "vision_config": (_or_null(lambda value: isinstance(value, Mapping)), "an object, or null"),
    "video_token_id": _TOKEN,
}
# MAX's tokenizer asks for these where there is a vision tower.
_PLACEHOLDERS = dict.fromkeys(
    ("boi_token_id", "eoi_token_id", "image_token_id"),
    (lambda value: _is_token(value) and value >= 0, "a token's id, 0 or more"),
)
_VISION: dict[str, tuple[Test, str]] = dict.fromkeys(
    (
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "patch_size",
        "pooling_kernel_size",
        "position_embedding_size",
    ),
    _COUNT,
) | {
    "hidden_activation": (lambda value: isinstance(value, str), "a string"),
    "rms_norm_eps": _FIELDS["rms_norm_eps"],
    "standardize": _SWITCH,
    "use_clipped_linears": _SWITCH,
    "rope_parameters": (_or_null(lambda value: isinstance(value, Mapping)), "an object, or null"),
}
_BIDIRECTIONAL: dict[str, tuple[Test, str]] = {
    "gemma3_text": (_or_null(_SWITCH[0]), "true, false or null"),
    "gemma4_text": (lambda value: value in (None, "all", "vision"), "all, vision or null"),
}
_ROPE: dict[str, tuple[Test, str]] = {
    "rope_type": _TEXT,
    "type": _TEXT,
    "rope_theta": _POSITIVE,
    "factor": _POSITIVE,
    "partial_rotary_factor": (
        lambda value: _is_number(value) and 0 < value <= 1,
        "a number above 0, 1 at most",
    ),
}


def check_values(config: Mapping[str, Any], shapes: DecoderShapes) -> None:
    """Checks everything of config.json that is not a shape.

    Args:
        config: config.json.
        shapes: what it says of shapes.

    Raises:
        CheckpointError: one line that lists every field which no model can have so.
    """
    text = text_config(config)
    path = "" if text is config else "text_config."
    one_kind = shapes.architecture == "Qwen3ForCausalLM"
    # A decoder whose layers are all full ones may name no window.
    checks = _FIELDS | ({"sliding_window": (_or_null(_is_count), _COUNT[1])} if one_kind else {})
    problems = _wrong(text, checks, path)
    own_type, text_type = MODEL_TYPES[shapes.architecture]
    types = [("model_type", config, own_type)]
    bidirectional = _BIDIRECTIONAL["gemma3_text" if own_type == text_type else "gemma4_text"]
    problems += _wrong(text, {"use_bidirectional_attention": bidirectional}, path)
    if text is not config:
        types.append(("text_config.model_type", text, text_type))
        problems += _wrong(config, _OUTER, "")
        if isinstance(vision := config.get("vision_config"), Mapping):
            problems += _wrong(config, _PLACEHOLDERS, "")
            problems += _wrong(vision, _VISION, "vision_config.")
    for name, fields, expected in types:
        found = fields.get("model_type")
        if found != expected:
            problems.append(
                f"{name} is {repr(found)}, expected {expected}, as {shapes.architecture} has it"
            )
    if own_type == text_type and text is not config:
        problems.append(
            f"text_config is there, expected its fields beside {shapes.architecture}'s others"
        )
    problems += _flat_rope(text) if one_kind else _rope_problems(text, path)
    if own_type == text_type and not one_kind and shapes.hidden % shapes.heads:
        problems.append(
            f"hidden_size is {shapes.hidden}, expected a multiple of num_attention_heads = "
            f"{shapes.heads}, as transformers demands"
        )
    if problems:
        raise CheckpointError(
            f"config.json: {'; '.join(problems)}: correct config.json, or download it again"
        )


def _wrong(
    values: Mapping[str, Any], fields: Mapping[str, tuple[Test, str]], path: str
) -> list[str]:
    return [
        f"{path}{name} is {repr(values[name])}, expected {expected}"
        for name, (test, expected) in fields.items()
        if name in values and not test(values[name])
    ]


def _flat_rope(text: Mapping[str, Any]) -> list[str]:
    """Of decoders with one kind of layers, whose rotary parameters have no kinds either."""
    problems = []
    for path in ("rope_parameters", "rope_scaling"):
        values = text.get(path)
        if isinstance(values, Mapping):
            problems += _wrong(values, _ROPE, f"{path}.")
        elif values is not None:
            problems.append(f"{path} is {repr(values)}, expected an object")
    return problems


def _rope_problems(text: Mapping[str, Any], prefix: str) -> list[str]:
    problems = []
    kinds = get_args(LayerType)
    ropes = text.get("rope_parameters")
    if not isinstance(ropes, (Mapping, type(None))) or (ropes and not set(ropes) & set(kinds)):
        problems.append(
            f"{prefix}rope_parameters is {repr(ropes)}, expected an object with "
            f"{' and '.join(kinds)}"
        )
        ropes = None
    parameters = [(f"{prefix}rope_parameters.{kind}", (ropes or {}).get(kind)) for kind in kinds]
    parameters.append((f"{prefix}rope_scaling", text.get("rope_scaling")))
    for path, values in parameters:
        if values is None:
            continue
        if not isinstance(values, Mapping):
            problems.append(f"{path} is {repr(values)}, expected an object")
            continue
        problems += _wrong(values, _ROPE, f"{path}.")
        if "linear" in (values.get("rope_type"), values.get("type")) and "factor" not in values:
            problems.append(f"{path}.factor is missing, expected a number above 0")
    return problems
