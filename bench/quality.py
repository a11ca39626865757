"""What NVFP4 does to a model's answers: its next-token distributions against the original's.

The evaluation text goes through the model in chunks of 512 tokens, each `<bos>` and the next 511.
At every position that has a next token, the distribution over the whole vocabulary is held against
the unquantized model's, in float32, in the same run: the KL divergence in nats, KL(unquantized ||
quantized), whether both put the same token first, and the text's perplexity. A standard error is
that of a mean over positions; "against absmax" uses that both were measured on the same ones.

By default what is measured is what quantizing did to the weights, on any device: weights are
quantized, decoded, and run through the float32 graph. `--packed` runs the packed weights through
the graph that is served instead, which adds what that does to activations.

Beside our own scales stands "four over six" (arXiv 2512.02010): a block's largest magnitude becomes
6 or 4, whichever errs less.

A global scale moves the rounding of every block scale, and with it the KL divergence by some
percent, up or down, by luck. So each figure is the mean over several global scales, those for the
largest magnitude times 1 up to below 2, evenly in the logarithm. The table takes 6 GB of memory.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from max.dtype import DType
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tqdm import tqdm

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.decoder_shapes import DecoderShapes
from attnquant.demo import checkpoint_directory
from attnquant.divergence import chunks, compare
from attnquant.encoder import encoder_of
from attnquant.kernels.codec import decode, encode, largest_magnitude
from attnquant.nn.tensors import State, from_numpy, to_numpy
from attnquant.nvfp4.format import NVFP4Weight
from attnquant.nvfp4.profile import Profile
from attnquant.projections import BLOCK_OF_ROLE, fused_groups, group_module
from attnquant.text import load_text
from bench.common import EVALUATION_TEXT, Run, environment
from bench.divergence import Quality
from bench.four_over_six import four_over_six

Scales = Literal["absmax", "four over six", "mse", "profile"]
SCALES: tuple[Scales, ...] = get_args(Scales)
COVERAGES: dict[str, tuple[str, ...]] = {
    "attention + MLP": ("self_attn", "mlp"),
    "attention only": ("self_attn",),
    "MLP only": ("mlp",),
}

Logits = Callable[[Sequence[int]], NDArray[np.float32]]
"""Token ids to logits `[tokens, vocab]`."""

Change = Callable[[State, DecoderShapes], State]
"""What is done to a graph's weights before they are bound."""


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Quantizes a graph's dense weights, as loading with `ATTNQUANT_QUANT=nvfp4` does.

    Attributes:
        scales: how block scales are chosen.
        blocks: whose projections are quantized: `self_attn`, `mlp`.
        factor: what a fused group's largest magnitude is multiplied by for its global scale.
        packed: whether weights stay packed, or are decoded again.
        profile: what `profile` scales are searched with.
    """

    scales: Scales
    blocks: tuple[str, ...]
    factor: float
    packed: bool
    profile: Profile | None = None

    def __call__(self, state: State, shapes: DecoderShapes) -> State:
        """The state with the weights of these blocks' fused groups replaced."""
        state = dict(state)
        for layer, layer_shapes in enumerate(shapes.layers):
            for roles in fused_groups(tuple(layer_shapes.projections)):
                if BLOCK_OF_ROLE[roles[0]] in self.blocks:
                    self._replace(state, group_module(layer, roles), roles)
        return state

    def _replace(self, state: State, module: str, roles: Sequence[str]) -> None:
        names = (f"{module}.weight", *(f"{module}.{role}.weight" for role in roles))
        dense = {name: to_numpy(state.pop(name)) for name in names if name in state}
        largest = max(float(largest_magnitude(part, name=name)) for name, part in dense.items())
        parts = {
            name: self._encode(part, largest * self.factor, module) for name, part in dense.items()
        }
        if not self.packed:
            for name, part in parts.items():
                state[name] = from_numpy(decode(part), DType.float32, name)
            return
        whole = NVFP4Weight.stack(list(parts.values()))
        # The graph expects a global scale for each role; the group's are equal.
        scales = np.repeat(whole.global_scales[:1], len(roles))
        inputs = 1.0 if self.profile is None else self.profile.input_scale(module)
        for name, array, dtype in (
            ("codes", whole.codes, DType.uint8),
            ("block_scales", whole.block_scales.view(np.uint8), DType.uint8),
            ("global_scales", scales, DType.float32),
            ("input_scale", np.array([inputs], np.float32), DType.float32),
        ):
            state[f"{module}.{name}"] = from_numpy(array, dtype, f"{module}.{name}")

    def _encode(self, weight: NDArray[Any], amax: float, module: str) -> NVFP4Weight:
        if self.scales == "four over six":
            return four_over_six(weight, amax=amax)
        if self.scales == "profile":
            assert self.profile is not None
            return encode(weight, amax=amax, importance=self.profile.importance(module))
        return encode(weight, scales=self.scales, amax=amax)


