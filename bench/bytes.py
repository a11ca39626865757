"""Bytes that one decoded token reads, by what is in NVFP4: exact, from shapes alone.

What decode speed is bounded by where a token waits for memory. Two decoders: the real Gemma 3 270M,
and Gemma 4 31B, of which no weight is needed. "MLP only" is the coverage of NVIDIA's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from attnquant.decoder_shapes import DecoderShapes
from attnquant.nvfp4.accounting import format_bytes, token_bytes
from attnquant.nvfp4.coverage import Coverage
from bench.common import Run
from tests.configs import gemma3_270m, gemma4_31b

MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "Gemma 3 270M": gemma3_270m,
    "Gemma 4 31B": gemma4_31b,
}


def coverages(shapes: DecoderShapes) -> dict[str, Coverage]:
    """What is in NVFP4, from nothing to everything."""
    every = Coverage.of(shapes.projections)
    return {
        "nothing": Coverage.none(shapes.projections),
        "MLP only": Coverage.of(shapes.projections, ignore=("self_attn",)),
        "attention only": Coverage.of(shapes.projections, ignore=("mlp",)),
        "every projection": every,
        "every projection and the head": replace(every, lm_head=True),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run = Run("bytes", __doc__)
    run.parse(arguments)
    rows: list[tuple[str, ...]] = [("model, in NVFP4", "bytes per token", "ratio")]
    models: dict[str, Any] = {}
    for model, config in MODELS.items():
        shapes = DecoderShapes.from_config(config())
        sizes = {name: token_bytes(shapes, one) for name, one in coverages(shapes).items()}
        whole = sizes["nothing"].total
        for name, size in sizes.items():
            rows.append(
                (f"{model}, {name}", format_bytes(size.total), f"{whole / size.total:.2f}x")
            )
        models[model] = {name: asdict(s) | {"total": s.total} for name, s in sizes.items()}
    run.report(rows, {"bytes_per_token": models})


if __name__ == "__main__":
    main()
