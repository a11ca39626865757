"""What both models are asked. Changing a text changes every figure of `parity`."""

from __future__ import annotations

TEXTS: dict[str, str] = {
    "fact": "The capital of France is",
    "story": (
        "The ferry left the harbour an hour late, and nobody on deck seemed to mind. An old man "
        "with a violin case under his arm"
    ),
    "science": "Water boils at a lower temperature on a mountain because the pressure of the air",
    "code": 'def mean(values):\n    """The arithmetic mean of a list."""\n    return',
    "numbers": "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31,",
    "list": "Ingredients:\n- 200 g of flour\n- 2 eggs\n- a pinch of salt\n-",
    "languages": "Guten Morgen! Wie geht es dir? — Très bien, merci. 今日は天気がいいですね。",
    "symbols": "∫ x² dx = x³/3 + C; naïve café, 25 °C, 🙂 →",
}

LONG = "long"
"""The name of the prompt that is longer than any sliding window: all texts, again and again."""


def long_text(repeats: int) -> str:
    """All texts, so many times."""
    return "\n\n".join(list(TEXTS.values()) * repeats)
