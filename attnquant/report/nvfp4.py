"""What NVFP4 does to a model: errors of its weights, bytes per token, and with a text its answers.

Weights are quantized as loading quantizes them, one fused group after the other. With a text, each
coverage's weights are decoded again and run through the model's own float32 graph on the CPU, in
chunks of 512 tokens, `<bos>` before each; at every position that has a next token its distribution
is held against the unquantized model's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.checkpoint.export import dense_weights
from attnquant.decoder_shapes import DecoderShapes
from attnquant.divergence import chunks, compare, standard_error
from attnquant.encoder import Encoder, encoder_of
from attnquant.errors import SettingsError
from attnquant.kernels.codec import decode, largest_magnitude, relative_error
from attnquant.nn.tensors import State, from_numpy, to_numpy
from attnquant.nvfp4.accounting import TokenBytes, token_bytes
from attnquant.nvfp4.coverage import Coverage
from attnquant.projections import ROLES, ProjectionKey, Role, fused_groups, group_module
from attnquant.settings import QuantScales, Settings
from attnquant.text import load_text, load_tokenizer

CHUNK_TOKENS = 512

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How a text fares under a model.

    Attributes:
        kl: nats, the mean over positions of KL(unquantized || this).
        kl_error: the mean's standard error.
        top1: fraction of positions where both put the same token first.
        perplexity: of the text.
    """

    kl: float
    kl_error: float
    top1: float
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class Covered:
    """One coverage.

    Attributes:
        name: short, for a chart's label.
        what: what is in NVFP4.
        nbytes: that one decoded token reads.
        answers: on the text, if there is one, and the coverage was run on it.
    """

    name: str
    what: str
    nbytes: TokenBytes
    answers: Answers | None = None


@dataclass(frozen=True, kw_only=True)
class QuantReport:
    """What NVFP4 does to a model.

    Attributes:
        model: as the user named it.
        shapes: of the decoder.
        scales: how block scales were chosen.
        coverage: what was asked to be in NVFP4.
        errors: relative error of each projection that is.
        covered: from nothing in NVFP4 to all that was asked, and the head.
        text: the text's file name, if there is one.
        positions: that were compared.
    """

    model: str
    shapes: DecoderShapes
    scales: QuantScales
    coverage: Coverage
    errors: Mapping[ProjectionKey, float]
    covered: Sequence[Covered]
    text: str | None = None
    positions: int = 0

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that the decoder has."""
        return tuple(role for role in ROLES if any(k.role == role for k in self.shapes.projections))

    def of_role(self, role: Role) -> list[float]:
        """The errors of a role's projections, layer by layer."""
        return [error for key, error in self.errors.items() if key.role == role]


def measure(
    model: str | os.PathLike[str],
    *,
    ignore: Sequence[str] = (),
    scales: QuantScales | None = None,
    text: Path | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> QuantReport:
    """Measures a dense checkpoint of a supported decoder.

    Args:
        model: its directory.
        ignore: as `ATTNQUANT_QUANT_IGNORE`.
        scales: as `ATTNQUANT_QUANT_SCALES`; if None, as loading chooses.
        text: a file whose text the models are given.
        progress: told the bytes of the weights that are done.

    Raises:
        CheckpointError: the checkpoint cannot be used, or is no dense one; a weight is NaN or
            infinite.
        SettingsError: a pattern matches nothing; the text cannot be used; settings are in the way.
        UnsupportedError: attnquant does not serve this architecture.
    """
    directory = Path(model)
    checkpoint = Checkpoint.open(directory)
    shapes = DecoderShapes.from_config(checkpoint.config)
    stored = dense_weights(checkpoint, shapes)
    coverage = Coverage.of(shapes.projections, ignore=ignore, source="--ignore")
    pieces = [] if text is None else _pieces(text, directory, checkpoint)
    encoder = encoder_of(directory, scales)
    errors: dict[ProjectionKey, float] = {}
    for layer in range(len(shapes.layers)):
        for group in coverage.groups(layer):
            keys = [ProjectionKey(layer=layer, role=role) for role in group.roles]
            names = {key: stored[key.module].names[0] for key in keys if group.quantized}
            weights = {key: checkpoint.array(name) for key, name in names.items()}
            largest = [largest_magnitude(w, name=names[key]) for key, w in weights.items()]
            for key, weight in weights.items():
                packed = encoder(weight, amax=float(max(largest)), name=names[key])
                errors[key] = relative_error(weight, packed)
                progress(weight.nbytes)
                checkpoint.release(names[key])
    covered = _coverages(shapes, coverage, ignore)
    return QuantReport(
        model=os.fspath(model),
        shapes=shapes,
        scales=encoder.recipe["scales"],
        coverage=coverage,
        errors=errors,
        covered=[
            Covered(name=name, what=what, nbytes=token_bytes(shapes, one))
            for name, what, one in covered
        ]
        if text is None
        else _answered(directory, shapes, covered, encoder, pieces),
        text=None if text is None else text.name,
        positions=sum(len(piece) - 1 for piece in pieces),
    )


def _coverages(
    shapes: DecoderShapes, asked: Coverage, ignore: Sequence[str]
) -> list[tuple[str, str, Coverage]]:
    """Short name, long name, and coverage: nothing, both halves, all, and the head."""
    projections = shapes.projections
    found = [("bf16", "nothing", Coverage.none(projections))]
    for name, what, block in (("MLP", "MLP only", "self_attn"), ("attn", "attention only", "mlp")):
        part = Coverage.of(projections, ignore=[*ignore, block])
        if part.quantized and part.quantized != asked.quantized:
            found.append((name, what, part))
    all_of_it = "every projection" if not ignore else "every projection but those ignored"
    found.append(("all", all_of_it, asked))
    found.append(("+ head", f"{all_of_it}, and the head", replace(asked, lm_head=True)))
    return found


def _pieces(text: Path, directory: Path, checkpoint: Checkpoint) -> list[list[int]]:
    settings = Settings.read(checkpoint.config.get("attnquant"))
    # The cache of packed weights does not change what a model is.
    if replace(settings, cache_gb=Settings.cache_gb) != Settings():
        raise SettingsError(
            "report --text: found ATTNQUANT_* settings, expected none: it compares with the model "
            "as it is; unset them, and say what to quantize with --ignore and --scales"
        )
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"--text {text}: cannot be read ({getattr(error, 'strerror', None) or error}), "
            "expected a file of UTF-8 text; name another"
        ) from None
    tokens = load_tokenizer(directory)(content)
    if len(tokens) < 3:
        raise SettingsError(
            f"--text {text}: found {len(tokens)} tokens, expected 3 or more; name a longer text"
        )
    return [piece for piece in chunks(tokens, CHUNK_TOKENS) if len(piece) > 1]


