"""Whether a checkpoint is the decoder that its config.json describes, from headers alone.

Every tensor must be one that the decoder has, of the shape the config implies and of a dtype that
can be loaded, and none may be missing: an unknown name may be a weight that would silently be left
out. So it is with a vision tower that is served. Other towers beside a multimodal decoder, rotary
frequencies and key-value cache scales are known, and belong to nobody here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.checkpoint.json_file import quote
from attnquant.checkpoint.nvfp4_layouts import (
    DENSE_DTYPES,
    LM_HEAD,
    StoredWeight,
    is_cache_scale,
    load_global_scale,
    stored_weights,
)
from attnquant.checkpoint.safetensors import TensorSpec, directory_of, where
from attnquant.checkpoint.theta_layout import StoredBundle, is_bundle_part, stored_bundles
from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import CheckpointError
from attnquant.projections import PREFIXES, strip_prefix
from attnquant.vision_shapes import VisionShapes

EMBEDDING = "embed_tokens.weight"
_DERIVED = ".rotary_emb.inv_freq"
_MULTIMODAL = "ForConditionalGeneration"
_VISION = ("vision_tower.", "embed_vision.")
_TOWERS = (
    "vision_tower",
    "vision_embedder",
    "multi_modal_projector",
    "embed_vision",
    "audio_tower",
    "embed_audio",
)
_COMPARED_ROWS = 64
_AGAIN = "download or convert the checkpoint again"


def verify(directory: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint and checks all of it that can be checked without reading the weights.

    Takes milliseconds; what it accepts, loading will not refuse for its names, shapes or dtypes.

    Raises:
        CheckpointError: one line on the first thing that is wrong.
        UnsupportedError: attnquant does not serve this architecture or quantization.
    """
    checkpoint = Checkpoint.open(directory)
    verify_decoder(checkpoint, DecoderShapes.from_config(checkpoint.config))
    return checkpoint


def verify_decoder(checkpoint: Checkpoint, shapes: DecoderShapes) -> dict[str, StoredWeight]:
    """Checks an open checkpoint against a decoder's shapes; how its linear weights are stored.

    Returns:
        As `stored_weights`.

    Raises:
        CheckpointError, UnsupportedError: as `decoder_tensors`; or a tied head that is stored
            differs from the embedding, or the global scale of a weight in NVFP4 is none.
    """
    names, stored = decoder_tensors(
        checkpoint.tensors, shapes, checkpoint.config, checkpoint.hf_quant_config
    )
    for weight in stored.values():
        part = weight.block if isinstance(weight, StoredBundle) else weight
        if part.is_nvfp4:
            load_global_scale(part, checkpoint.array)
    if shapes.tied and LM_HEAD in stored:
        _check_tied_head(checkpoint, stored[LM_HEAD].names[0], names[EMBEDDING])
    return stored


def decoder_tensors(
    tensors: Mapping[str, TensorSpec],
    shapes: DecoderShapes,
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any] | None = None,
) -> tuple[dict[str, str], dict[str, StoredWeight]]:
    """Assigns a checkpoint's tensors to the decoder's weights.

    Args:
        tensors: what the checkpoint's tensors are, by name.
        shapes: what the decoder's weights must be.
        config: config.json.
        hf_quant_config: hf_quant_config.json, if there is one.

    Returns:
        The name in the checkpoint of every weight that is not linear, by its name below the
        decoder (`norm.weight`); and the linear ones, as `stored_weights` and `stored_bundles` give
        them.

    Raises:
        CheckpointError: a tensor is missing, unknown, there twice, or of the wrong shape or dtype,
            or contradicts config.json; names it.
        UnsupportedError: the configs declare a quantization other than NVFP4.
    """
    bundles = stored_bundles(tensors, shapes, config)
    plain_tensors = {name: spec for name, spec in tensors.items() if not is_bundle_part(name)}
    stored = stored_weights(plain_tensors, config, hf_quant_config)
    for path in stored.keys() & bundles.keys():
        name = stored[path].names[0]
        raise CheckpointError(
            f"{where(name, tensors[name])}: found {quote(bundles[path].scales)} too, expected a "
            "weight or its theta bundle; remove one of the two"
        )
    stored |= bundles
    expected = shapes.tensors
    linear = {name for weight in stored.values() for name in weight.names}
    plain: dict[str, str] = {}
    for name, spec in tensors.items():
        short = strip_prefix(name)
        if name in linear or _is_nobodys(name, shapes.architecture):
            continue
        if short not in expected:
            raise CheckpointError(
                f"{where(name, spec)}: unknown, expected only what {shapes.architecture} has with "
                f"this config.json; {_AGAIN}"
            )
        if short in plain:
            raise CheckpointError(
                f"{where(name, spec)}: found {quote(plain[short])} too, the same weight under "
                "another prefix; remove one of the two"
            )
        _check_dtype(name, spec)
        _check_shape(name, spec, spec.shape, expected[short])
        plain[short] = name
    for path, weight in stored.items():
        if path in bundles:
            continue
        name = weight.names[0]
        wanted = shapes.head if path == LM_HEAD else expected.get(f"{path}.weight")
        if wanted is None:
            raise CheckpointError(
                f"{where(name, tensors[name])}: unknown, expected only what {shapes.architecture} "
                f"has with this config.json; {_AGAIN}"
            )
        _check_shape(name, tensors[name], weight.shape, wanted)
    found = plain.keys() | {f"{path}.weight" for path in stored}
    if missing := [name for name in expected if name not in found]:
        untied = " with tie_word_embeddings: false" if missing == ["lm_head.weight"] else ""
        raise CheckpointError(
            f"{directory_of(tensors)}tensor {missing[0]} is missing, and {len(missing) - 1} more "
            f"of the {len(expected)} that config.json implies{untied}; {_AGAIN}"
        )
    if (tower := VisionShapes.from_config(config)) is not None:
        _check_tower(tensors, tower.tensors)
    return plain, stored


