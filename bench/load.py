"""How long Gemma 4 31B takes to load with every projection in NVFP4, and how much memory.

The 31B is 62 GB; this writes a checkpoint of its shapes with few layers, random weights in
bfloat16, to a temporary directory (a gigabyte a layer, and 2.8 GB of embedding), loads and
quantizes it, and works the whole model out: the time grows with the quantized weights, the packed
result with the layers, and what lies beside it, while one projection is packed after the other,
does not grow. Memory is the process's own, without the mapped file. Linux only.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from max.dtype import DType
from max.graph.weights import load_weights
from numpy.typing import NDArray

from attnquant.checkpoint.safetensors import TensorSpec
from attnquant.checkpoint.writer import TensorGroup, write_checkpoint
from attnquant.decoder_shapes import DecoderShapes
from attnquant.kernels.codec import encode
from attnquant.nn.weights import decoder_weights
from attnquant.nvfp4.coverage import coverage_of
from attnquant.nvfp4.format import packed_bytes
from attnquant.settings import Settings
from bench.common import Run, seconds

QUANTIZED = Settings(quant="nvfp4")
WHOLE_LAYERS = 60
_SAMPLE_SECONDS = 0.002

T = TypeVar("T")


def config(layers: int) -> dict[str, Any]:
    """The 31B's config.json with so many layers, the last and every sixth of full attention."""
    full = [(index + 1) % 6 == 0 or index == layers - 1 for index in range(layers)]
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            "attention_k_eq_v": True,
            "enable_moe_block": False,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_size": 5376,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 21504,
            "layer_types": ["full_attention" if one else "sliding_attention" for one in full],
            "num_attention_heads": 32,
            "num_global_key_value_heads": 4,
            "num_hidden_layers": layers,
            "num_key_value_heads": 16,
            "num_kv_shared_layers": 0,
            "vocab_size": 262144,
        },
    }


def weights_of(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, NDArray[Any]]]:
    """One tensor: random projections; nothing looks at the values of the others."""
    if name.endswith("_proj.weight"):
        values = np.random.default_rng(0).standard_normal(shape, np.float32)
        yield name, (values * np.float32(0.02)).astype(ml_dtypes.bfloat16)
    else:
        yield name, np.zeros(shape, ml_dtypes.bfloat16)


def write(directory: Path, shapes: DecoderShapes) -> Path:
    """Writes the checkpoint; returns its file of weights."""
    groups = [
        TensorGroup(
            specs={f"model.language_model.{name}": TensorSpec(dtype="BF16", shape=shape)},
            make=partial(weights_of, f"model.language_model.{name}", shape),
        )
        for name, shape in shapes.tensors.items()
    ]
    target = directory / "model"
    size = sum(group.nbytes for group in groups)
    write_checkpoint(target, groups, files={}, recipe={}, shard_bytes=size)
    return target / "model.safetensors"


def own_bytes() -> int:
    """Memory of this process that is no file's."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("bench.load: /proc/self/status has no RssAnon; this needs Linux")


def with_peak(run: Callable[[], T]) -> tuple[T, int]:
    """What a call returns, and by how much this process's own memory was larger meanwhile."""
    before, samples, done = own_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            samples.append(own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return run(), max(samples) - before
    finally:
        done.set()
        watcher.join()


def measure(file: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Loads a checkpoint, quantizes all of its projections, and works the 31B out."""
    shapes, whole = (DecoderShapes.from_config(one) for one in (fields, config(WHOLE_LAYERS)))
    encode(np.zeros((16, 16), np.float32), scales="mse")  # compiles the encoder
    state: dict[str, Any] = {}

    def load() -> None:
        tensors = dict(load_weights([file]).items())
        state.update(
            decoder_weights(tensors, config=fields, dtype=DType.bfloat16, settings=QUANTIZED)
        )

    taken, peak = with_peak(partial(seconds, load))
    part, all_of_it = (_sizes(one) for one in (shapes, whole))
    rate = taken / part["weights"]
    beside = peak - part["packed"]
    return {
        "layers": len(shapes.layers),
        "projections": part["projections"],
        "seconds": taken,
        "seconds_per_100m": rate * 1e8,
        "packed_bytes": part["packed"],
        "peak_bytes": peak,
        "beside_bytes": beside,
        "beside_largest_projections": beside / part["largest"],
        "whole": {
            "projections": all_of_it["projections"],
            "seconds": rate * all_of_it["weights"],
            "packed_bytes": all_of_it["packed"],
            "peak_bytes": all_of_it["packed"] + beside,
        },
    }


def _sizes(shapes: DecoderShapes) -> dict[str, int]:
    """Of the quantized projections: how many, their weights, packed bytes, the largest's bytes."""
    quantized = [shapes.projections[key] for key in coverage_of(QUANTIZED, shapes, ()).quantized]
    return {
        "projections": len(quantized),
        "weights": sum(rows * columns for rows, columns in quantized),
        "packed": sum(packed_bytes(*shape) for shape in quantized),
        "largest": max(2 * rows * columns for rows, columns in quantized),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run = Run("load", __doc__)
    run.parser.add_argument("--layers", type=int, default=2, help="of the checkpoint")
    run.parser.add_argument("--directory", type=Path, help="where to write it for the time being")
    options = run.parse(arguments)
    fields = config(options.layers)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        file = write(Path(folder), DecoderShapes.from_config(fields))
        figures = measure(file, fields)
    whole = figures["whole"]
    rows: list[tuple[str, ...]] = [
        ("", "projections", "seconds", "packed GB", "peak GB"),
        *(
            (
                name,
                str(one["projections"]),
                f"{one['seconds']:.1f}",
                f"{one['packed_bytes'] / 1e9:.3f}",
                f"{one['peak_bytes'] / 1e9:.3f}",
            )
            for name, one in (
                (f"{options.layers} layers, measured", figures),
                (f"{WHOLE_LAYERS} layers, worked out", whole),
            )
        ),
    ]
    run.report(rows, figures)
    print(
        f"Beside the packed result: {figures['beside_bytes'] / 1e6:.0f} MB, "
        f"{figures['beside_largest_projections']:.2f} times the largest projection in bfloat16."
    )


if __name__ == "__main__":
    main()
