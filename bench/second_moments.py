"""What full second moments would add to the profile: error feedback from column to column.

GPTQ (arXiv 2210.17323) lets the columns of W that are not quantized yet make up for the errors of
those that are, by the second moments `H = E[x xᵀ]` of the input. Here each block of 16 takes its
scale by our weighted search, on the columns as they are by then, and its columns are rounded one
after the other. Off the diagonal H is multiplied by a share: 0 is no feedback, which is the
`profile` scales, 1 is GPTQ. H is that of the profile's random tokens, or of text that the model
made itself, from <bos>, at temperature 1: both are free of data.

Everything runs in transformers on torch, in float32, with the rounded weights in place of the
model's own; the KL divergence is `bench.quality`'s, with one global scale. It needs the `parity`
extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tqdm import tqdm

from attnquant.checkpoint.json_file import read_json_object
from attnquant.decoder_shapes import DecoderShapes
from attnquant.demo import checkpoint_directory
from attnquant.divergence import chunks, compare
from attnquant.kernels.codec import decode, encode, largest_magnitude
from attnquant.nvfp4.format import BLOCK_SIZE, E2M1_VALUES
from attnquant.nvfp4.profile import SEED, SEQUENCE_TOKENS, Profile, random_tokens
from attnquant.nvfp4.scales import e2m1_codes
from attnquant.parity import reference as parity
from attnquant.projections import BLOCK_OF_ROLE, fused_groups, group_module
from bench.common import EVALUATION_TEXT, Run, seconds
from bench.divergence import Quality

Array = NDArray[np.float32]
Moments = Mapping[str, NDArray[np.float64]]
"""`E[x xᵀ]` `[in, in]` of each fused group's input, by the group's module path."""

# Of the mean of H's diagonal, added to it, as GPTQ's authors do: H of few tokens is singular.
DAMPING = 0.01
# Columns that are compensated at once; those behind them are when these are done.
STRIPE = 128


def rounded(
    weight: Array, moments: NDArray[np.float64], amax: float, importance: Array, share: float
) -> Array:
    """The values of `weight [out, in]` in NVFP4, with error feedback by `share` of H's sides."""
    w = weight.astype(np.float32)
    diagonal = np.diag(moments).copy()
    h = share * moments
    np.fill_diagonal(h, diagonal + DAMPING * max(diagonal.mean(), 1e-30))
    upper = np.linalg.cholesky(np.linalg.inv(h)).T.astype(np.float32)
    result = np.empty_like(w)
    columns = w.shape[1]
    for stripe in range(0, columns, STRIPE):
        end = min(stripe + STRIPE, columns)
        errors = np.empty((len(w), end - stripe), np.float32)
        for block in range(stripe, end, BLOCK_SIZE):
            at = slice(block, block + BLOCK_SIZE)
            # What errors were moved here may exceed what the global scale was made for.
            inside = np.ascontiguousarray(np.clip(w[:, at], -amax, amax))
            packed = encode(inside, amax=amax, importance=importance[at])
            steps = packed.block_scales.astype(np.float32) * packed.global_scales[0]
            for column in range(block, block + BLOCK_SIZE):
                result[:, column] = _nearest(w[:, column], steps[:, 0])
                error = (w[:, column] - result[:, column]) / upper[column, column]
                w[:, column + 1 : end] -= np.outer(error, upper[column, column + 1 : end])
                errors[:, column - stripe] = error
        w[:, end:] -= errors @ upper[stripe:end, end:]
    return result


def _nearest(values: Array, steps: Array) -> Array:
    """The nearest multiples of the steps by E2M1 numbers."""
    scaled = np.abs(values) / np.where(steps == 0, 1, steps)
    return np.copysign(E2M1_VALUES[e2m1_codes(scaled)] * steps, values)


class Reference(parity.Reference):
    """The model in transformers, whose projections can be replaced."""

    def __init__(self, directory: Path, shapes: DecoderShapes) -> None:
        super().__init__(directory)
        self.groups: dict[str, dict[str, Any]] = {}
        for index, layer in enumerate(shapes.layers):
            for roles in fused_groups(tuple(layer.projections)):
                block = getattr(self._model.model.layers[index], BLOCK_OF_ROLE[roles[0]])
                members = {role: getattr(block, role) for role in roles}
                self.groups[group_module(index, roles)] = members
        self.weights = {
            module: {role: one.weight.detach().numpy().copy() for role, one in members.items()}
            for module, members in self.groups.items()
        }

    def put(self, weights: Mapping[str, Mapping[str, Array]]) -> None:
        """Puts other weights in place of the projections'."""
        with self._torch.no_grad():
            for module, members in weights.items():
                for role, weight in members.items():
                    self.groups[module][role].weight.copy_(self._torch.from_numpy(weight))

    def moments(self, sequences: Sequence[Sequence[int]]) -> Moments:
        """Second moments of what goes into the groups, without each sequence's first token."""
        totals: dict[str, Any] = {}

        def listen(module: str) -> Callable[..., None]:
            def heard(_: Any, inputs: Any, __: Any) -> None:
                x = inputs[0][0, 1:].double()
                totals[module] = totals.get(module, 0) + x.T @ x

            return heard

        hooks = [
            next(iter(members.values())).register_forward_hook(listen(module))
            for module, members in self.groups.items()
        ]
        for ids in tqdm(sequences, desc="moments", disable=None):
            self.logits(ids)
        for hook in hooks:
            hook.remove()
        count = sum(len(ids) - 1 for ids in sequences)
        return {module: (total / count).numpy() for module, total in totals.items()}

    def own_text(self, count: int, tokens: int) -> list[list[int]]:
        """What the model writes from <bos>, at temperature 1."""
        self._torch.manual_seed(SEED)
        bos = self._model.config.bos_token_id
        made = self._model.generate(
            self._torch.full((count, 1), bos),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            min_new_tokens=tokens - 1,
            max_new_tokens=tokens - 1,
        )
        rows: list[list[int]] = made.tolist()
        return rows


