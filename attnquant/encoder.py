"""The encoder of a checkpoint's projections, for exports: the one that loading it has.

What loading makes of a checkpoint on this machine's device is what an export holds, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.checkpoint.nvfp4_layouts import INPUT_SCALE
from attnquant.checkpoint.verify import decoder_tensors
from attnquant.decoder_shapes import DecoderShapes
from attnquant.kernels.codec import encode
from attnquant.nvfp4.format import NVFP4Weight
from attnquant.nvfp4.profile import SEED, SEQUENCE_TOKENS, Profile, chosen_scales, search_of
from attnquant.projections import fused_groups, group_module, parse_projection
from attnquant.settings import QuantScales, Settings
from attnquant.text import architecture_of

if TYPE_CHECKING:
    from attnquant.nn.profiled import LoadedDecoder

_SHARED = (
    "--scales profile needs each layer's own weight, and --blocks shares them; give --scales mse"
)


class Encoder:
    """Quantizes projections of one checkpoint, known by their weights' names.

    Args:
        scales: how block scales are chosen.
        shapes: of the decoder.
        profile: what `profile` scales are searched with.
        recipe: all that decides the result, for who resumes an export.
    """

    def __init__(
        self,
        scales: QuantScales,
        shapes: DecoderShapes,
        profile: Profile | None,
        recipe: Mapping[str, Any],
    ) -> None:
        self.recipe = recipe
        self._search = search_of(scales)
        self._shapes = shapes
        self.profile = profile

    def __call__(self, weight: NDArray[Any], *, amax: float, name: str) -> NVFP4Weight:
        """Quantizes `[out, in]`; `amax` is the fused group's largest magnitude."""
        importance: NDArray[np.float32] | None = None
        if self.profile is not None:
            importance = self.profile.importance(self._group(name))
        return encode(weight, scales=self._search, amax=amax, importance=importance, name=name)

    def input_scale(self, name: str) -> float:
        """The global scale of a projection's input, for kernels that quantize that too."""
        if self.profile is None:
            return INPUT_SCALE
        return self.profile.input_scale(self._group(name))

    def _group(self, name: str) -> str:
        key = parse_projection(name)
        if key is None:
            raise ValueError(f"{name}: found the name of no projection")
        roles = tuple(self._shapes.layers[key.layer].projections)
        group = next(group for group in fused_groups(roles) if key.role in group)
        return group_module(key.layer, group)


def encoder_of(
    directory: str | os.PathLike[str],
    scales: QuantScales | None,
    *,
    shared: bool = False,
    tokens: int = Settings.profile_tokens,
    seed: int = SEED,
) -> Encoder:
    """The encoder of a dense checkpoint.

    Args:
        directory: where it lies.
        scales: how block scales are chosen; if None, as loading it does.
        shared: what is encoded are blocks that layers share, which have no profile.
        tokens: random tokens of the profile.
        seed: of these tokens.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        SettingsError: a profile is asked for, for shared blocks.
        UnsupportedError: attnquant does not serve this architecture.
    """
    checkpoint = Checkpoint.open(directory)
    shapes = DecoderShapes.from_config(checkpoint.config)
    chosen = chosen_scales(scales, shapes.architecture, _SHARED if shared else None)
    if chosen != "profile":
        return Encoder(chosen, shapes, None, {"scales": chosen})
    recipe = {"scales": chosen, "tokens": [tokens, SEQUENCE_TOKENS, seed]}
    profile = loaded_decoder(checkpoint, shapes).profile(tokens, seed)
    return Encoder(chosen, shapes, profile, recipe)


def loaded_decoder(checkpoint: Checkpoint, shapes: DecoderShapes) -> LoadedDecoder:
    """What profiles a checkpoint, on the first accelerator or else the CPU."""
    from max.driver import accelerator_count
    from max.graph.weights import load_weights

    from attnquant.nn.loaded import pipeline_config
    from attnquant.nn.profiled import LoadedDecoder
    from attnquant.nn.tensors import specs_of

    directory = checkpoint.directory
    pipeline = pipeline_config(
        directory,
        max_length=SEQUENCE_TOKENS,
        max_batch_size=1,
        on_gpu=accelerator_count() > 0,
    )
    weights = load_weights(sorted(directory.glob("*.safetensors")))
    data = {name: tensor.data() for name, tensor in weights.items()}
    names, stored = decoder_tensors(specs_of(data), shapes, checkpoint.config)
    config = architecture_of(shapes).config.initialize(pipeline, max_seq_len=SEQUENCE_TOKENS)
    return LoadedDecoder(config, data, names, stored)
