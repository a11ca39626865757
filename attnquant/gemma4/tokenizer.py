"""MAX's tokenizer for Gemma 4, for checkpoints with a vision tower and without."""

from __future__ import annotations

from typing import Any

import av
from max.pipelines.architectures.gemma4.context import Gemma4Context
from max.pipelines.architectures.gemma4.tokenizer import Gemma4Tokenizer
from max.pipelines.context.exceptions import InputError
from max.pipelines.lib import PipelineConfig
from max.pipelines.modeling.types import TextGenerationRequest
from typing_extensions import override

from attnquant.gemma4.model_config import vision_config
from attnquant.nn.tokenizer import CheckedRequests


class TextOrVisionTokenizer(CheckedRequests, Gemma4Tokenizer):
    """MAX's, which refuses images and videos where no vision tower would see them.

    Without that, the request would end in the worker, and the worker with it.
    """

    def __init__(self, model_path: str, pipeline_config: PipelineConfig, **options: Any) -> None:
        super().__init__(model_path, pipeline_config, **options)
        self._sees = vision_config(pipeline_config.model.huggingface_config) is not None

    @override
    async def new_context(self, request: TextGenerationRequest) -> Gemma4Context:
        """As MAX's.

        Raises:
            InputError: the request has images or videos, and the checkpoint is served as text; or
                a video cannot be decoded.
        """
        if (request.images or request.videos) and not self._sees:
            raise InputError(
                "this checkpoint has no vision tower that attnquant serves: found images or "
                "videos, expected text only"
            )
        try:
            return await super().new_context(request)
        except av.FFmpegError as error:
            # Videos are first opened here, unlike images, which the server has already decoded.
            raise InputError(
                f"a video cannot be decoded: {error.strerror or error}; expected a file that "
                "FFmpeg reads"
            ) from error
