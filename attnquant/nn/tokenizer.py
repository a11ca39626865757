"""What every decoder's tokenizer refuses: requests that would end MAX's server, or stall it.

MAX 26.7 does not look at token ids. One beyond the embedding is read from whatever lies behind it
in memory, and ends the server: `"prompt": [1000000000]` does, and so does a text with a special
token that the tokenizer has and the embedding has not (`<image_soft_token>`, 262144, beside the
262,144 rows of Gemma 3 1B). A `top_k` of 2^31 ends it too, after a minute in which nobody else is
served, and so does `echo` with `logprobs`, unless MAX was started for it. Numbers beyond 64 bits
are status 500.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from max.pipelines.context import SamplingParams
from max.pipelines.context.exceptions import InputError
from max.pipelines.lib import PipelineConfig, TextTokenizer
from max.pipelines.modeling.types import TextGenerationRequest
from numpy.typing import NDArray

from attnquant.decoder_shapes import DecoderShapes

_INT64 = range(-(2**63), 2**63)

# What transformers' tokenizers of Gemma and Qwen were built from, and never read again: as Python
# objects 140 MB for Gemma 3's 262,144 tokens.
_BUILT_FROM = ("_vocab", "_merges")


class CheckedRequests:
    """Stands before one of MAX's tokenizer classes."""

    def __init__(self, model_path: str, pipeline_config: PipelineConfig, **options: Any) -> None:
        super().__init__(model_path, pipeline_config, **options)  # type: ignore[call-arg]
        for name in _BUILT_FROM:
            vars(self.delegate).pop(name, None)  # type: ignore[attr-defined]
        config = pipeline_config.model.huggingface_config.to_dict()
        self._echoes = pipeline_config.model.enable_echo
        self._vocab = DecoderShapes.from_config(config).vocab

    async def new_context(self, request: TextGenerationRequest) -> Any:
        """As MAX's.

        Raises:
            InputError: the prompt has no tokens, or tokens that the model does not have; a
                parameter of sampling is out of range; or log probabilities are asked for that the
                graph does not give.
        """
        if request.prompt is not None and not isinstance(request.prompt, str):
            self._check_tokens(request.prompt)
        self._check_sampling(request.sampling_params)
        if request.echo and request.logprobs and not self._echoes:
            raise InputError(
                "found echo beside logprobs, expected one of the two; a server that was started "
                "with --enable-echo takes both"
            )
        context = await super().new_context(request)  # type: ignore[misc]
        self._check_tokens(context.tokens.all)
        return context

    def _check_tokens(self, tokens: Sequence[int] | NDArray[np.int64]) -> None:
        if not len(tokens):
            raise InputError("found a prompt without tokens, expected one at least")
        for found in (min(tokens), max(tokens)):
            if not 0 <= found < self._vocab:
                raise InputError(
                    f"found token {found} in the prompt, expected 0 to {self._vocab - 1}, the "
                    "tokens that this model has"
                )

    def _check_sampling(self, sampling: SamplingParams) -> None:
        if sampling.top_k > self._vocab:
            raise InputError(
                f"top_k is {sampling.top_k}, expected at most {self._vocab}, the tokens that this "
                "model has, or -1 for all of them"
            )
        if not 0 <= sampling.top_p <= 1:  # NaN is beyond both
            raise InputError(f"top_p is {sampling.top_p}, expected 0 to 1")
        for name in ("seed", "max_new_tokens", "min_new_tokens", "stop_token_ids"):
            value = getattr(sampling, name)
            numbers = value if isinstance(value, list) else [value or 0]
            if any(number not in _INT64 for number in numbers):
                raise InputError(f"{name} is {value}, expected a number of at most 64 bits")


class DecoderTokenizer(CheckedRequests, TextTokenizer):
    """MAX's tokenizer for text."""