def _check_tower(
    tensors: Mapping[str, TensorSpec], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """A vision tower's tensors must be all that config.json implies, and no more."""
    found: dict[str, str] = {}
    for name, spec in tensors.items():
        rests = (name.removeprefix(prefix) for prefix in PREFIXES)
        rest = next((rest for rest in rests if rest.startswith(_VISION)), None)
        if rest is None:
            continue
        short = rest.replace(".linear.", ".")
        if short not in expected:
            raise CheckpointError(
                f"{where(name, spec)}: unknown, expected only what config.json's vision_config "
                f"implies; {_AGAIN}"
            )
        if short in found:
            raise CheckpointError(
                f"{where(name, spec)}: found {quote(found[short])} too, the same weight under "
                "another name; remove one of the two"
            )
        _check_dtype(name, spec)
        _check_shape(name, spec, spec.shape, expected[short])
        found[short] = name
    if missing := [name for name in expected if name not in found]:
        raise CheckpointError(
            f"{directory_of(tensors)}tensor {missing[0]} is missing, and {len(missing) - 1} more "
            f"of the {len(expected)} that config.json's vision_config implies; {_AGAIN}, or set "
            "vision_config to null"
        )


def _is_nobodys(name: str, architecture: str) -> bool:
    if name.endswith(_DERIVED) or is_cache_scale(name):
        return True
    towers = _TOWERS if architecture.endswith(_MULTIMODAL) else ()
    return any(name.startswith(f"{prefix}{tower}.") for prefix in PREFIXES for tower in towers)


def _check_dtype(name: str, spec: TensorSpec) -> None:
    if spec.dtype not in DENSE_DTYPES:
        raise CheckpointError(
            f"{where(name, spec)}: found dtype {spec.dtype}, expected {', '.join(DENSE_DTYPES)}; "
            f"{_AGAIN}"
        )


def _check_shape(
    name: str, spec: TensorSpec, found: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    if found != wanted:
        raise CheckpointError(
            f"{where(name, spec)}: found shape {list(found)}, expected {list(wanted)} as "
            f"config.json implies; {_AGAIN}"
        )


def _check_tied_head(checkpoint: Checkpoint, head: str, embedding: str) -> None:
    """A tied head that is stored again must be the embedding; a spread of rows is compared."""
    ours, theirs = checkpoint.array(head), checkpoint.array(embedding)
    same = ours.dtype == theirs.dtype
    if same:
        rows = np.linspace(0, len(theirs) - 1, _COMPARED_ROWS).astype(int)
        same = ours[rows].tobytes() == theirs[rows].tobytes()
    if not same:
        raise CheckpointError(
            f"{where(head, checkpoint.info(head))}: differs from {quote(embedding)}, expected the "
            "same values where config.json ties the two; set tie_word_embeddings to false, or "
            "remove the tensor"
        )
