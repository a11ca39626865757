"""How fast a whole model decodes, and what memory it takes: ours, and others with the same model.

Each run of ours is the command that a user types, `python run_max.py generate`, in a process of its
own; the times are the ones MAX prints about it, after a warm-up in the same process, and the memory
is the largest resident size of that process, which the operating system keeps. The prompt is the
start of the evaluation text, as long as asked for; one sequence; greedy. The first round, in which
MAX may have to compile, does not count.

Peers are measured in the same way (`bench.peers`), where they are installed: llama.cpp with the
demo's own Q4_K_M file and with Q8_0 made of it, transformers with the same checkpoint. MAX's own
Gemma does not run on a CPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from attnquant.demo import checkpoint_directory
from bench.common import (
    EVALUATION_TEXT,
    ROOT,
    Run,
    Sample,
    alternate,
    environment,
    ratio,
    show_ratio,
)
from bench.peers import demo_gguf

BASE = "float32"
SIDES: dict[str, dict[str, str]] = {
    BASE: {},
    "NVFP4": {"ATTNQUANT_QUANT": "nvfp4"},
    "NVFP4, head too": {"ATTNQUANT_QUANT": "nvfp4", "ATTNQUANT_QUANT_LM_HEAD": "nvfp4"},
}
# Of a theta checkpoint (`--model`), whose weights float32 rebuilds on the host.
THETA_SIDES: dict[str, dict[str, str]] = {
    "factored": {"ATTNQUANT_PRECOMPUTE_OUTSIDE": "0", "ATTNQUANT_GEMM": "factored"},
}
# The module that a peer needs, and what `bench.peers` is asked for.
PEERS: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "llama.cpp Q4_K_M": ("llama_cpp", lambda _: ["llama.cpp", str(demo_gguf("q4_k_m"))]),
    "llama.cpp Q8_0": ("llama_cpp", lambda _: ["llama.cpp", str(demo_gguf("q8_0"))]),
    "transformers float32": ("torch", lambda model: ["transformers", str(model)]),
    "transformers bfloat16": (
        "torch",
        lambda model: ["transformers", str(model), "--dtype", "bfloat16"],
    ),
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
        seconds: from its start to its end.
    """

    prompt: int
    first: float
    rate: float
    peak: float
    seconds: float


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


def parse_report(output: str, *, peak: float, seconds: float) -> Figures:
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
        seconds=seconds,
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
    return _measured(command, variables)


def peer(directory: Path, prompt: str, tokens: int, name: str) -> Figures:
    """The same, by a peer."""
    command = [sys.executable, "-m", "bench.peers", *PEERS[name][1](directory)]
    command += ["--tokenizer", str(directory / "tokenizer.json")]
    command += ["--max-new-tokens", str(tokens), "--num-warmups", str(WARMUP_TOKENS)]
    return _measured(command, {}, prompt)


def _measured(command: list[str], variables: dict[str, str], text: str = "") -> Figures:
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryFile("w+") as stdin:
        stdin.write(text)
        stdin.seek(0)
        begun = time.perf_counter()
        process = subprocess.Popen(
            command,
            env=environment(**variables),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
        )
        assert process.stdout is not None
        with process.stdout:
            output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        taken = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{log.read()}\nbench.decode: {command[1:3]} failed, see above")
    peak = usage.ru_maxrss * MAXRSS_UNIT / 1e6
    return parse_report(output, peak=peak, seconds=taken)


def _installed(model: str) -> list[str]:
    """The peers that can be measured; llama.cpp has a file of the demo alone."""
    return [
        name
        for name, (module, _) in PEERS.items()
        if importlib.util.find_spec(module) and (module != "llama_cpp" or model == "demo")
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run = Run("decode", __doc__)
    run.parser.add_argument("--rounds", type=int, default=5)
    run.parser.add_argument("--prompt-tokens", type=int, default=512)
    run.parser.add_argument("--new-tokens", type=int, default=64)
    run.parser.add_argument(
        "--sides",
        nargs="+",
        choices=[*SIDES, *THETA_SIDES, *PEERS],
        help="all that are installed, for the demo only llama.cpp, unless said; "
        "factored: of a theta checkpoint",
    )
    options = run.parse(arguments)
    directory = checkpoint_directory(options.model)
    prompt = prompt_of(
        Tokenizer.from_file(str(directory / "tokenizer.json")),
        EVALUATION_TEXT.read_text(encoding="utf-8"),
        options.prompt_tokens,
    )
    sides = options.sides or [*SIDES, *_installed(options.model)]
    ours = SIDES | THETA_SIDES
    measures: dict[str, Callable[[], Figures]] = {
        side: partial(generate, directory, prompt, options.new_tokens, ours[side])
        if side in ours
        else partial(peer, directory, prompt, options.new_tokens, side)
        for side in sides
    }
    runs = alternate(measures, options.rounds)
    rate = {side: Sample.of([figures.rate for figures in runs[side]]) for side in runs}
    first = {side: Sample.of([figures.first for figures in runs[side]]) for side in runs}
    peak = {side: Sample.of([figures.peak for figures in runs[side]]) for side in runs}

    base = sides[0]
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
