"""Makes the golden files: `python -m tests.golden.make_golden [tiny] [demo] [CASE ...]`.

Run it from the repository's root with the `parity` extra installed, and only when a case, a prompt
or the demo checkpoint has changed on purpose.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from tests.golden import reference
from tests.golden.data import EVALUATION_TEXT, HERE, TEXTS, fingerprint, relative_error
from tests.tiny import gemma4, prompts, tokenizer
from tests.tiny.cases import CASES
from tests.tiny.checkpoint import TinyCheckpoint
from tests.tiny.gemma4_drafter import DRAFTERS

# A float32 implementation that is as right as the tests ask for does not flip a larger lead.
SMALLEST_LEAD = 2e-3
SMALLEST_CHANGE = 1e-2
STOP_TOKENS = {tokenizer.EOS, tokenizer.END_OF_TURN}

DEMO_GREEDY_TOKENS = 64
DEMO_TOP = 64
DEMO_VOCAB_IDS = 4096


def dtype_of(case: TinyCheckpoint) -> torch.dtype:
    """The reference's. The tiny Gemma 4 magnify every rounding of float32 some thousand times."""
    return torch.float64 if isinstance(case, gemma4.TinyGemma4) else torch.float32


def tiny(case: TinyCheckpoint, directory: Path) -> dict[str, Any]:
    """The arrays of one tiny checkpoint's golden file; `directory` holds the checkpoint.

    Raises:
        RuntimeError: a greedy continuation is a poor test: a near tie, a stop token, a placeholder
            (transformers embeds padding for one), or monotonous.
    """
    model = reference.load(directory, dtype_of(case))
    arrays: dict[str, Any] = {
        "fingerprint": fingerprint(directory),
        "lengths": np.asarray(prompts.LENGTHS, np.int32),
    }
    for length in prompts.LENGTHS:
        tokens = prompts.prompt(case.ordinary_vocab, length)
        arrays[f"tokens_{length}"] = np.asarray(tokens, np.int32)
        arrays[f"last_{length}"] = np.float32(reference.logits(model, tokens)[0])
        if length == prompts.ALL_POSITIONS_LENGTH:
            arrays[f"every_{length}"] = np.float32(reference.logits(model, tokens, last=0))
        if length in prompts.GREEDY_LENGTHS:
            chosen, lead = reference.greedy(model, tokens, prompts.GREEDY_TOKENS)
            forbidden = STOP_TOKENS | case.placeholders
            if lead < SMALLEST_LEAD or forbidden & set(chosen) or len(set(chosen)) < 4:
                raise RuntimeError(f"{case.name}: choose another seed; {lead:.4f}, {chosen}")
            arrays[f"greedy_{length}"] = np.asarray(chosen, np.int32)
    if isinstance(case, gemma4.TinyGemma4) and case.vision:
        arrays |= image_arrays(case, model)
    if case.name in DRAFTERS:
        arrays |= drafter_arrays(case, model, directory / "drafter")
    return arrays


def drafter_arrays(case: TinyCheckpoint, model: Any, directory: Path) -> dict[str, Any]:
    """The arrays of what its drafter guesses; `directory` is where to write that.

    Raises:
        RuntimeError: a guess hangs on a near tie.
    """
    drafter = reference.load_drafter(DRAFTERS[case.name].write(directory), dtype_of(case))
    arrays: dict[str, Any] = {"drafter_fingerprint": fingerprint(directory)}
    for length in prompts.LENGTHS:
        tokens = prompts.prompt(case.ordinary_vocab, length)
        chosen, lead = reference.drafts(model, drafter, tokens, prompts.DRAFTED_TOKENS)
        if lead < SMALLEST_LEAD:
            raise RuntimeError(f"{case.name}: choose another seed for its drafter; {lead:.4f}")
        arrays[f"drafts_{length}"] = np.asarray(chosen, np.int32)
    return arrays


