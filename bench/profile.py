"""What a profile of random tokens costs: seconds, memory, and for Gemma 4 31B, worked out, FLOPs.

A profile (`ATTNQUANT_QUANT_SCALES=profile`) is one pass of random tokens through the decoder, one
layer at a time. This makes the model's, and that of a checkpoint of the 31B's shapes with few
layers and random weights, as `bench.load` writes it; the whole 31B's seconds are worked out by the
FLOPs. Compiling, which MAX caches, does not count. Memory is the process's own, without mapped
files, at its peak beyond what it was before: a layer's weights as the graph takes them, the hidden
states of all sequences, and what remains is the layer's activations. Linux only.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from max.driver import accelerator_count

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.decoder_shapes import DecoderShapes, LayerShapes
from attnquant.demo import checkpoint_directory
from attnquant.encoder import loaded_decoder
from attnquant.nvfp4.profile import SEQUENCE_TOKENS
from attnquant.settings import Settings
from bench.common import Run, seconds
from bench.load import WHOLE_LAYERS, config, with_peak, write


def flops(layers: Sequence[LayerShapes], tokens: int) -> int:
    """Of a pass of so many tokens, in sequences of 512: projections, and causal attention.

    Two for each weight and token, and, for each channel of the queries, four for each pair of a
    token and one that it sees.
    """
    lengths = [min(SEQUENCE_TOKENS, tokens - at) for at in range(0, tokens, SEQUENCE_TOKENS)]
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return sum(
        2 * tokens * _weights(layer) + 4 * pairs * layer.projections["q_proj"][0]
        for layer in layers
    )


def _weights(layer: LayerShapes) -> int:
    return sum(rows * columns for rows, columns in layer.projections.values())


def measure(directory: Path, tokens: int) -> dict[str, Any]:
    """Profiles a checkpoint once to compile, and once more."""
    checkpoint = Checkpoint.open(directory)
    shapes = DecoderShapes.from_config(checkpoint.config)
    decoder = loaded_decoder(checkpoint, shapes)
    decoder.make_profile(SEQUENCE_TOKENS)
    gc.collect()
    taken, peak = with_peak(partial(seconds, partial(decoder.make_profile, tokens)))
    width = 2 if accelerator_count() else 4
    return {
        "layers": len(shapes.layers),
        "seconds": taken,
        "flops": flops(shapes.layers, tokens),
        "peak_bytes": peak,
        "layer_bytes": width * max(map(_weights, shapes.layers)),
        "hidden_bytes": width * tokens * shapes.hidden,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run = Run("profile", __doc__)
    run.parser.add_argument("--tokens", type=int, default=Settings.profile_tokens)
    run.parser.add_argument("--layers", type=int, default=2, help="of the 31B's shapes")
    run.parser.add_argument("--directory", type=Path, help="where to write them for the time being")
    options = run.parse(arguments)
    figures = {options.model: measure(checkpoint_directory(options.model), options.tokens)}
    fields = config(options.layers)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        file = write(Path(folder), DecoderShapes.from_config(fields))
        (file.parent / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        part = measure(file.parent, options.tokens)
    figures[f"{options.layers} layers of Gemma 4 31B"] = part
    rows: list[tuple[str, ...]] = [
        ("", "seconds", "TFLOP", "GFLOP/s", "peak MB", "a layer MB", "hidden states MB")
    ]
    rows += [
        (
            name,
            f"{one['seconds']:.1f}",
            f"{one['flops'] / 1e12:.2f}",
            f"{one['flops'] / one['seconds'] / 1e9:.0f}",
            *(f"{one[key] / 1e6:.0f}" for key in ("peak_bytes", "layer_bytes", "hidden_bytes")),
        )
        for name, one in figures.items()
    ]
    whole = flops(DecoderShapes.from_config(config(WHOLE_LAYERS)).layers, options.tokens)
    worked_out = {"flops": whole, "seconds": part["seconds"] * whole / part["flops"]}
    blank = ("",) * 4
    rows.append(
        ("Gemma 4 31B, worked out", f"{worked_out['seconds']:.0f}", f"{whole / 1e12:.0f}", *blank)
    )
    run.report(rows, {"tokens": options.tokens, "profiles": figures, "whole": worked_out})


if __name__ == "__main__":
    main()