def load(directory: Path, change: Change | None = None) -> Logits:
    """The checkpoint's model, its weights changed before they are bound."""
    shapes = DecoderShapes.from_config(Checkpoint.open(directory).config)
    return load_text(directory, change and (lambda state: change(state, shapes))).logits


def measure(
    pieces: Sequence[Sequence[int]], original: Logits, others: Mapping[str, Logits]
) -> dict[str, NDArray[np.float64]]:
    """`compare` over all chunks, by model; the original itself, as "", is compared too."""
    results: dict[str, list[NDArray[np.float64]]] = {name: [] for name in ("", *others)}
    for piece in tqdm(pieces, unit="chunk", disable=None):
        reference, targets = original(piece)[:-1], piece[1:]
        results[""].append(compare(reference, reference, targets))
        for name, model in others.items():
            results[name].append(compare(reference, model(piece)[:-1], targets))
    return {name: np.concatenate(parts, axis=1) for name, parts in results.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run = Run("quality", __doc__)
    run.parser.add_argument("--chunk", type=int, default=512, help="tokens a chunk, with <bos>")
    run.parser.add_argument("--chunks", type=int, help="only the first so many")
    run.parser.add_argument("--global-scales", type=int, default=4, help="how many to average over")
    run.parser.add_argument("--scales", nargs="+", choices=SCALES, default=list(SCALES))
    run.parser.add_argument(
        "--coverages", nargs="+", choices=list(COVERAGES), default=list(COVERAGES)
    )
    run.parser.add_argument(
        "--seeds", type=int, nargs="+", default=[], help="profiles of other random tokens too"
    )
    run.parser.add_argument("--packed", action="store_true", help="the graph that is served")
    options = run.parse(arguments)
    # The settings are this command's to choose.
    for name in os.environ.keys() - environment().keys():
        del os.environ[name]
    if "absmax" not in options.scales:
        run.parser.error("--scales: expected absmax too, which the others are held against")
    directory = checkpoint_directory(options.model)
    names, profiles = list(options.scales), {}
    if "profile" in names:
        profiles["profile"] = encoder_of(directory, "profile").profile
        for seed in options.seeds:
            names.append(f"profile, seed {seed}")
            profiles[names[-1]] = encoder_of(directory, "profile", seed=seed).profile
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens = tokenizer.encode(EVALUATION_TEXT.read_text(encoding="utf-8")).ids
    pieces = chunks(tokens, options.chunk)[: options.chunks]
    factors = [2 ** (index / options.global_scales) for index in range(options.global_scales)]

    original = load(directory)
    rows: list[tuple[str, ...]] = [
        ("quantized", "scales", "KL, nats", "against absmax", "top-1", "perplexity")
    ]
    qualities: dict[str, Any] = {}
    for coverage in options.coverages:
        blocks = COVERAGES[coverage]
        by_factor = []
        for factor in factors:
            models: dict[str, Logits] = {}
            gc.collect()  # The last round's models are hundreds of megabytes.
            for scales in names:
                change = Quantized(
                    scales="profile" if scales in profiles else scales,
                    blocks=blocks,
                    factor=factor,
                    packed=options.packed,
                    profile=profiles.get(scales),
                )
                models[scales] = load(directory, change)
            by_factor.append(measure(pieces, original, models))
        mean = {name: np.mean([one[name] for one in by_factor], axis=0) for name in by_factor[0]}
        for scales in names:
            quality = Quality.of(mean[scales], mean["absmax"])
            qualities[f"{coverage}, {scales}"] = asdict(quality) | {
                "kl_by_global_scale": [float(one[scales][0].mean()) for one in by_factor]
            }
            rows.append((coverage, scales, *quality.row()))
        perplexity = float(np.exp(mean[""][2].mean()))
    rows.append(("nothing", "", "", "", "", f"{perplexity:.2f}"))
    figures = {
        "positions": sum(len(piece) - 1 for piece in pieces),
        "chunk_tokens": options.chunk,
        "global_scale_factors": factors,
        "packed": options.packed,
        "qualities": qualities,
        "unquantized_perplexity": perplexity,
    }
    run.report(rows, figures)


if __name__ == "__main__":
    main()