def _answered(
    directory: Path,
    shapes: DecoderShapes,
    covered: Sequence[tuple[str, str, Coverage]],
    encoder: Encoder,
    pieces: Sequence[Sequence[int]],
) -> list[Covered]:
    """The coverages with their answers. The head is not run: a tied one is the embedding too."""
    original = load_text(directory)
    results = []
    for name, what, coverage in covered:
        nbytes, answers = token_bytes(shapes, coverage), None
        if not coverage.lm_head:
            model = original
            if coverage.quantized:
                model = load_text(directory, _Decoded(shapes, coverage, encoder))
            parts = []
            for piece in pieces:
                reference = original.logits(piece)[:-1]
                other = reference if model is original else model.logits(piece)[:-1]
                parts.append(compare(reference, other, piece[1:]))
            del model
            answers = _summary(np.concatenate(parts, axis=1))
        results.append(Covered(name=name, what=what, nbytes=nbytes, answers=answers))
    return results


def _summary(figures: NDArray[np.float64]) -> Answers:
    kl, top1, nll = figures
    return Answers(
        kl=float(kl.mean()),
        kl_error=standard_error(kl) if len(kl) > 1 else 0.0,
        top1=float(top1.mean()),
        perplexity=float(np.exp(nll.mean())),
    )


class _Decoded:
    """Puts quantized and decoded weights in the place of a float32 graph's."""

    def __init__(self, shapes: DecoderShapes, coverage: Coverage, encoder: Encoder) -> None:
        self._shapes, self._coverage, self._encoder = shapes, coverage, encoder

    def __call__(self, state: State) -> State:
        state = dict(state)
        for layer, shapes in enumerate(self._shapes.layers):
            quantized = [g.roles for g in self._coverage.groups(layer) if g.quantized]
            for members in fused_groups(tuple(shapes.projections)):
                module = group_module(layer, members)
                names = [f"{module}.weight"]
                if names[0] not in state:
                    names = [f"{module}.{role}.weight" for role in members]
                stored = [to_numpy(state[name]) for name in names]
                ends = np.cumsum([shapes.projections[role][0] for role in members])[:-1]
                rows = dict(zip(members, np.split(np.concatenate(stored), ends), strict=True))
                for roles in quantized:
                    if set(roles) <= set(members):
                        rows |= self._decoded(layer, {role: rows[role] for role in roles})
                whole = np.concatenate(list(rows.values()))
                for name, part in zip(
                    names, np.split(whole, np.cumsum([len(p) for p in stored])[:-1]), strict=True
                ):
                    state[name] = from_numpy(part, state[name].dtype, name)
        return state

    def _decoded(self, layer: int, group: Mapping[Role, Floats]) -> dict[Role, Floats]:
        """A fused group's weights as they come out of NVFP4."""
        amax = max(float(largest_magnitude(weight)) for weight in group.values())
        modules = {role: ProjectionKey(layer=layer, role=role).module for role in group}
        return {
            role: decode(self._encoder(weight, amax=amax, name=f"model.{modules[role]}.weight"))
            for role, weight in group.items()
        }
