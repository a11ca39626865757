"""Prompts for the tiny checkpoints, as token ids: `<bos>` and then ordinary tokens at random."""

from __future__ import annotations

from tests.tiny.stable_random import integers
from tests.tiny.tokenizer import BOS, FIRST_ORDINARY_ID

# One token, a few, and lengths on both sides of the window of 128 and well beyond it.
LENGTHS = (1, 5, 24, 127, 129, 300)

# This one's golden logits are kept for every position.
ALL_POSITIONS_LENGTH = 24

# These are continued greedily; from 127 the window starts to slide while decoding.
GREEDY_LENGTHS = (5, 127, 300)
GREEDY_TOKENS = 32
IMAGE_GREEDY_TOKENS = 8

# As many as Gemma 4's drafter is asked for.
DRAFTED_TOKENS = 3

# For what takes text: words, punctuation, and characters that only byte tokens can spell.
TEXTS = (
    "The capital of France is",
    "It is raining.\n\nThe cat sat on the mat, and the dog was in the garden.",
    "naïve café, 25 °C, 東京 🙂",
)


def prompt(vocab: int, length: int) -> list[int]:
    """The prompt of this length for a vocabulary of this size."""
    key = f"prompt/{vocab}/{length}"
    return [BOS, *integers(key, FIRST_ORDINARY_ID, vocab, length - 1)]
