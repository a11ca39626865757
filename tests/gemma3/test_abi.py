"""The buffer ABI against the compiled graph, and the logits of every position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from max.nn.transformer import ReturnLogits
from max.pipelines.context import TextContext
from max.pipelines.context.tokens import TokenBuffer
from numpy.typing import NDArray

from attnquant.gemma3.arch import gemma3_arch
from attnquant.gemma3.batch_processor import Gemma3Inputs
from attnquant.gemma3.model import Gemma3Model
from attnquant.gemma3.weight_adapters import convert_safetensors
from attnquant.nn.loaded import load_pipeline
from tests.abi import assert_is_declared
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
    pipeline = load_pipeline(
        tiny_directory(CASE),
        Gemma3Model,
        adapter=convert_safetensors,
        return_logits=request.param,
        max_length=MAX_LENGTH,
        max_batch_size=BATCH,
    )
    yield request.param, Loaded(pipeline.model, pipeline.cache)


def test_the_abi_is_the_graphs_declared_inputs(loaded: tuple[ReturnLogits, Loaded]) -> None:
    _, pipeline = loaded
    inputs = pipeline.inputs([[2, 5, 7], [2, 9]], return_n_logits=1)
    assert_is_declared(pipeline.model, inputs)


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
