"""The reference: Hugging Face transformers in float32 on the CPU, eager attention (needs torch)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from tests.tiny.gemma4 import patches


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint's model, its stored weights converted to `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


@torch.inference_mode()
def logits(model: Any, tokens: list[int], last: int = 1) -> NDArray[Any]:
    """Logits after each of the last positions, [last, vocab]; last=0 means every position."""
    result = model(torch.tensor([tokens]), use_cache=False, logits_to_keep=last).logits
    return np.asarray(result[0])


@torch.inference_mode()
def image_logits(
    model: Any, tokens: list[int], images: Sequence[NDArray[np.uint8]]
) -> NDArray[Any]:
    """Logits after the last token of a prompt with images of equally many patches, [vocab]."""
    values, positions = zip(*map(patches, images), strict=True)
    result = model(
        torch.tensor([tokens]),
        pixel_values=torch.from_numpy(np.stack(values)),
        image_position_ids=torch.from_numpy(np.stack(positions)),
        use_cache=False,
        logits_to_keep=1,
    )
    return np.asarray(result.logits[0, -1])


@torch.inference_mode()
def greedy(model: Any, tokens: list[int], count: int) -> tuple[list[int], float]:
    """`count` greedy tokens, and the smallest lead of a chosen logit over the second best.

    The tokens come step by step through the KV cache and are then held against one pass over all of
    them without a cache, so that a mistake in the reference's own cache cannot become golden.
    """
    step = model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1)
    chosen = [int(step.logits[0, -1].argmax())]
    while len(chosen) < count:
        last = torch.tensor([chosen[-1:]])
        step = model(last, past_key_values=step.past_key_values, use_cache=True, logits_to_keep=1)
        chosen.append(int(step.logits[0, -1].argmax()))
    check = torch.from_numpy(logits(model, tokens + chosen[:-1], last=count))
    if check.argmax(dim=-1).tolist() != chosen:
        raise RuntimeError("transformers chooses other tokens with its cache than without it")
    best = check.topk(2, dim=-1).values
    return chosen, float((best[:, 0] - best[:, 1]).min())
