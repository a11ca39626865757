"""Gemma 4's pipeline model as MAX builds it, and steps driven by hand.

MAX's in-process API takes no model whose contexts can hold images, so this stands in for it: it
claims cache, prepares inputs, encodes images and executes, in the order of MAX's own pipeline.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import CPU
from max.nn.transformer import ReturnLogits
from max.pipelines.architectures.gemma4.context import Gemma4Context
from max.pipelines.architectures.gemma4.image_processor import Gemma4ImageProcessor
from max.pipelines.context import ImageMetadata
from max.pipelines.context.tokens import TokenBuffer
from max.pipelines.lib import ModelOutputs
from max.pipelines.lib.vision_encoder_cache import VisionEncoderCache
from max.support.image import find_contiguous_ranges
from numpy.typing import NDArray
from PIL import Image

from attnquant.gemma4.batch_processor import Gemma4Inputs
from attnquant.gemma4.model import Gemma4Model
from attnquant.gemma4.weight_adapters import convert_safetensors
from attnquant.nn.loaded import load_pipeline
from tests.models import MAX_LENGTH
from tests.tiny.gemma4 import PATCH, POOLING, SOFT_TOKENS

BATCH = 8


class Pipeline:
    """A checkpoint's compiled graphs on the CPU, in float32.

    Args:
        directory: the checkpoint.
        return_logits: which positions' logits the decoder returns.
    """

    def __init__(
        self, directory: Path, return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN
    ) -> None:
        loaded = load_pipeline(
            directory,
            Gemma4Model,
            adapter=convert_safetensors,
            return_logits=return_logits,
            max_length=MAX_LENGTH,
            max_batch_size=BATCH,
        )
        self.model: Gemma4Model = loaded.model
        self._kv = loaded.cache
        self._image_token: int = loaded.config.model.huggingface_config.image_token_id
        self._images: VisionEncoderCache[Gemma4Context] = VisionEncoderCache(
            plan=loaded.plan.vision_cache_plan, devices=[CPU()]
        )

    def context(
        self, tokens: Sequence[int], images: Sequence[NDArray[np.uint8]] = ()
    ) -> Gemma4Context:
        """A request; its images, `[height, width, 3]`, stand where the prompt has image tokens."""
        prompt = np.array(tokens, np.int64)
        process = Gemma4ImageProcessor(
            patch_size=PATCH, pooling_kernel_size=POOLING, max_soft_tokens=SOFT_TOKENS
        )
        values, positions, _ = process([Image.fromarray(image) for image in images])
        context = Gemma4Context(
            max_length=MAX_LENGTH,
            tokens=TokenBuffer(prompt),
            mm_token_type_ids=(prompt == self._image_token).astype(np.int64),
            pixel_position_ids=positions,
            images=[
                ImageMetadata(
                    start_idx=int(start),
                    end_idx=int(end),
                    pixel_values=patches,
                    image_hash=zlib.crc32(image.tobytes()),
                )
                for (start, end), patches, image in zip(
                    find_contiguous_ranges(prompt, [self._image_token]),
                    values,
                    images,
                    strict=True,
                )
            ],
            vision_token_ids=[self._image_token],
        )
        return self.claim(context)

    def claim(self, context: Gemma4Context) -> Gemma4Context:
        """Gives a request its place in the cache."""
        self._kv.claim(context, replica_idx=0)
        return context

    def inputs(self, contexts: Sequence[Gemma4Context], return_n_logits: int = 1) -> Gemma4Inputs:
        """What the next step of these requests is executed with."""
        for context in contexts:
            self._kv.alloc(context).synchronize()
        batches = [list(contexts)]
        inputs: Any = self.model.prepare_initial_token_inputs(
            batches, self._kv.runtime_inputs(batches), return_n_logits
        )
        encoded = self._images.run_vision_encode(self.model, batches, [CPU()])
        self._images.finalize_vision_inputs(self.model, inputs, [CPU()], encoded)
        return inputs

    def encode(self, context: Gemma4Context) -> NDArray[np.float32]:
        """`[soft tokens, hidden]`: a request's images, encoded anew, in the encoder's memory."""
        selection, devices = [(context, context.images)], [CPU()]
        packed = self.model.pack_vision_inputs(selection, devices)
        encoded = self.model.vision_execute(selection, devices, packed)
        (embeddings,) = encoded.embeddings
        return embeddings.to_numpy()

    def step(self, contexts: Sequence[Gemma4Context], return_n_logits: int = 1) -> ModelOutputs:
        """Executes the next step and appends each request's best token to it."""
        outputs = self.model.execute(self.inputs(contexts, return_n_logits))
        best = outputs.next_token_logits.to_numpy().argmax(axis=-1)
        for context, token in zip(contexts, best.tolist(), strict=True):
            context.update(token)
            self._kv.step(context)
        return outputs

    def release(self, contexts: Sequence[Gemma4Context]) -> None:
        """Ends requests."""
        for context in contexts:
            self._images.release_request(context.request_id)
            self._kv.release(context)

    def logits(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """`[prompts, vocab]`: next-token logits, from one batch."""
        contexts = [self.context(prompt) for prompt in prompts]
        rows = self.step(contexts).next_token_logits.to_numpy().copy()
        self.release(contexts)
        return rows

    def greedy(self, context: Gemma4Context, count: int) -> list[int]:
        """`count` greedy tokens, the first from the prompt and the others one by one."""
        tokens = []
        for _ in range(count):
            outputs = self.step([context])
            tokens.append(int(outputs.next_token_logits.to_numpy()[0].argmax()))
        self.release([context])
        return tokens
