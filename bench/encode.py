"""How fast weights are encoded, and how well: our two encoders beside MAX's host encoder.

Every projection of the checkpoint, as a float32 array in memory (MAX's encoder, NumPy, takes
nothing narrower), goes through MAX's `quantize_nvfp4`, our abs-max encoder and our search, in turn.
Ours check for NaN and infinity, and find the largest magnitude, within the time that is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from max.pipelines.weights.fp4_quantization import FP4Format, quantize_nvfp4
from numpy.typing import NDArray

from attnquant.checkpoint import Checkpoint
from attnquant.demo import checkpoint_directory
from attnquant.kernels.codec import encode, relative_error
from attnquant.nvfp4.format import NVFP4Weight
from attnquant.projections import parse_projection
from bench.common import Run, Sample, alternate, ratio, seconds, show_ratio

PEER = "MAX host encoder"


def max_encode(weight: NDArray[np.float32]) -> NVFP4Weight:
    """MAX's own encoder on the host, NumPy on one core."""
    codes, scales, scale = quantize_nvfp4(weight, FP4Format.NVFP4)
    return NVFP4Weight(
        codes=codes,
        block_scales=scales.reshape(len(weight), -1).view(ml_dtypes.float8_e4m3fn),
        global_scales=np.array([scale], np.float32),
        part_rows=(len(weight),),
    )


ENCODERS: dict[str, Callable[[NDArray[np.float32]], NVFP4Weight]] = {
    PEER: max_encode,
    "absmax": partial(encode, scales="absmax"),
    "mse": partial(encode, scales="mse"),
}


def projections(checkpoint: Checkpoint, layers: int | None) -> Iterator[NDArray[np.float32]]:
    """The projections of the first layers (all of them if None), as float32."""
    for name, info in checkpoint.tensors.items():
        key = parse_projection(name)
        wanted = key is not None and (layers is None or key.layer < layers)
        if wanted and info.numpy_dtype.itemsize > 1:
            yield np.asarray(checkpoint.array(name), np.float32)
            checkpoint.release(name)


def measure(weights: Iterator[NDArray[np.float32]], rounds: int) -> dict[str, Any]:
    """Encodes every weight with every encoder; seconds per 100 M weights, and relative errors."""
    totals = {name: np.zeros(rounds) for name in ENCODERS}
    errors: dict[str, list[float]] = {name: [] for name in ENCODERS}
    count = size = 0
    for weight in weights:
        for name, run in ENCODERS.items():
            errors[name].append(relative_error(weight, run(weight)))
        sides = {name: partial(seconds, partial(run, weight)) for name, run in ENCODERS.items()}
        for name, taken in alternate(sides, rounds, warmups=0).items():
            totals[name] += taken
        count, size = count + 1, size + weight.size
    if not count:
        raise SystemExit("bench.encode: the checkpoint has no unquantized projections")
    times = {name: Sample.of((total * (1e8 / size)).tolist()) for name, total in totals.items()}
    return {
        "projections": count,
        "weights": size,
        "seconds_per_100m": times,
        "times_faster": {name: ratio(times[PEER], times[name]) for name in ENCODERS},
        "mean_relative_error": {name: float(np.mean(errors[name])) for name in ENCODERS},
        "worst_relative_error": {name: max(errors[name]) for name in ENCODERS},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run = Run("encode", __doc__)
    run.parser.add_argument("--rounds", type=int, default=3)
    run.parser.add_argument("--layers", type=int, help="only the first so many layers")
    options = run.parse(arguments)
    checkpoint = Checkpoint.open(checkpoint_directory(options.model))
    figures = measure(projections(checkpoint, options.layers), options.rounds)
    rows = [("encoder", "s per 100 M weights", f"{PEER} / it", "mean error", "worst error")]
    for name in ENCODERS:
        rows.append(
            (
                name,
                figures["seconds_per_100m"][name].show(3),
                "" if name == PEER else show_ratio(figures["times_faster"][name]),
                f"{figures['mean_relative_error'][name]:.4f}",
                f"{figures['worst_relative_error'][name]:.4f}",
            )
        )
    run.report(rows, figures)


if __name__ == "__main__":
    main()
