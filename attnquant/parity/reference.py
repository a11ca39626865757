"""transformers' own answers, in float32 on the CPU, with eager attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnquant.errors import CheckpointError, UnsupportedError
from attnquant.text import first_line


class Reference:
    """A checkpoint as transformers runs it.

    Args:
        directory: the checkpoint.

    Raises:
        CheckpointError: transformers cannot load it.
        UnsupportedError: torch, which transformers computes with, is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            import torch
        except ImportError:
            raise UnsupportedError(
                "parity: found no torch, which transformers computes the reference with, expected "
                "the parity extra; install it: pip install 'attnquant[parity]'"
            ) from None
        from transformers import AutoModelForCausalLM

        self._torch = torch
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype="float32",
                attn_implementation="eager",
                local_files_only=True,
                use_safetensors=True,
            )
        except Exception as error:  # transformers and safetensors raise their own
            raise CheckpointError(
                f"{directory}: transformers cannot load it ({first_line(error)}); give a dense "
                "checkpoint that it can as --reference DIR"
            ) from error
        self._model = model.eval()

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after each token: float32 `[tokens, vocab]`."""
        rows: NDArray[np.float32] = self._forward(tokens, use_cache=False).logits[0].numpy()
        return rows

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow, each the likeliest, through the cache."""
        chosen: list[int] = []
        step = self._forward(tokens, use_cache=True)
        while True:
            chosen.append(int(step.logits[0, -1].argmax()))
            if len(chosen) == count:
                return chosen
            past = step.past_key_values
            step = self._forward(chosen[-1:], use_cache=True, past_key_values=past)

    def _forward(self, tokens: Sequence[int], **options: Any) -> Any:
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([list(tokens)]), **options)
