"""A target and its drafter in one graph: what is drafted, and that it changes no greedy token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from max.dtype import DType
from max.pipelines.lib.arch_lookup import import_custom_architectures, select_speculator
from max.pipelines.speculative.config import SpeculativeConfig

from attnquant.drafter_shapes import DrafterShapes
from attnquant.errors import CheckpointError
from attnquant.gemma4.arch import gemma4_arch, gemma4_speculator
from attnquant.gemma4.drafted import DraftedGemma4Model
from attnquant.gemma4.drafter import drafter_weights
from attnquant.gemma4.model import Gemma4Model
from attnquant.nn.tensors import to_numpy
from tests.gemma4.drafting import DRAFTED, Drafting, Pair, tensors_of
from tests.gemma4.pipeline import Pipeline
from tests.golden.data import TinyPrompt, load_tiny
from tests.tiny.gemma4 import IMAGES
from tests.tiny.gemma4_drafter import DRAFTERS

CASE = "gemma4-shared-values"
GOLDEN = load_tiny(CASE)
# Many rows are summed in another order than few, which moves a logit by the last bits of a sum.
NEAR = 1e-3
CONTINUED = [prompt for prompt in GOLDEN.prompts if prompt.greedy is not None]


@pytest.fixture(scope="module")
def pair(
    tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drafting]:
    drafter = DRAFTERS[CASE].write(tmp_path_factory.mktemp("drafter"))
    yield Drafting(tiny_directory(CASE), drafter)


@pytest.mark.parametrize("prompt", GOLDEN.prompts, ids=lambda prompt: str(len(prompt.tokens)))
def test_drafts_are_transformers(pair: Drafting, prompt: TinyPrompt) -> None:
    contexts = [pair.context(prompt.tokens)]
    ((first,),), drafts = pair.step(contexts)
    pair.release(contexts)
    assert first == prompt.last.argmax()
    assert drafts.tolist() == [prompt.drafts]


def decoded(pair: Drafting, prompts: list[TinyPrompt], count: int) -> list[list[int]]:
    """At least so many tokens of each prompt, all of them in one batch, by what is drafted."""
    contexts = [pair.context(prompt.tokens) for prompt in prompts]
    found: list[list[int]] = [[] for _ in prompts]
    while min(map(len, found)) < count:
        for tokens, new in zip(found, pair.step(contexts)[0], strict=True):
            tokens += new
    pair.release(contexts)
    return found


@pytest.mark.parametrize("prompt", CONTINUED, ids=lambda prompt: str(len(prompt.tokens)))
def test_greedy_tokens_are_those_without_a_drafter(pair: Drafting, prompt: TinyPrompt) -> None:
    (found,) = decoded(pair, [prompt], len(prompt.greedy))
    assert found[: len(prompt.greedy)] == prompt.greedy


def test_a_batch_of_different_lengths_is_its_members(pair: Drafting) -> None:
    count = len(CONTINUED[0].greedy)
    for found, prompt in zip(decoded(pair, CONTINUED, count), CONTINUED, strict=True):
        assert found[:count] == prompt.greedy


def test_images_are_seen_with_a_drafter(
    pair: Drafting, tiny_directory: Callable[[str], Path]
) -> None:
    prompt = GOLDEN.image
    assert prompt is not None
    alone = Pipeline(tiny_directory(CASE))
    seen = alone.context(prompt.tokens, IMAGES)
    contexts = [pair.context(prompt.tokens)]
    (found,), _ = pair.step(contexts, alone.inputs([seen]))
    while len(found) < len(prompt.greedy):
        found += pair.step(contexts)[0][0]
    assert found[: len(prompt.greedy)] == prompt.greedy
    pair.release(contexts)
    alone.release([seen])


@pytest.mark.parametrize("right", range(DRAFTED + 1))
@pytest.mark.parametrize("prompt", CONTINUED, ids=lambda prompt: str(len(prompt.tokens)))
def test_as_many_are_accepted_as_are_right(pair: Drafting, prompt: TinyPrompt, right: int) -> None:
    """Whatever was drafted, what is committed is the greedy continuation."""
    contexts = [pair.context(prompt.tokens)]
    ((first,), found) = pair.step(contexts)[0][0], []
    assert first == prompt.greedy[0]
    position = 1
    while position + DRAFTED < len(prompt.greedy):
        drafts = list(prompt.greedy[position : position + DRAFTED])
        if right < DRAFTED:
            drafts[right] = (drafts[right] + 1) % 600
        contexts[0].spec_decoding_state.draft_tokens_to_verify = drafts
        found = pair.step(contexts)[0][0]
        assert found == prompt.greedy[position : position + right + 1]
        position += len(found)
    pair.release(contexts)


@pytest.mark.parametrize("right", range(DRAFTED + 1))
@pytest.mark.parametrize("prompt", CONTINUED, ids=lambda prompt: str(len(prompt.tokens)))
def test_drafts_after_rejected_ones_are_those_after_a_prompt(
    pair: Drafting, prompt: TinyPrompt, right: int
) -> None:
    """What was stored for rejected tokens is not looked at."""
    drafts = prompt.greedy[1 : 1 + DRAFTED]
    contexts = [pair.context(prompt.tokens)]
    pair.step(contexts)
    contexts[0].spec_decoding_state.draft_tokens_to_verify = [
        *drafts[:right],
        *[(token + 1) % 600 for token in drafts[right:]],
    ]
    committed, found = pair.step(contexts)
    assert committed == [prompt.greedy[1 : right + 2]]
    anew = [pair.context(prompt.tokens + prompt.greedy[: right + 1])]
    committed, expected = pair.step(anew)
    assert committed == [[prompt.greedy[right + 1]]]
    assert found.tolist() == expected.tolist()
    pair.release(contexts + anew)


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"QUANT": "nvfp4"}, {"self_attn.qkv_proj.codes", "mlp.down_proj.codes"}),
        (
            {"QUANT": "nvfp4", "QUANT_IGNORE": "q_proj", "QUANT_LM_HEAD": "nvfp4"},
            {"self_attn.qkv_proj.q_proj.weight", "self_attn.qkv_proj.v_proj.codes"},
        ),
        (
            {"BLOCKS": "2", "RANK": "4", "PRECOMPUTE_OUTSIDE": "0"},
            {"self_attn.o_proj.output_scales", "mlp.gate_up_proj.u"},
        ),
    ],
    ids=["nvfp4", "split", "bundles"],
)
def test_the_target_has_every_coverage(
    settings: dict[str, str],
    weights: set[str],
    tiny_directory: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(f"ATTNQUANT_{name}", value)
    pair = Pair.load(tiny_directory(CASE), DRAFTERS[CASE].write(tmp_path))
    bound = set(pair.graph.state_dict(auto_initialize=False))
    pair.trace()
    assert {f"target.layers.0.{name}" for name in weights} <= bound
    # The drafter's are as they were.
    assert not {name for name in bound if name.startswith("draft.") and "codes" in name}
    assert "draft.layers.0.self_attn.q_proj.weight" in bound


def test_weights_are_the_checkpoints_under_the_graphs_names(tmp_path: Path) -> None:
    case = dataclasses.replace(DRAFTERS[CASE], tied=False, dtype="bfloat16")
    shapes = DrafterShapes.from_config(case.config(), case.target.config())
    stored = case.tensors()
    weights = drafter_weights(tensors_of(case.write(tmp_path)), shapes, DType.float32)
    assert {weight.dtype for weight in weights.values()} == {DType.float32}
    stacked = ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight")
    for name, sources in {
        "lm_head.weight": ["lm_head.weight"],
        "norm.weight": ["model.norm.weight"],
        "pre_projection.weight": ["pre_projection.weight"],
        "layers.2.self_attn.q_norm.weight": ["model.layers.2.self_attn.q_norm.weight"],
        "layers.1.mlp.gate_up_proj.weight": stacked,
    }.items():
        expected = np.concatenate([stored[source] for source in sources]).astype(np.float32)
        assert np.array_equal(to_numpy(weights[name]), expected), name


def test_a_tied_head_is_the_embedding_and_keeps_the_files_memory(tmp_path: Path) -> None:
    case = DRAFTERS[CASE]
    shapes = DrafterShapes.from_config(case.config(), case.target.config())
    tensors = tensors_of(case.write(tmp_path))
    weights = drafter_weights(tensors, shapes, DType.float32)
    embedding = to_numpy(tensors["model.embed_tokens.weight"].data())
    assert np.shares_memory(to_numpy(weights["lm_head.weight"]), embedding)
    del tensors["model.norm.weight"]
    with pytest.raises(
        CheckpointError, match=r"the drafter's tensor model\.norm\.weight is missing"
    ):
        drafter_weights(tensors, shapes, DType.float32)


def test_the_graph_returns_distributions_if_drafts_are_drawn_from_them(pair: Drafting) -> None:
    """By default they are not: `DraftedGemma4Model.sampled_draft_vocab_size` is None."""
    assert SpeculativeConfig().draft_proposal == "argmax"
    assert len(pair.model.output_metadata) == 3


def test_the_graph_declares_what_a_step_brings(pair: Drafting) -> None:
    contexts = [pair.context(prompt.tokens) for prompt in CONTINUED]
    for _ in range(2):
        inputs = pair.inputs(contexts)
        declared = pair.model.input_metadata
        assert len(inputs.buffers) == len(declared)
        for buffer, spec in zip(inputs.buffers, declared, strict=True):
            assert buffer.dtype == spec.dtype, spec.name
            assert len(buffer.shape) == len(spec.shape), spec.name
        pair.step(contexts)
    pair.release(contexts)


def test_max_takes_our_architecture_for_the_pair() -> None:
    import_custom_architectures(["attnquant"])
    found = select_speculator(gemma4_arch.name, "mtp", DRAFTERS[CASE].config()["architectures"][0])
    assert found is gemma4_speculator
    arch = gemma4_speculator.derive()
    assert arch.pipeline_model is DraftedGemma4Model
    assert (arch.config, arch.memory_planner) == (gemma4_arch.config, gemma4_arch.memory_planner)
    assert arch.weight_adapters == gemma4_arch.weight_adapters
    assert arch.supports_device_graph_capture
    assert issubclass(DraftedGemma4Model, Gemma4Model)


def clear(pipeline: Pipeline, tokens: list[int], count: int) -> list[int]:
    """At most so many greedy tokens of a prompt: those before the first that another comes near."""
    context, found = pipeline.context(tokens), []
    for _ in range(count):
        logits = pipeline.step([context]).next_token_logits.to_numpy()[0]
        second, first = np.sort(logits)[-2:]
        if first - second < NEAR:
            break
        found.append(int(logits.argmax()))
    pipeline.release([context])
    return found


@pytest.mark.slow
def test_a_packed_target_s_greedy_tokens_are_those_without_a_drafter(
    tiny_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNQUANT_QUANT", "nvfp4")
    alone = Pipeline(tiny_directory(CASE))
    expected = [clear(alone, prompt.tokens, 24) for prompt in GOLDEN.prompts]
    pair = Drafting(tiny_directory(CASE), DRAFTERS[CASE].write(tmp_path))
    for prompt, tokens in zip(GOLDEN.prompts, expected, strict=True):
        assert decoded(pair, [prompt], len(tokens))[0][: len(tokens)] == tokens
    assert sum(map(len, expected)) > 4 * len(expected)
    # The weights are other weights.
    assert any(
        tokens != prompt.greedy[: len(tokens)]
        for prompt, tokens in zip(GOLDEN.prompts, expected, strict=True)
        if prompt.greedy is not None
    )
