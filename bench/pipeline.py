"""A decoder's pipeline model as MAX builds it: in this process, on the CPU, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from max.driver import CPU
from max.engine import InferenceSession
from max.graph.weights import load_weights
from max.nn.transformer import ReturnLogits
from max.pipelines import PIPELINE_REGISTRY, PipelineArgs, PipelineConfig
from max.pipelines.kv_cache.registry import load_kv_manager
from max.pipelines.lib.memory_estimation import MemoryPlan

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
    config = PipelineConfig.from_args(
        PipelineArgs.from_flat_kwargs(
            model_path=str(directory),
            custom_architectures=["attnquant"],
            device_specs="cpu",
            quantization_encoding="float32",
            max_length=max_length,
            max_batch_size=max_batch_size,
            enable_prefix_caching=False,
        )
    )
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
