"""Coverage-guided fuzzing of what reads checkpoints: headers, the index, config.json, all together.

    python -m fuzz.checkpoint [--seconds 120] [--keep]

Any bytes must either be read, or end in one `AttnquantError` of one printable line. A run begins
with `fuzz/corpus/checkpoint`; with `--keep`, inputs that reach new code are added to it. An input
that fails is written to the current directory, and the exit status is not 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

try:
    import atheris
except ModuleNotFoundError:
    sys.exit(
        "fuzz.checkpoint: found no atheris, which has wheels for some versions of Python: "
        "pip install -e '.[fuzz]'"
    )

with atheris.instrument_imports(include=["attnquant", "json"]):
    from tests.checkpoint.fuzzing import SEEDS, Directories, open_any

HERE = Path(__file__).parent
CORPUS = HERE / "corpus" / "checkpoint"
# Beyond this an input finds nothing new, and takes longer.
MOST_BYTES = 2048


def main() -> int:
    """Fuzzes until the time is over, or something other than our error escapes."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.checkpoint", description=__doc__)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--keep", action="store_true", help="add to the corpus")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        seeds, found = Path(name) / "seeds", Path(name) / "found"
        for directory in (seeds, found):
            directory.mkdir()
        for number, seed in enumerate(SEEDS):
            (seeds / str(number)).write_bytes(seed)
        # libFuzzer adds to the first directory, and ends the process that it runs in.
        corpora = [CORPUS, seeds] if options.keep else [found, CORPUS, seeds]
        child = os.fork()
        if child == 0:
            directories = Directories(Path(name) / "files")
            arguments = [
                sys.argv[0],
                f"-dict={HERE / 'checkpoint.dict'}",
                f"-max_len={MOST_BYTES}",
                f"-max_total_time={options.seconds}",
            ]
            atheris.Setup(
                [*arguments, *map(str, corpora)], lambda data: open_any(data, directories) and None
            )
            atheris.Fuzz()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
