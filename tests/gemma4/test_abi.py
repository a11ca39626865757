"""The buffer ABI against the compiled graph, what may be captured, and logits of every position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from max import tree
from max.driver import CPU
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import MHAKVCacheParams, MultiKVCacheParams
from max.nn.norm import RMSNorm
from max.nn.transformer import ReturnLogits
from max.pipelines.lib.vision_encoder_cache import SupportsVisionEncoding
from max.pipelines.modeling.types import BatchType, TextGenerationInputs

from attnquant.gemma4.arch import gemma4_arch, gemma4_unified_arch
from attnquant.nn import RaggedDecoder, ScaledEmbedding, TiedHead
from tests.abi import assert_is_declared
from tests.gemma4.pipeline import Pipeline
from tests.golden.data import load_tiny, relative_error
from tests.tiny.gemma4 import CASES, IMAGES, SOFT_TOKENS

CASE = "gemma4-shared-values"
GOLDEN = load_tiny(CASE)


@pytest.fixture(scope="module")
def pipeline(tiny_directory: Callable[[str], Path]) -> Iterator[Pipeline]:
    yield Pipeline(tiny_directory(CASE))


def test_the_abi_is_the_graphs_declared_inputs(pipeline: Pipeline) -> None:
    image = pipeline.context(GOLDEN.image.tokens, IMAGES)
    text = pipeline.context(GOLDEN.prompts[1].tokens)
    for contexts in ([text], [text, image]):
        inputs = pipeline.inputs(contexts)
        assert_is_declared(pipeline.model, inputs)
        assert inputs.buffers[3] is inputs.vision_embeddings[0]
        assert inputs.buffers[4] is inputs.vision_scatter_indices[0]
    assert inputs.buffers[3].shape == (2 * SOFT_TOKENS, CASES[CASE].hidden)
    pipeline.release([image, text])


def test_a_decoding_step_has_images_of_no_rows_and_always_the_same_buffers(
    pipeline: Pipeline,
) -> None:
    contexts = [pipeline.context(GOLDEN.image.tokens, IMAGES)]
    assert pipeline.step(contexts).next_token_logits.shape[0] == 1
    first, second = pipeline.inputs(contexts), pipeline.inputs(contexts)
    assert first.vision_embeddings[0].shape == (0, CASES[CASE].hidden)
    assert first.vision_scatter_indices[0].shape == (0,)
    assert first.vision_embeddings[0] is second.vision_embeddings[0]
    pipeline.release(contexts)


def test_only_decoding_batches_may_be_replayed(pipeline: Pipeline) -> None:
    """What MAX asks before it replays a captured graph, of the batches that may hold images."""
    image = pipeline.context(GOLDEN.image.tokens, IMAGES)
    text = pipeline.context(GOLDEN.prompts[1].tokens)
    assert TextGenerationInputs(batches=[[image]]).batch_type is BatchType.CE
    pipeline.step([text])
    assert TextGenerationInputs(batches=[[text]]).batch_type is BatchType.TG
    assert TextGenerationInputs(batches=[[text, image]]).batch_type is BatchType.CE
    pipeline.step([text, image])
    assert TextGenerationInputs(batches=[[text, image]]).batch_type is BatchType.TG
    pipeline.release([image, text])


def test_what_decoding_changes_lies_on_the_accelerator() -> None:
    """Replay refreshes the device's buffers only, and runs no code on the host."""
    device, hidden = DeviceRef.GPU(), 32
    embedding = ScaledEmbedding(
        vocab=16,
        hidden=hidden,
        table=DType.bfloat16,
        dtype=DType.bfloat16,
        device=device,
        scale=1.0,
    )
    cache = MHAKVCacheParams(
        dtype=DType.bfloat16, head_dim=256, n_kv_heads=1, num_layers=1, devices=[device]
    )
    decoder = RaggedDecoder(
        embed_tokens=embedding,
        layers=[],
        norm=RMSNorm(hidden, DType.bfloat16),
        lm_head=TiedHead(embedding),
        kv_params=MultiKVCacheParams.from_params({"full_attention": cache}),
        ropes={},
        return_logits=ReturnLogits.LAST_TOKEN,
        softcap=None,
        device=device,
        takes_embeddings=True,
    )
    inputs = decoder.input_tree()
    on_host = {
        name
        for part in ("batch", "vision")
        for name, types in inputs[part].items()
        for leaf in tree.leaves(types)
        if leaf.device.is_cpu()
    }
    # How many logits to return: the same in every decoding step, and not read for the last one's.
    assert on_host == {"return_n_logits"}


def test_capture_overlap_and_images_are_declared(pipeline: Pipeline) -> None:
    for arch in (gemma4_arch, gemma4_unified_arch):
        assert arch.supports_device_graph_capture
        assert arch.supports_overlap_scheduler
        assert (arch.tool_parser, arch.reasoning_parser) == ("gemma4", "gemma4")
    assert isinstance(pipeline.model, SupportsVisionEncoding)
    assert pipeline.model.empty_vision_embeddings([CPU()])[0].dtype == DType.float32


@pytest.mark.slow
@pytest.mark.parametrize("which", [ReturnLogits.VARIABLE, ReturnLogits.ALL])
def test_logits_of_every_position_equal_transformers(
    tiny_directory: Callable[[str], Path], which: ReturnLogits
) -> None:
    pipeline = Pipeline(tiny_directory(CASE), which)
    whole = next(prompt for prompt in GOLDEN.prompts if prompt.every is not None)
    wanted = len(whole.tokens)
    outputs = pipeline.step([pipeline.context(whole.tokens)], return_n_logits=wanted)
    assert relative_error(outputs.logits.to_numpy(), whole.every) < 1e-4
    assert outputs.logit_offsets.to_numpy().tolist() == [0, wanted]
