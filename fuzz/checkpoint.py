"""Coverage-guided fuzzing of the checkpoint reader: header, index and config (needs atheris).

    python fuzz/checkpoint.py -max_total_time=120 -dict=fuzz/checkpoint.dict fuzz/corpus/checkpoint

New inputs that reach new code are added to the corpus; a crash is written to the current directory
and ends the run with an error. All options are libFuzzer's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["attnquant.checkpoint", "json"]):
    from tests.checkpoint.fuzzing import SEEDS, open_any


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for seed in SEEDS:
            open_any(seed, directory)
        atheris.Setup(sys.argv, lambda data: open_any(data, directory) and None)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
