"""Holds the logits of our graph, on the CPU in float32, against transformers' own.

Every position of every prompt counts. The distance is KL(transformers || ours) of the next-token
distributions, in nats: 0 where they are the same, and the one figure that says how far answers
move. Cosine, relative error and largest difference are those of the logits themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.decoder_shapes import DecoderShapes, text_config
from attnquant.divergence import compare
from attnquant.errors import CheckpointError
from attnquant.parity.prompts import LONG, TEXTS, long_text
from attnquant.parity.reference import Reference
from attnquant.preflight import check_model
from attnquant.text import MAX_LENGTH, load_text, load_tokenizer

GREEDY_TOKENS = 32

MAX_KL = 1e-7
"""Nats. Two float32 implementations of one model are orders of magnitude below it."""

# The long prompt is this much longer than the window.
_BEYOND_WINDOW = 64


class Text(Protocol):
    """A model that both sides are."""

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after each token: float32 `[tokens, vocab]`."""

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow, each the likeliest."""


@dataclass(frozen=True, kw_only=True)
class PromptParity:
    """How two models agree on one prompt.

    Attributes:
        name: of the prompt.
        tokens: how many it has.
        cosine: the least over the positions.
        relative_error: of all logits, in the Euclidean norm.
        max_error: the largest difference of two logits.
        mean_kl: nats, over the positions.
        max_kl: nats, at the worst position.
        top1: fraction of positions where both put the same token first.
        greedy: how many greedy tokens are the same before the first that is not.
        greedy_asked: how many there were.
    """

    name: str
    tokens: int
    cosine: float
    relative_error: float
    max_error: float
    mean_kl: float
    max_kl: float
    top1: float
    greedy: int
    greedy_asked: int

    @classmethod
    def of(cls, name: str, tokens: Sequence[int], reference: Text, ours: Text) -> PromptParity:
        """Asks both."""
        expected, actual = reference.logits(tokens), ours.logits(tokens)
        if expected.shape != actual.shape:
            raise CheckpointError(
                f"parity: the reference has logits {list(expected.shape)}, expected "
                f"{list(actual.shape)} as the model; name the checkpoint that it was made from"
            )
        # Sums over a vocabulary in float32 would be most of what is left to see.
        p, q = expected.astype(np.float64), actual.astype(np.float64)
        kl, top1, _ = compare(p, q, [0] * len(tokens))
        cosine = (p * q).sum(axis=1) / (np.linalg.norm(p, axis=1) * np.linalg.norm(q, axis=1))
        theirs = reference.greedy(tokens, GREEDY_TOKENS)
        same = np.equal(theirs, ours.greedy(tokens, GREEDY_TOKENS))
        return cls(
            name=name,
            tokens=len(tokens),
            cosine=float(cosine.min()),
            relative_error=float(np.linalg.norm(q - p) / np.linalg.norm(p)),
            max_error=float(np.abs(q - p).max()),
            mean_kl=float(kl.mean()),
            max_kl=float(kl.max()),
            top1=float(top1.mean()),
            greedy=int(same.argmin()) if not same.all() else GREEDY_TOKENS,
            greedy_asked=GREEDY_TOKENS,
        )


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How two models agree.

    Attributes:
        model: ours.
        reference: transformers'.
        limit: nats that the worst position may reach.
        prompts: one after the other.
    """

    model: str
    reference: str
    limit: float
    prompts: Sequence[PromptParity]

    @property
    def max_kl(self) -> float:
        """Nats, at the worst position of all; NaN if any is."""
        return float(np.max([prompt.max_kl for prompt in self.prompts]))

    @property
    def agrees(self) -> bool:
        """Whether the worst position is within the limit."""
        return self.max_kl <= self.limit


def measure(
    model: Path,
    *,
    reference: Path | None = None,
    limit: float = MAX_KL,
    progress: Callable[[], object] = lambda: None,
) -> Parity:
    """Loads both and asks them.

    Args:
        model: the checkpoint that our graph is made of, under the settings of the environment.
        reference: the checkpoint that transformers loads; the same if None.
        limit: nats that the worst position may reach.
        progress: called after each prompt.

    Raises:
        CheckpointError: a checkpoint cannot be used, by us or by transformers.
        SettingsError: the settings cannot be used.
        UnsupportedError: attnquant does not serve this architecture, or torch is not installed.
    """
    checkpoint = Checkpoint.open(model)
    DecoderShapes.from_config(checkpoint.config)
    check_model(str(model))
    directory = model if reference is None else reference
    theirs = Reference(directory)
    prompts = _prompts(load_tokenizer(directory), checkpoint.config)
    ours = load_text(model)
    found = []
    for name, tokens in prompts.items():
        found.append(PromptParity.of(name, tokens, theirs, ours))
        progress()
    return Parity(model=str(model), reference=str(directory), limit=limit, prompts=found)


def _prompts(encode: Callable[[str], list[int]], config: Any) -> dict[str, list[int]]:
    """Token ids: of each text, and of as many texts as go beyond the sliding window."""
    prompts = {name: encode(text) for name, text in TEXTS.items()}
    wanted = min(
        (text_config(config).get("sliding_window") or 0) + _BEYOND_WINDOW,
        MAX_LENGTH - GREEDY_TOKENS,
    )
    repeats = 1
    while len(tokens := encode(long_text(repeats))) < wanted:
        repeats *= 2
    return prompts | {LONG: tokens[:wanted]}