def image_arrays(case: gemma4.TinyGemma4, model: Any) -> dict[str, Any]:
    """The arrays of the prompt with images.

    Raises:
        RuntimeError: as `tiny`; or the logits would be almost the same for other images.
    """
    tokens = gemma4.image_prompt(case)
    last = reference.image_logits(model, tokens, gemma4.IMAGES)
    others = reference.image_logits(model, tokens, gemma4.IMAGES[::-1])
    if relative_error(others, last) < SMALLEST_CHANGE:
        raise RuntimeError(f"{case.name}: the images hardly matter; choose another seed")
    chosen: list[int] = []
    while len(chosen) < prompts.IMAGE_GREEDY_TOKENS:
        logits = reference.image_logits(model, tokens + chosen, gemma4.IMAGES)
        best = np.sort(logits)[-2:]
        if best[1] - best[0] < SMALLEST_LEAD:
            raise RuntimeError(f"{case.name}: choose another seed; a near tie after the images")
        chosen.append(int(logits.argmax()))
    return {
        "image_tokens": np.asarray(tokens, np.int32),
        "image_last": np.float32(last),
        "image_greedy": np.asarray(chosen, np.int32),
    }


def encoder(directory: Path) -> Callable[[Path], list[int]]:
    """What makes token ids of a text file: `<bos>` first, without the newline at its end."""
    loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True)

    def encode(path: Path) -> list[int]:
        ids: list[int] = loaded.encode(path.read_text(encoding="utf-8").rstrip("\n"))
        return ids

    return encode


def demo(directory: Path) -> dict[str, Any]:
    """The arrays of the demo checkpoint's golden file.

    Raises:
        RuntimeError: a greedy continuation hangs on a near tie.
    """
    model, encode = reference.load(directory), encoder(directory)
    arrays: dict[str, Any] = {"fingerprint": fingerprint(directory)}
    full = {}
    for path in sorted(set(TEXTS.glob("*.txt")) - {EVALUATION_TEXT}):
        tokens = encode(path)
        chosen, lead = reference.greedy(model, tokens, DEMO_GREEDY_TOKENS)
        print(f"{path.stem}: {len(tokens)} tokens, smallest lead {lead:.4f}")
        if lead < SMALLEST_LEAD:
            raise RuntimeError(f"{path.name}: a near tie ({lead:.4f}); change the text a little")
        values = reference.logits(model, tokens)[0].astype(np.float64)
        full[path.stem] = values
        arrays[f"tokens_{path.stem}"] = np.asarray(tokens, np.int32)
        arrays[f"greedy_{path.stem}"] = np.asarray(chosen, np.int32)
        arrays[f"logsumexp_{path.stem}"] = np.logaddexp.reduce(values)
        arrays[f"norm_{path.stem}"] = np.linalg.norm(values)
    best = np.unique([np.argsort(values)[-DEMO_TOP:] for values in full.values()])
    spread = np.linspace(0, len(values) - 1, DEMO_VOCAB_IDS - len(best)).astype(np.int64)
    vocab_ids = np.union1d(best, spread)
    for name, values in full.items():
        arrays[f"last_{name}"] = values[vocab_ids].astype(np.float32)
    return arrays | {
        "names": np.asarray(list(full)),
        "vocab_ids": vocab_ids.astype(np.int32),
        "evaluation_tokens": np.asarray(encode(EVALUATION_TEXT), np.int32),
    }


def main(what: list[str]) -> None:
    """Makes the files of the named kinds and tiny cases, or all."""
    for case in CASES.values():
        if {"tiny", case.name} & set(what) or not what:
            with tempfile.TemporaryDirectory() as folder:
                np.savez(HERE / f"tiny-{case.name}.npz", **tiny(case, case.write(Path(folder))))
    if "demo" in what or not what:
        from attnquant.demo import prepare_demo

        np.savez(HERE / "demo.npz", **demo(prepare_demo()))


if __name__ == "__main__":
    main(sys.argv[1:])
