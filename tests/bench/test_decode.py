"""What is read off `max generate`, and prompts of an exact length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.common import EVALUATION_TEXT
from bench.decode import parse_report, prompt_of

# What MAX 26.7 prints.
OUTPUT = """ a city that is known for its architecture: 3 ms
Prompt size: 512
Output size: 64
Startup time: 1.5270709991455078 ms
Time to first token: 513.8509273529053 ms
Prompt eval throughput (context-encoding): 11.676538234364784 tokens per second
Time per Output Token: 132.0274414554719 ms
Eval throughput (token-generation): 7.574182980265235 tokens per second
Total Latency: 4606.701612472534 ms
"""


def test_the_report_is_read() -> None:
    figures = parse_report(OUTPUT, peak=1234.5, seconds=6.5)
    assert (figures.prompt, figures.peak) == (512, 1234.5)
    assert figures.first == pytest.approx(513.85, abs=0.01)
    assert figures.rate == pytest.approx(7.574, abs=0.001)


@pytest.mark.parametrize("line", ["Prompt size", "Time to first token", "Eval throughput"])
def test_a_missing_line_is_named(line: str) -> None:
    kept = "\n".join(row for row in OUTPUT.splitlines() if not row.startswith(line))
    with pytest.raises(ValueError, match=line):
        parse_report(kept, peak=1.0, seconds=1.0)


@pytest.mark.parametrize("tokens", [2, 100, 512])
def test_prompts_have_the_length_asked_for(
    tiny_directory: Callable[[str], Path], tokens: int
) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_directory("pattern2-scalar") / "tokenizer.json"))
    text = EVALUATION_TEXT.read_text(encoding="utf-8")
    prompt = prompt_of(tokenizer, text, tokens)
    assert text.startswith(prompt) and len(tokenizer.encode(prompt).ids) == tokens


def test_a_text_that_is_too_short_is_refused(tiny_directory: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_directory("pattern2-scalar") / "tokenizer.json"))
    with pytest.raises(ValueError, match="expected 50 or more"):
        prompt_of(tokenizer, "Too short.", 50)