def quantized(
    reference: Reference, moments: Moments, share: float | None, scales: str = "mse"
) -> Iterator[tuple[str, dict[str, Array]]]:
    """Each group's members in NVFP4; without feedback if `share` is None."""
    profile = Profile(
        mean_squares={name: np.diag(h).astype(np.float32) for name, h in moments.items()},
        largest={},
    )
    for module, members in tqdm(reference.weights.items(), desc="quantize", disable=None):
        amax = max(float(largest_magnitude(weight)) for weight in members.values())
        importance = profile.importance(module)
        made = {}
        for role, weight in members.items():
            if scales == "absmax":
                made[role] = decode(encode(weight, scales="absmax", amax=amax))
            elif share is None:
                made[role] = decode(encode(weight, amax=amax, importance=importance))
            else:
                made[role] = rounded(weight, moments[module], amax, importance, share)
        yield module, made


def _collected(
    reference: Reference, moments: Moments, share: float | None
) -> dict[str, dict[str, Array]]:
    return dict(quantized(reference, moments, share))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run = Run("second_moments", __doc__)
    run.parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    run.parser.add_argument("--sequences", type=int, default=8, help="of 512 tokens")
    run.parser.add_argument("--chunks", type=int, help="of the text, only the first so many")
    options = run.parse(arguments)
    directory = checkpoint_directory(options.model)
    shapes = DecoderShapes.from_config(read_json_object(directory / "config.json"))
    reference = Reference(directory, shapes)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = tokenizer.encode(EVALUATION_TEXT.read_text(encoding="utf-8")).ids
    pieces = chunks(text, SEQUENCE_TOKENS)[: options.chunks]
    costs: dict[str, float] = {}

    def timed(name: str, make: Callable[[], Any]) -> Any:
        made: list[Any] = []
        costs[name] = seconds(lambda: made.append(make()))
        return made[0]

    count = options.sequences * SEQUENCE_TOKENS
    random = [ids.tolist() for ids in random_tokens(count, shapes.vocab)]
    own = timed("own text", partial(reference.own_text, options.sequences, SEQUENCE_TOKENS))
    moments: dict[str, Moments] = {
        "random tokens": timed("moments, random tokens", partial(reference.moments, random)),
        "own text": timed("moments, own text", partial(reference.moments, own)),
    }
    variants: dict[str, Callable[[], dict[str, dict[str, Array]]]] = {
        "absmax": lambda: dict(
            quantized(reference, moments["random tokens"], None, scales="absmax")
        )
    }
    for source, h in moments.items():
        for share in (None, *options.shares):
            name = f"{source}, " + ("diagonal" if share is None else f"feedback, share {share}")
            variants[name] = partial(
                lambda h, share: dict(quantized(reference, h, share)), h, share
            )
    weights = {name: timed(name, make) for name, make in variants.items()}

    results: dict[str, list[NDArray[np.float64]]] = {name: [] for name in weights}
    for piece in tqdm(pieces, desc="text", unit="chunk", disable=None):
        reference.put(reference.weights)
        original = reference.logits(piece)[:-1].copy()
        for name, changed in weights.items():
            reference.put(changed)
            results[name].append(compare(original, reference.logits(piece)[:-1], piece[1:]))
    whole = {name: np.concatenate(parts, axis=1) for name, parts in results.items()}
    rows: list[tuple[str, ...]] = [
        ("", "KL, nats", "against absmax", "top-1", "perplexity", "seconds")
    ]
    qualities = {name: Quality.of(whole[name], whole["absmax"]) for name in whole}
    rows += [(name, *quality.row(), f"{costs[name]:.0f}") for name, quality in qualities.items()]
    figures = {
        "positions": sum(len(piece) - 1 for piece in pieces),
        "profile_tokens": count,
        "seconds": costs,
        "qualities": {name: asdict(quality) for name, quality in qualities.items()},
    }
    run.report(rows, figures)


if __name__ == "__main__":
    main()
