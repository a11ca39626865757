"""What sharing blocks does to a model's answers, and what each path costs.

For each number of blocks and each rank: the bundles' size, their relative error, and the model's
next-token distributions against the original's, in float32, in the same run: the KL divergence in
nats, KL(original || shared), whether both put the same token first, and the text's perplexity. The
weights are rebuilt on the host; the other paths compute the same products.

`--paths` measures those instead: milliseconds of one decode step's projections, one vector through
the projections of two block groups, from plain weights, factored, and rebuilt in every step.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph.weights import load_weights
from numpy.typing import NDArray
from tokenizers import Tokenizer

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.decoder_shapes import DecoderShapes
from attnquant.divergence import chunks, compare, standard_error
from attnquant.nn.tensors import State, from_numpy
from attnquant.nn.weights import decoder_weights
from attnquant.projections import ProjectionKey, fused_groups, group_module
from attnquant.report import Point, measure
from attnquant.settings import Settings
from attnquant.theta import ThetaBundle, decompose_decoder, effective_weight
from bench.common import EVALUATION_TEXT, Run, Sample, alternate, environment
from bench.common import seconds as seconds_of
from bench.projections_graph import Projections
from bench.quality import load

PATHS: Mapping[str, dict[str, Any]] = {
    "plain weights": {},
    "factored": {"precompute_outside": False, "gemm": "factored"},
    "rebuilt in the graph": {"precompute_outside": False, "gemm": "dense"},
}
STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Puts rebuilt weights in the place of a graph's dense ones.

    Attributes:
        bundles: of every projection.
        rank: how many of their corrections' columns are used.
    """

    bundles: Mapping[ProjectionKey, ThetaBundle]
    rank: int

    def __call__(self, state: State, shapes: DecoderShapes) -> State:
        """The state with every projection's weight replaced."""
        state = dict(state)
        for layer, layer_shapes in enumerate(shapes.layers):
            for roles in fused_groups(tuple(layer_shapes.projections)):
                name = f"{group_module(layer, roles)}.weight"
                keys = [ProjectionKey(layer=layer, role=role) for role in roles]
                stacked = np.concatenate([self._weight(key) for key in keys])
                state[name] = from_numpy(stacked, DType.float32, name)
        return state

    def _weight(self, key: ProjectionKey) -> NDArray[np.float32]:
        bundle = self.bundles[key]
        cut = replace(bundle, u=bundle.u[:, : self.rank], v=bundle.v[:, : self.rank])
        weight: NDArray[np.float32] = effective_weight(cut, np.float32)
        return weight


