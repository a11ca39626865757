"""Golden logits: what they hold, how they are read, and what equality means.

`make_golden.py` made the `.npz` files beside this module with transformers (see `reference.py`).
They are small, so that plain `pytest` compares against the reference without torch; the tests in
`tests/parity` make them anew and compare.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

HERE = Path(__file__).parent
TEXTS = HERE / "texts"
EVALUATION_TEXT = TEXTS / "evaluation.txt"


def relative_error(actual: ArrayLike, expected: ArrayLike) -> float:
    """||actual - expected|| / ||expected|| over all elements, in float64.

    Raises:
        ValueError: the shapes differ, or a value is not finite: neither is a matter of degree.
    """
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if a.shape != e.shape:
        raise ValueError(f"shape {a.shape} against {e.shape}")
    if not (np.isfinite(a).all() and np.isfinite(e).all()):
        raise ValueError("NaN or infinity")
    return float(np.linalg.norm(a - e) / np.linalg.norm(e))


def fingerprint(directory: Path) -> str:
    """A hash over a checkpoint's tensors: names, dtypes, shapes and bytes, however sharded."""
    tensors = []
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            start = int.from_bytes(file.read(8), "little") + 8
            header = json.loads(file.read(start - 8))
        header.pop("__metadata__", None)
        tensors += [(name, path, start, entry) for name, entry in header.items()]
    digest = hashlib.sha256()
    for name, path, start, entry in sorted(tensors, key=lambda tensor: tensor[0]):
        begin, end = entry["data_offsets"]
        digest.update(f"{name} {entry['dtype']} {entry['shape']} ".encode())
        digest.update(np.memmap(path, np.uint8, "r", start + begin, (end - begin,)))
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class TinyPrompt:
    """One prompt of a tiny checkpoint and what the reference makes of it, all float32."""

    tokens: list[int]
    last: NDArray[np.float32]
    """[vocab]: logits after the last token."""
    every: NDArray[np.float32] | None
    """[len(tokens), vocab]: logits after each token, for one prompt."""
    greedy: list[int] | None
    """32 greedy tokens, for some prompts; none is a stop token, and no choice is a near tie."""
    drafts: list[int] | None = None
    """What the checkpoint's drafter guesses after the first of them, if it has one."""


@dataclass(frozen=True, kw_only=True)
class TinyGolden:
    """The reference's answers for one tiny checkpoint."""

    fingerprint: str
    prompts: tuple[TinyPrompt, ...]
    image: TinyPrompt | None
    """The prompt with images, for a checkpoint that has a vision tower."""
    drafter_fingerprint: str | None
    """Of the checkpoint's drafter, if it has one."""


@dataclass(frozen=True, kw_only=True)
class DemoPrompt:
    """One prompt of the demo checkpoint and what the reference makes of it."""

    name: str
    tokens: list[int]
    last: NDArray[np.float32]
    """[len(vocab_ids)]: logits after the last token, for the ids that are kept."""
    logsumexp: float
    """log(sum(exp(logits))) over the whole vocabulary."""
    norm: float
    """L2 norm of the logits over the whole vocabulary."""
    greedy: list[int]
    """64 greedy tokens."""


@dataclass(frozen=True, kw_only=True)
class DemoGolden:
    """The reference's answers for the demo checkpoint, Gemma 3 270M."""

    fingerprint: str
    vocab_ids: NDArray[np.int32]
    """The kept ids: the 64 best of every prompt, and others spread over the vocabulary."""
    prompts: tuple[DemoPrompt, ...]
    evaluation_tokens: list[int]
    """`texts/evaluation.txt` as token ids, `<bos>` first."""


def _read(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def load_tiny(name: str) -> TinyGolden:
    """The golden answers of `tests.tiny.cases.CASES[name]`."""
    arrays = _read(HERE / f"tiny-{name}.npz")
    prompts = []
    for length in arrays["lengths"].tolist():
        greedy, drafts = arrays.get(f"greedy_{length}"), arrays.get(f"drafts_{length}")
        prompts.append(
            TinyPrompt(
                tokens=arrays[f"tokens_{length}"].tolist(),
                last=arrays[f"last_{length}"],
                every=arrays.get(f"every_{length}"),
                greedy=None if greedy is None else greedy.tolist(),
                drafts=None if drafts is None else drafts.tolist(),
            )
        )
    image = None
    if "image_tokens" in arrays:
        image = TinyPrompt(
            tokens=arrays["image_tokens"].tolist(),
            last=arrays["image_last"],
            every=None,
            greedy=arrays["image_greedy"].tolist(),
        )
    drafter = arrays.get("drafter_fingerprint")
    return TinyGolden(
        fingerprint=str(arrays["fingerprint"]),
        prompts=tuple(prompts),
        image=image,
        drafter_fingerprint=None if drafter is None else str(drafter),
    )


def load_demo() -> DemoGolden:
    """The golden answers of the demo checkpoint."""
    arrays = _read(HERE / "demo.npz")
    prompts = tuple(
        DemoPrompt(
            name=name,
            tokens=arrays[f"tokens_{name}"].tolist(),
            last=arrays[f"last_{name}"],
            logsumexp=float(arrays[f"logsumexp_{name}"]),
            norm=float(arrays[f"norm_{name}"]),
            greedy=arrays[f"greedy_{name}"].tolist(),
        )
        for name in arrays["names"].tolist()
    )
    return DemoGolden(
        fingerprint=str(arrays["fingerprint"]),
        vocab_ids=arrays["vocab_ids"],
        prompts=prompts,
        evaluation_tokens=arrays["evaluation_tokens"].tolist(),
    )
