"""The reference: Hugging Face transformers on the CPU, in float32 or float64 (needs torch)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedRMSNorm

from tests.tiny.gemma4 import patches


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint's model, its stored weights converted to `dtype`."""
    return _loaded(AutoModelForCausalLM, directory, dtype)


def load_drafter(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The drafter's model, as `load`.

    A window of n tokens is n keys to the target, and n keys is what its cache keeps; but n + 1 to
    transformers' drafter where there are as many, which is after a long prompt only.
    """
    model = _loaded(Gemma4AssistantForCausalLM, directory, dtype)
    model.config.get_text_config().sliding_window -= 1
    return model


def _loaded(kind: Any, directory: Path, dtype: torch.dtype) -> Any:
    wide = dtype is torch.float64
    model = kind.from_pretrained(
        directory,
        dtype=dtype,
        # Eager attention takes its softmax in float32, whatever the dtype is.
        attn_implementation="sdpa" if wide else "eager",
        local_files_only=True,
    )
    for module in model.modules():
        # So do Gemma 4's norms.
        if wide and isinstance(module, (Gemma4RMSNorm, Gemma4UnifiedRMSNorm)):
            module.forward = partial(_wide_norm, module)
    return model.eval()


def _wide_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = norm._norm(x)
    return y * norm.weight if norm.with_scale else y


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


@torch.inference_mode()
def drafts(model: Any, drafter: Any, tokens: list[int], count: int) -> tuple[list[int], float]:
    """`count` tokens that a drafter guesses after a prompt and the target's next token.

    As transformers' own candidate generator asks for them; the second value is as in `greedy`.
    """
    seen = model(
        torch.tensor([tokens]),
        use_cache=True,
        output_hidden_states=True,
        return_shared_kv_states=True,
    )
    token, hidden = seen.logits[:, -1:].argmax(dim=-1), seen.hidden_states[-1][:, -1:]
    chosen, leads = [], []
    for _ in range(count):
        embedded = model.get_input_embeddings()(token)
        guess = drafter(
            inputs_embeds=torch.cat([embedded, hidden], dim=-1),
            # Of the target's next token, whichever guess it is.
            position_ids=torch.tensor([[len(tokens)]]),
            shared_kv_states=seen.shared_kv_states,
            use_cache=False,
        )
        token, hidden = guess.logits.argmax(dim=-1), guess.last_hidden_state
        best = guess.logits[0, -1].topk(2).values
        chosen.append(int(token))
        leads.append(float(best[0] - best[1]))
    return chosen, min(leads)