def quality(run: Run, options: Any, directory: Path) -> None:
    """The table of size, error and divergence."""
    checkpoint = Checkpoint.open(directory)
    shapes = DecoderShapes.from_config(checkpoint.config)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens = tokenizer.encode(EVALUATION_TEXT.read_text(encoding="utf-8")).ids
    pieces = chunks(tokens, options.chunk)[: options.chunks]
    report = measure(directory, blocks=options.blocks, ranks=options.ranks)
    original = load(directory)
    references = [original(piece)[:-1] for piece in pieces]
    del original

    def figures(logits: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
        pairs = zip(references, logits, pieces, strict=True)
        return np.concatenate([compare(p, q, piece[1:]) for p, q, piece in pairs], axis=1)

    rows: list[tuple[str, ...]] = [
        ("blocks", "rank", "size", "error", "KL, nats", "top-1", "perplexity")
    ]
    whole = figures(references)
    rows.append((str(len(shapes.layers)), "0", "1.000", "0", "0", "1.000", _perplexity(whole)))
    results = []
    for blocks in dict.fromkeys(point.blocks for point in report.points):
        groups = decompose_decoder(
            shapes.projections,
            lambda key: checkpoint.array(f"model.{key.module}.weight"),
            blocks=blocks,
            rank=max(options.ranks),
        )
        bundles = {key: bundle for group in groups for key, bundle in group.items()}
        for point in (point for point in report.points if point.blocks == blocks):
            gc.collect()  # The last model is a gigabyte.
            model = load(directory, Shared(bundles=bundles, rank=point.rank))
            found = figures([model(piece)[:-1] for piece in pieces])
            del model
            rows.append(_row(point, report.ratio(point), found))
            results.append(_result(point, report.ratio(point), found))
    run.report(
        rows,
        {
            "positions": sum(len(piece) - 1 for piece in pieces),
            "unshared_perplexity": float(np.exp(whole[2].mean())),
            "points": results,
        },
    )


def paths(run: Run, options: Any, directory: Path) -> None:
    """The table of milliseconds."""
    config = Checkpoint.open(directory).config
    shapes = DecoderShapes.from_config(config)
    blocks, rank = options.blocks[0], options.ranks[0]
    layers = range(2 * len(shapes.layers) // blocks)
    session = InferenceSession(devices=[CPU()])
    generator = np.random.default_rng(0)
    sides = {}
    for name, path in PATHS.items():
        tensors = dict(load_weights(sorted(directory.glob("*.safetensors"))).items())
        settings = Settings(blocks=blocks, rank=rank, **path)
        state = decoder_weights(tensors, config=config, dtype=DType.float32, settings=settings)
        module = Projections(shapes, layers, state)
        model = session.load(module.graph(), weights_registry=module.state_dict())
        inputs = [generator.standard_normal((1, width), np.float32) for width in module.widths]

        def steps(model: Any = model, inputs: Any = inputs) -> float:
            return seconds_of(lambda: [model.execute(*inputs) for _ in range(STEPS)]) / STEPS

        sides[name] = steps
    times = alternate(sides, options.rounds)
    samples = {name: Sample.of([1e3 * value for value in found]) for name, found in times.items()}
    rows = [("path", f"ms, {len(layers)} layers"), *((n, s.show(2)) for n, s in samples.items())]
    figures = {name: asdict(sample) for name, sample in samples.items()}
    run.report(rows, {"blocks": blocks, "rank": rank, "layers": len(layers), "ms": figures})


def _row(point: Point, ratio: float, figures: NDArray[np.float64]) -> tuple[str, ...]:
    kl, top1, _ = figures
    return (
        str(point.blocks),
        str(point.rank),
        f"{ratio:.3f}",
        f"{point.error:.4f}",
        f"{kl.mean():.3f} ± {standard_error(kl):.3f}",
        f"{top1.mean():.3f}",
        _perplexity(figures),
    )


def _result(point: Point, ratio: float, figures: NDArray[np.float64]) -> dict[str, float]:
    kl, top1, nll = figures
    return {
        "blocks": point.blocks,
        "rank": point.rank,
        "bytes": point.nbytes,
        "ratio": ratio,
        "error": point.error,
        "kl": float(kl.mean()),
        "kl_error": standard_error(kl),
        "top1": float(top1.mean()),
        "log_perplexity": float(nll.mean()),
    }


def _perplexity(figures: NDArray[np.float64]) -> str:
    return f"{np.exp(figures[2].mean()):.4g}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run = Run("theta", __doc__)
    run.parser.add_argument("--blocks", type=int, nargs="+", default=[9, 6])
    run.parser.add_argument("--ranks", type=int, nargs="+", default=[0, 32, 64])
    run.parser.add_argument("--chunk", type=int, default=512, help="tokens a chunk, with <bos>")
    run.parser.add_argument("--chunks", type=int, default=1, help="only the first so many")
    run.parser.add_argument("--rounds", type=int, default=7, help="of `--paths`")
    run.parser.add_argument("--paths", action="store_true", help="what each path costs, instead")
    options = run.parse(arguments)
    # The settings are this command's to choose.
    for name in os.environ.keys() - environment().keys():
        del os.environ[name]
    (paths if options.paths else quality)(run, options(options.model))


if __name__ == "__main__":
    main()
