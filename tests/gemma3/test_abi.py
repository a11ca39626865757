"""The buffer ABI against the compiled graph, and the logits of every position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from max import tree
from max.driver import CPU
from max.engine import InferenceSession
from max.graph.weights import load_weights
from max.nn.transformer import ReturnLogits
from max.pipelines import PIPELINE_REGISTRY, PipelineArgs, PipelineConfig
from max.pipelines.context import TextContext
from max.pipelines.context.tokens import TokenBuffer
from max.pipelines.kv_cache.registry import load_kv_manager
from numpy.typing import NDArray

from attnquant.gemma3.arch import gemma3_arch
from attnquant.gemma3.batch_processor import Gemma3Inputs
from attnquant.gemma3.model import Gemma3Model
from attnquant.gemma3.weight_adapters import convert_safetensors
from tests.golden.data import load_tiny, relative_error
from tests.models import MAX_LENGTH

CASE = "untied-sharded"
BATCH = 4


@dataclass
class Loaded:
    """The pipeline model as MAX builds it, and the cache manager that feeds it."""

    model: Gemma3Model
    kv_manager: Any

    def inputs(self, prompts: Sequence[Sequence[int]], return_n_logits: int) -> Gemma3Inputs:
        contexts = [
            TextContext(max_length=MAX_LENGTH, tokens=TokenBuffer(np.array(prompt, np.int64)))
            for prompt in prompts
        ]
        for context in contexts:
            self.kv_manager.claim(context, replica_idx=0)
            self.kv_manager.alloc(context).synchronize()
        return self.model.prepare_initial_token_inputs(
            [contexts], self.kv_manager.runtime_inputs([contexts]), return_n_logits
        )


@pytest.fixture(scope="module", params=[ReturnLogits.VARIABLE, ReturnLogits.ALL])
def loaded(
    request: pytest.FixtureRequest, tiny_directory: Callable[[str], Path]
) -> Iterator[tuple[ReturnLogits, Loaded]]:
    directory = tiny_directory(CASE)
    config = PipelineConfig.from_args(
        PipelineArgs.from_flat_kwargs(
            model_path=str(directory),
            custom_architectures=["attnquant"],
            device_specs="cpu",
            quantization_encoding="float32",
            max_length=MAX_LENGTH,
            max_batch_size=BATCH,
            enable_prefix_caching=False,
        )
    )
    plan = PIPELINE_REGISTRY.retrieve_factory(config).memory_plan
    session = InferenceSession(devices=[CPU()])
    model = Gemma3Model(
        config,
        session,
        [CPU()],
        config.model.kv_cache,
        load_weights(sorted(directory.glob("*.safetensors"))),
        memory_plan=plan,
        adapter=convert_safetensors,
        return_logits=request.param,
        max_batch_size=BATCH,
    )
    kv_manager = load_kv_manager(
        params=model.kv_params,
        max_batch_size=BATCH,
        max_seq_len=model.max_seq_len,
        session=session,
        available_cache_memory=plan.available_cache_memory,
        is_di_enabled=False,
        model_name=config.model.model_name,
        max_num_input_tokens=None,
    )
    yield request.param, Loaded(model, kv_manager)


def test_the_abi_is_the_graphs_declared_inputs(loaded: tuple[ReturnLogits, Loaded]) -> None:
    _, pipeline = loaded
    inputs = pipeline.inputs([[2, 5, 7], [2, 9]], return_n_logits=1)
    declared = pipeline.model.model.input_metadata
    assert len(inputs.buffers) == len(declared)
    for buffer, spec in zip(inputs.buffers, declared, strict=True):
        assert buffer.dtype == spec.dtype, spec.name
        assert len(buffer.shape) == len(spec.shape), spec.name
    named = tree.leaves(pipeline.model.batch_processor.input_tree)
    assert len(named) == len(declared)
    # Positions matter: replay refreshes captured buffers by index.
    assert inputs.buffers[0] is inputs.tokens
    assert inputs.buffers[1] is inputs.input_row_offsets
    assert inputs.buffers[2] is inputs.return_n_logits


def test_capture_and_overlap_are_declared() -> None:
    assert gemma3_arch.supports_device_graph_capture
    assert gemma3_arch.supports_overlap_scheduler


def test_logits_of_every_position_equal_transformers(loaded: tuple[ReturnLogits, Loaded]) -> None:
    which, pipeline = loaded
    golden = load_tiny(CASE)
    whole = next(prompt for prompt in golden.prompts if prompt.every is not None)
    other = golden.prompts[0]
    wanted = len(whole.tokens)
    prompts = [whole.tokens]
    if which is ReturnLogits.ALL:
        prompts.append(other.tokens)
    outputs = pipeline.model.execute(model_inputs=pipeline.inputs(prompts, wanted))
    rows: NDArray[np.float32] = outputs.logits.to_numpy()
    assert relative_error(rows[:wanted], whole.every) < 1e-4
    offsets = outputs.logit_offsets.to_numpy().tolist()
    expected = [0, wanted] if len(prompts) == 1 else [0, wanted, wanted + len(other.tokens)]
    assert offsets == expected
    last = outputs.next_token_logits.to_numpy()
    assert relative_error(last[0], whole.every[-1]) < 1e-4
    if len(prompts) > 1:
        assert relative_error(last[1], other.last) < 1e-4
