"""How fast a whole model decodes, and what memory it takes: float32 beside NVFP4.

Each run is the command that a user types, `python run_max.py generate`, in a process of its own;
the times are the ones MAX prints about it, after a warm-up in the same process, and the memory is
the largest resident size of that process, which the operating system keeps. The prompt is the start
of the evaluation text, as long as asked for; one sequence; greedy. The first round, in which MAX
may have to compile, does not count.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from bench.common import (
    EVALUATION_TEXT,
    ROOT,
    Run,
    Sample,
    alternate,
    environment,
    model_directory,
    ratio,
    show_ratio,
)

BASE = "float32"
SIDES: dict[str, dict[str, str]] = {
    BASE: {},
    "NVFP4": {"ATTNQUANT_QUANT": "nvfp4"},
    "NVFP4, head too": {"ATTNQUANT_QUANT": "nvfp4", "ATTNQUANT_QUANT_LM_HEAD": "nvfp4"},
}
MAX_LENGTH = 2048
WARMUP_TOKENS = 8

# `ru_maxrss` is in kibibytes, on macOS in bytes.
MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one process did.

    Attributes:
        prompt: tokens of the prompt.
        first: milliseconds to the first token.
        rate: tokens per second from then on.
        peak: largest resident memory in MB (10^6 bytes).
    """

    prompt: int
    first: float
    rate: float
    peak: float


def prompt_of(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """The start of a text that makes so many tokens, `<bos>` included.

    Raises:
        ValueError: the text has fewer, or the cut makes other tokens.
    """
    encoding = tokenizer.encode(text)
    if len(encoding.ids) < tokens:
        raise ValueError(f"the text has {len(encoding.ids)} tokens, expected {tokens} or more")
    start = text[: encoding.offsets[tokens - 1][1]]
    if len(tokenizer.encode(start).ids) != tokens:
        raise ValueError(f"the text cannot be cut after {tokens} tokens: try one more or one less")
    return start


def parse_report(output: str, peak: float) -> Figures:
    """Reads what `max generate` prints when it is done.

    Raises:
        ValueError: a line is missing.
    """

    def number(pattern: str) -> float:
        match = re.search(rf"^{pattern}: ([\d.]+)", output, re.MULTILINE)
        if match is None:
            raise ValueError(f"`max generate` printed no line like {pattern!r}")
        return float(match[1])

    return Figures(
        prompt=int(number("Prompt size")),
        first=number("Time to first token"),
        rate=number(r"Eval throughput \(token-generation\)"),
        peak=peak,
    )


def generate(directory: Path, prompt: str, tokens: int, variables: dict[str, str]) -> Figures:
    """One process: loads the model, warms up, decodes `tokens` tokens, ends."""
    options = {
        "--model": directory,
        "--prompt": prompt,
        "--max-length": MAX_LENGTH,
        "--max-batch-size": 1,
        "--max-new-tokens": tokens,
        "--num-warmups": WARMUP_TOKENS,
        "--top-k": 1,
    }
    command = [sys.executable, str(ROOT / "run_max.py"), "generate"]
    command += [str(part) for option in options.items() for part in option]
    # The warm-up has the same prompt, which must not come from the cache afterwards.
    command += ["--ignore-eos", "--no-enable-prefix-caching"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=environment(**variables), stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdout is not None
        with process.stdout:
            output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{log.read()}\nbench.decode: `max generate` failed, see above")
    return parse_report(output, usage.ru_maxrss * MAXRSS_UNIT / 1e6)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run = Run("decode", __doc__)
    run.parser.add_argument("--rounds", type=int, default=5)
    run.parser.add_argument("--prompt-tokens", type=int, default=512)
    run.parser.add_argument("--new-tokens", type=int, default=64)
    run.parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    options = run.parse(arguments)
    directory = model_directory(options.model)
    prompt = prompt_of(
        Tokenizer.from_file(str(directory / "tokenizer.json")),
        EVALUATION_TEXT.read_text(encoding="utf-8"),
        options.prompt_tokens,
    )
    runs = alternate(
        {
            side: partial(generate, directory, prompt, options.new_tokens, SIDES[side])
            for side in options.sides
        },
        options.rounds,
    )
    rate = {side: Sample.of([figures.rate for figures in runs[side]]) for side in runs}
    first = {side: Sample.of([figures.first for figures in runs[side]]) for side in runs}
    peak = {side: Sample.of([figures.peak for figures in runs[side]]) for side in runs}

    base = options.sides[0]
    header = ("", "tokens/s", f"/ {base}", "first token ms", f"/ {base}", "peak MB", f"/ {base}")
    rows: list[tuple[str, ...]] = [header]
    ratios: dict[str, dict[str, float | None]] = {}
    for side in runs:
        ratios[side] = {
            name: ratio(sample[side], sample[base])
            for name, sample in (("rate", rate), ("first", first), ("peak", peak))
        }
        shown = ["" if side == base else show_ratio(value) for value in ratios[side].values()]
        cells = (rate[side].show(2), first[side].show(0), peak[side].show(0))
        rows.append((side, *(part for pair in zip(cells, shown, strict=True) for part in pair)))
    figures = {
        "prompt_tokens": runs[base][0].prompt,
        "new_tokens": options.new_tokens,
        "tokens_per_second": rate,
        "first_token_ms": first,
        "peak_mb": peak,
        f"ratio_to_{base}": ratios,
    }
    run.report(rows, figures)


if __name__ == "__main__":
    main()
