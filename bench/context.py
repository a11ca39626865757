"""How the time of a decode step grows with context and batch, and how the bytes it reads do.

The model runs in this process: so many sequences of so many tokens are prefilled, then decode steps
are timed, from the batch's inputs to its logits, without tokenizer, sampler and server. The bytes
are the weights' (`attnquant inspect`; bfloat16 tables, float32 projections or NVFP4) once, and each
sequence's keys and values, float32, as far back as each layer looks.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from max.nn.transformer import ReturnLogits
from max.pipelines.context import TextContext
from max.pipelines.context.tokens import TokenBuffer

from attnquant.checkpoint.json_file import read_json_object
from attnquant.decoder_shapes import DecoderShapes
from attnquant.demo import checkpoint_directory
from attnquant.gemma3.model import Gemma3Model
from attnquant.gemma3.weight_adapters import convert_safetensors
from attnquant.nn.loaded import LoadedPipeline, load_pipeline
from attnquant.nvfp4.accounting import token_bytes
from attnquant.nvfp4.coverage import Coverage, coverage_of
from attnquant.settings import Settings
from bench.common import Run, Sample, alternate, environment, ratio, seconds
from bench.decode import SIDES

# Room for the steps behind the longest context.
STEPS = 128
FLOAT32_BYTES = 4


class Batch:
    """Sequences of random tokens in the cache of a loaded model; they may take `STEPS` steps."""

    def __init__(self, loaded: LoadedPipeline, sequences: int, tokens: int, vocab: int) -> None:
        self._model, self._cache = loaded.model, loaded.cache
        generator = np.random.default_rng(0)
        self._contexts = []
        for _ in range(sequences):
            ids = generator.integers(0, vocab, tokens, np.int64)
            context = TextContext(max_length=tokens + STEPS, tokens=TokenBuffer(ids))
            self._cache.claim(context, replica_idx=0)
            self._contexts.append(context)
            self._execute([context])

    def step(self) -> None:
        """Decodes one token of every sequence."""
        self._execute(self._contexts)

    def close(self) -> None:
        """Gives the cache's pages back."""
        for context in self._contexts:
            self._cache.release(context)

    def _execute(self, contexts: list[TextContext]) -> None:
        for context in contexts:
            self._cache.alloc(context).synchronize()
        inputs = self._model.prepare_initial_token_inputs(
            [contexts], self._cache.runtime_inputs([contexts]), return_n_logits=1
        )
        self._model.execute(model_inputs=inputs).logits.to_numpy()
        for context in contexts:
            context.update(1)
            self._cache.step(context)


def load(directory: Path, variables: dict[str, str], *, batch: int, context: int) -> LoadedPipeline:
    """Compiles the checkpoint's graph in float32, on the CPU, under these settings."""
    os.environ.update(variables)
    try:
        return load_pipeline(
            directory,
            Gemma3Model,
            adapter=convert_safetensors,
            return_logits=ReturnLogits.LAST_TOKEN,
            max_length=context + STEPS,
            max_batch_size=batch,
        )
    finally:
        for name in variables:
            del os.environ[name]


def cache_bytes(shapes: DecoderShapes, window: int, context: int) -> int:
    """Keys and values that a step reads of one sequence, in float32."""
    return sum(
        2 * FLOAT32_BYTES * layer.kv_heads * layer.head_dim
        * (min(context, window) if layer.kind == "sliding_attention" else context)
        for layer in shapes.layers
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run = Run("context", __doc__)
    run.parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 1024, 2048])
    run.parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    run.parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    run.parser.add_argument("--rounds", type=int, default=15)
    options = run.parse(arguments)
    for name in os.environ.keys() - environment().keys():
        del os.environ[name]
    directory = checkpoint_directory(options.model)
    config: dict[str, Any] = read_json_object(directory / "config.json")
    shapes = DecoderShapes.from_config(config)
    window = config["sliding_window"]
    weights: dict[str, int] = {}
    for side in options.sides:
        settings = Settings.read(environ=SIDES[side])
        coverage: Coverage = coverage_of(settings, shapes, set())
        weights[side] = token_bytes(shapes, coverage, FLOAT32_BYTES, table_bytes=2).total
    sizes = {"batch": max(options.batches), "context": max(options.contexts)}
    loaded = {side: load(directory, SIDES[side], **sizes) for side in options.sides}

    rows: list[tuple[str, ...]] = [
        ("context", "batch", "", "ms a step", "tokens/s", "MB a step", "GB/s")
    ]
    points: list[dict[str, Any]] = []
    for context in options.contexts:
        for size in options.batches:
            batches = {
                side: Batch(one, size, context, shapes.vocab) for side, one in loaded.items()
            }
            steps: dict[str, Callable[[], float]] = {
                side: partial(seconds, batch.step) for side, batch in batches.items()
            }
            times = {
                side: Sample.of(taken) for side, taken in alternate(steps, options.rounds).items()
            }
            for batch in batches.values():
                batch.close()
            gc.collect()
            for side, time in times.items():
                size_bytes = weights[side] + size * cache_bytes(shapes, window, context)
                points.append(
                    {
                        "context": context,
                        "batch": size,
                        "side": side,
                        "seconds": time,
                        "bytes": size_bytes,
                        "times_faster": ratio(times[options.sides[0]], time),
                    }
                )
                milliseconds = Sample.of([1e3 * value for value in time.values])
                rows.append(
                    (
                        str(context),
                        str(size),
                        side,
                        milliseconds.show(1),
                        f"{size / time.median:.1f}",
                        f"{size_bytes / 1e6:.0f}",
                        f"{size_bytes / time.median / 1e9:.1f}",
                    )
                )
    run.report(rows, {"weights_bytes": weights, "points": points})


if __name__ == "__main__":
    main()
