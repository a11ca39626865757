"""A decoder's pipeline model as MAX builds it, driven in this process, on the CPU, in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import CPU
from max.engine import InferenceSession
from max.graph.weights import WeightsFormat, load_weights
from max.nn.transformer import ReturnLogits
from max.pipelines import PIPELINE_REGISTRY, PipelineArgs, PipelineConfig
from max.pipelines.context import TextContext
from max.pipelines.context.tokens import TokenBuffer
from max.pipelines.kv_cache.registry import load_kv_manager
from max.pipelines.lib import SupportedArchitecture
from max.pipelines.lib.memory_estimation import MemoryPlan
from max.pipelines.lib.vision_encoder_cache import VisionEncoderCache
from numpy.typing import NDArray

from attnquant.nn.tensors import State


@dataclass(frozen=True, kw_only=True)
class LoadedPipeline:
    """What steps are driven with.

    Attributes:
        config: MAX's.
        plan: MAX's memory plan.
        model: the pipeline model, compiled.
        cache: the manager that feeds it keys and values.
    """

    config: PipelineConfig
    plan: MemoryPlan
    model: Any
    cache: Any


def pipeline_config(
    directory: Path, *, max_length: int, max_batch_size: int, on_gpu: bool = False
) -> PipelineConfig:
    """MAX's configuration for a checkpoint, without a cache of prefixes.

    On the CPU in float32, on a GPU in bfloat16.
    """
    return PipelineConfig.from_args(
        PipelineArgs.from_flat_kwargs(
            model_path=str(directory),
            custom_architectures=["attnquant"],
            device_specs="gpu" if on_gpu else "cpu",
            quantization_encoding="bfloat16" if on_gpu else "float32",
            max_length=max_length,
            max_batch_size=max_batch_size,
            enable_prefix_caching=False,
        )
    )


def load_pipeline(
    directory: Path,
    model_class: Callable[..., Any],
    *,
    adapter: Callable[..., State],
    return_logits: ReturnLogits,
    max_length: int,
    max_batch_size: int,
) -> LoadedPipeline:
    """Compiles a checkpoint's graphs.

    Args:
        directory: the checkpoint.
        model_class: the pipeline model.
        adapter: its weight adapter, or one that changes what that returns.
        return_logits: which positions' logits the decoder returns.
        max_length: the longest sequence, in tokens.
        max_batch_size: sequences at once.
    """
    config = pipeline_config(directory, max_length=max_length, max_batch_size=max_batch_size)
    plan = PIPELINE_REGISTRY.retrieve_factory(config).memory_plan
    session = InferenceSession(devices=[CPU()])
    model = model_class(
        config,
        session,
        [CPU()],
        config.model.kv_cache,
        load_weights(sorted(directory.glob("*.safetensors"))),
        memory_plan=plan,
        adapter=adapter,
        return_logits=return_logits,
        max_batch_size=max_batch_size,
    )
    cache = load_kv_manager(
        params=model.kv_params,
        max_batch_size=max_batch_size,
        max_seq_len=model.max_seq_len,
        session=session,
        available_cache_memory=plan.available_cache_memory,
        is_di_enabled=False,
        model_name=config.model.model_name,
        max_num_input_tokens=None,
    )
    return LoadedPipeline(config=config, plan=plan, model=model, cache=cache)


class LoadedText:
    """A text model, one sequence at a time, with the logits of every position.

    Args:
        directory: the checkpoint.
        arch: its architecture.
        max_length: the longest sequence, in tokens.
        change: what is done to the graph's weights before they are bound.
    """

    def __init__(
        self,
        directory: Path,
        arch: SupportedArchitecture,
        *,
        max_length: int,
        change: Callable[[State], State] | None = None,
    ) -> None:
        convert = arch.weight_adapters[WeightsFormat.safetensors]

        def adapter(*arguments: Any, **keywords: Any) -> State:
            state: State = convert(*arguments, **keywords)
            return state if change is None else change(state)

        self._max_length = max_length
        self._loaded = load_pipeline(
            directory,
            arch.pipeline_model,
            adapter=adapter,
            return_logits=ReturnLogits.ALL,
            max_length=max_length,
            max_batch_size=1,
        )

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after each token: float32 `[tokens, vocab]`."""
        with self._context(tokens) as context:
            return self._step(context)

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow, each the likeliest, through the cache."""
        with self._context(tokens) as context:
            chosen: list[int] = []
            while len(chosen) < count:
                chosen.append(int(self._step(context)[-1].argmax()))
                context.update(chosen[-1])
                self._loaded.cache.step(context)
            return chosen

    @contextmanager
    def _context(self, tokens: Sequence[int]) -> Iterator[TextContext]:
        buffer = TokenBuffer(np.array(tokens, np.int64))
        context = TextContext(max_length=self._max_length, tokens=buffer)
        self._loaded.cache.claim(context, replica_idx=0)
        try:
            yield context
        finally:
            self._loaded.cache.release(context)

    def _step(self, context: TextContext) -> NDArray[np.float32]:
        model, cache = self._loaded.model, self._loaded.cache
        cache.alloc(context).synchronize()
        batches = [[context]]
        inputs = model.prepare_initial_token_inputs(
            batches, cache.runtime_inputs(batches), return_n_logits=1
        )
        if hasattr(model, "empty_vision_embeddings"):
            VisionEncoderCache().finalize_vision_inputs(model, inputs, [CPU()], None)
        rows: NDArray[np.float32] = model.execute(model_inputs=inputs).logits.to_numpy().copy()
        return rows
