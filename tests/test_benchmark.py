"""What theta bundles take on a disk, and how fast servers are.

`pytest tests/test_benchmark.py -s` prints the sizes, and with `-m serve -k Throughput`, on a GPU,
the throughput of live servers.

Sizes follow from shapes, so every decoder has a row without its weights: the real Gemma 3 270M, and
Gemma 4 31B. They are the bytes of the projections as `python -m attnquant export --blocks B --rank
R` writes them, of a bfloat16 checkpoint, and the same with `--quant nvfp4`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.checkpoint.export_theta import export_theta
from attnquant.checkpoint.theta_layout import bundle_specs
from attnquant.decoder_shapes import DecoderShapes
from attnquant.nvfp4.format import BLOCK_SIZE, packed_bytes
from attnquant.nvfp4.reference import encode
from attnquant.nvfp4.report import align
from attnquant.theta import block_keys
from tests.configs import gemma3_270m, gemma4_31b
from tests.serve.needs import served_model, skip_without
from tests.serve.throughput import Load, Side, measure, table
from tests.tiny.gemma3 import CASES

RANKS = (0, 16, 32, 64)
TABLES: dict[str, tuple[Callable[[], dict[str, Any]], Sequence[int]]] = {
    "Gemma 3 270M": (gemma3_270m, (18, 9, 6, 3, 1)),
    "Gemma 4 31B": (gemma4_31b, (60, 30, 20, 10, 2)),
}

# The activation scale that ModelOpt's layout stores beside a weight, and a bundle does not.
INPUT_SCALE = 4


def bundle_bytes(shapes: DecoderShapes, blocks: int, rank: int, *, packed: bool = False) -> int:
    """Bytes of all projections' bundles."""
    total, projections = 0, shapes.projections
    for keys in block_keys(projections, blocks):
        shape = projections[keys[0]]
        packs = packed and shape[1] % BLOCK_SIZE == 0
        if len(keys) > 1:
            names = [str(key.layer) for key in keys]
            specs = bundle_specs(names, shape, rank, "BF16", packed=packs)
            total += sum(spec.nbytes for spec in specs.values())
        else:
            total += packed_bytes(*shape) + INPUT_SCALE if packs else 2 * shape[0] * shape[1]
    return total


class TestThetaBundleSize:
    @pytest.mark.parametrize("name", TABLES)
    def test_size_against_blocks_and_rank(self, name: str) -> None:
        config, counts = TABLES[name]
        shapes = DecoderShapes.from_config(config())
        whole = bundle_bytes(shapes, counts[0], 0)
        assert whole == 2 * sum(rows * columns for rows, columns in shapes.projections.values())
        rows: list[tuple[str, ...]] = [("blocks", "rank", "bytes", "ratio", "NVFP4", "ratio")]
        sizes: dict[tuple[int, int], int] = {}
        for blocks in counts:
            for rank in RANKS if blocks < counts[0] else (0,):
                size = sizes[blocks, rank] = bundle_bytes(shapes, blocks, rank)
                packed = bundle_bytes(shapes, blocks, rank, packed=True)
                assert packed < size
                figures = (f"{size}", f"{size / whole:.4f}", f"{packed}", f"{packed / whole:.4f}")
                rows.append((str(blocks), str(rank), *figures))
        print(f"\n{name}: {whole} bytes of projections", *align(rows), sep="\n")
        for (blocks, rank), size in sizes.items():
            # Fewer blocks are smaller, and so is a smaller rank.
            others = sizes.items()
            assert all(size > other for (b, r), other in others if b < blocks and r == rank)
            assert all(size > other for (b, r), other in others if b == blocks and r < rank)

    @pytest.mark.parametrize("packed", [False, True], ids=["bf16", "nvfp4"])
    @pytest.mark.parametrize(("blocks", "rank"), [(1, 0), (2, 8), (3, 64)])
    def test_the_size_is_what_an_export_writes(
        self,
        blocks: int,
        rank: int,
        packed: bool,
        tiny_directory: Callable[[str], Path],
        tmp_path: Path,
    ) -> None:
        case = CASES["pattern2-scalar"]
        source, target = tiny_directory(case.name), tmp_path / "theta"
        export_theta(
            source,
            target,
            blocks=blocks,
            rank=rank,
            quant="nvfp4" if packed else "none",
            encode=partial(encode, scales="absmax"),
            recipe={},
        )
        written = sum(
            info.nbytes for name, info in Checkpoint.open(target).tensors.items() if "_proj" in name
        )
        shapes = DecoderShapes.from_config(case.config())
        assert written == bundle_bytes(shapes, blocks, rank, packed=packed)


NVFP4 = {"ATTNQUANT_QUANT": "nvfp4"}
SIDES = {
    "MAX's own, bf16": Side(builtin=True),
    "attnquant, bf16": Side(),
    "MLP in NVFP4": Side(variables=NVFP4 | {"ATTNQUANT_QUANT_IGNORE": "self_attn"}),
    "every projection in NVFP4": Side(variables=NVFP4),
}
SESSIONS = 5


@pytest.mark.serve
class TestThroughput:
    def test_tokens_per_second_of_live_servers(self, tmp_path: Path) -> None:
        model = served_model()
        skip_without(model)
        load = Load(model=model, served=model, tokenizer=model, options=("--max-length", "4096"))
        rates = measure(load, SIDES, SESSIONS, tmp_path)
        print(f"\n{model}, {SESSIONS} sessions a side", *table(rates), sep="\n")
        assert all(len(values) == SESSIONS and min(values) > 0 for values in rates.values())
