"""The tiny checkpoints are what the golden files were made from, and what they claim to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attnquant.checkpoint.verify import verify
from attnquant.decoder_shapes import DecoderShapes
from tests.golden.data import fingerprint, load_tiny, relative_error
from tests.tiny import prompts, tokenizer
from tests.tiny.gemma4 import CASES, IMAGES, LANGUAGE, image_prompt
from tests.tiny.gemma4_drafter import DRAFTERS


@pytest.mark.parametrize("name", CASES)
def test_weights_and_prompts_are_those_of_the_golden_file(name: str, tmp_path: Path) -> None:
    golden, case = load_tiny(name), CASES[name]
    assert fingerprint(case.write(tmp_path)) == golden.fingerprint
    expected = [prompts.prompt(case.ordinary_vocab, length) for length in prompts.LENGTHS]
    assert [prompt.tokens for prompt in golden.prompts] == expected
    assert (golden.image is not None) == case.vision
    if golden.image is not None:
        assert golden.image.tokens == image_prompt(case)
        assert len(golden.image.greedy) == prompts.IMAGE_GREEDY_TOKENS


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_its_drafter(name: str, tmp_path: Path) -> None:
    golden = load_tiny(name)
    assert (golden.drafter_fingerprint is not None) == (name in DRAFTERS)
    if name not in DRAFTERS:
        return
    assert fingerprint(DRAFTERS[name].write(tmp_path)) == golden.drafter_fingerprint
    for prompt in golden.prompts:
        assert prompt.drafts is not None
        assert len(prompt.drafts) == prompts.DRAFTED_TOKENS
        assert set(prompt.drafts) <= set(range(CASES[name].vocab))


@pytest.mark.parametrize("name", CASES)
def test_golden_answers_are_whole_and_reach_the_softcap(name: str) -> None:
    case, golden = CASES[name], load_tiny(name)
    # Before the softcap the largest logits were beyond it: tanh(1) of it is 0.76 of it.
    largest = [np.abs(prompt.last).max() for prompt in golden.prompts]
    assert max(largest) > 0.76 * case.final_logit_softcapping
    assert min(largest) > 0.7 * case.final_logit_softcapping
    for prompt in golden.prompts:
        assert prompt.last.shape == (case.vocab,)
        assert np.std(prompt.last) > 2.5
        if prompt.every is not None:
            assert relative_error(prompt.every[-1], prompt.last) < 1e-5
        if prompt.greedy is not None:
            assert prompt.greedy[0] == prompt.last.argmax()
            assert not {tokenizer.EOS, tokenizer.END_OF_TURN} & set(prompt.greedy)


@pytest.mark.parametrize("name", CASES)
def test_it_is_a_checkpoint_that_is_served(name: str, tmp_path: Path) -> None:
    verify(CASES[name].write(tmp_path))


def test_the_cases_differ_where_gemma_4_checkpoints_do() -> None:
    shared, own = (CASES[name] for name in ("gemma4-shared-values", "gemma4-own-values"))
    for case, has_values in ((shared, False), (own, True)):
        full = DecoderShapes.from_config(case.config()).layers[-1]
        assert ("v_proj" in full.projections) == has_values
        assert full.head_dim != DecoderShapes.from_config(case.config()).layers[0].head_dim
    scalars = shared.scalars + own.scalars
    assert (min(scalars), max(scalars)) == (0.01, 0.9)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_not_gentle(name: str) -> None:
    tensors = CASES[name].tensors()
    rms = {
        role: np.sqrt(np.mean(tensors[f"{LANGUAGE}layers.0.self_attn.{role}_proj.weight"] ** 2.0))
        for role in "qkv"
    }
    assert 5 < rms["q"] / rms["k"] < 20
    assert 2 < rms["v"] / rms["k"] < 5
    gain = tensors[f"{LANGUAGE}layers.0.input_layernorm.weight"].astype(np.float32)
    assert gain.min() < 0.4
    assert gain.max() > 2.5


def test_images_need_no_resizing_and_differ() -> None:
    first, second = IMAGES
    assert first.shape == (*second.shape[1::-1], 3)
    assert first.shape[0] * first.shape[1] == 70 * 24**2
    assert not np.array_equal(first.reshape(-1)[:1000], second.reshape(-1)[:1000])
