"""The tiny checkpoints are what the golden files were made from, and what they claim to be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.golden.data import fingerprint, load_tiny, relative_error
from tests.tiny import prompts, tokenizer
from tests.tiny.gemma3 import CASES
from tests.tiny.stable_random import gaussian, integers, uniform


@pytest.mark.parametrize("name", CASES)
def test_weights_and_prompts_are_those_of_the_golden_file(name: str, tmp_path: Path) -> None:
    golden = load_tiny(name)
    assert fingerprint(CASES[name].write(tmp_path)) == golden.fingerprint
    expected = [prompts.prompt(CASES[name].vocab, length) for length in prompts.LENGTHS]
    assert [prompt.tokens for prompt in golden.prompts] == expected


@pytest.mark.parametrize("name", CASES)
def test_golden_answers_are_whole_and_agree_with_each_other(name: str) -> None:
    vocab = CASES[name].vocab
    for prompt in load_tiny(name).prompts:
        assert prompt.last.shape == (vocab,)
        assert prompt.last.dtype == np.float32
        assert np.std(prompt.last) > 2.5
        if prompt.every is not None:
            assert prompt.every.shape == (len(prompt.tokens), vocab)
            assert relative_error(prompt.every[-1], prompt.last) < 1e-5
        if prompt.greedy is not None:
            assert len(prompt.greedy) == prompts.GREEDY_TOKENS
            assert prompt.greedy[0] == prompt.last.argmax()
            assert not {tokenizer.EOS, tokenizer.END_OF_TURN} & set(prompt.greedy)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_not_gentle(name: str) -> None:
    tensors = CASES[name].tensors()
    rms = {
        role: np.sqrt(np.mean(tensors[f"model.layers.0.self_attn.{role}_proj.weight"] ** 2.0))
        for role in "qkv"
    }
    assert 5 < rms["q"] / rms["k"] < 20
    assert 2 < rms["v"] / rms["k"] < 5
    gain = 1 + tensors["model.layers.0.input_layernorm.weight"].astype(np.float32)
    assert gain.min() < 0.4
    assert gain.max() > 2.5


def test_another_config_keeps_the_weights(tmp_path: Path) -> None:
    case = CASES["pattern2-scalar"]
    changed = replace(case, pattern=4, query_pre_attn_scalar=256)
    assert fingerprint(changed.write(tmp_path / "a")) == fingerprint(case.write(tmp_path / "b"))
    assert fingerprint(replace(case, seed=7).write(tmp_path / "c")) != fingerprint(tmp_path / "b")


def test_shards_hold_every_tensor_once(tmp_path: Path) -> None:
    case = CASES["untied-sharded"]
    index = json.loads(case.write(tmp_path).joinpath("model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(case.tensors())
    qkv = [index["weight_map"][f"model.layers.0.self_attn.{role}_proj.weight"] for role in "qkv"]
    assert len(set(qkv)) == 3
    whole = replace(case, shards=1).write(tmp_path / "whole")
    assert fingerprint(whole) == fingerprint(tmp_path)


@pytest.mark.parametrize("text", prompts.TEXTS)
def test_tokenizer_loads_and_keeps_any_text(text: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers comes with modular")
    case = CASES["pattern2-scalar"]
    loaded = transformers.AutoTokenizer.from_pretrained(case.write(tmp_path))
    assert len(loaded) == case.vocab
    ids = loaded.encode(text)
    assert ids[0] == tokenizer.BOS
    assert max(ids) < case.vocab
    assert loaded.decode(ids, skip_special_tokens=True) == text


def test_chat_template_speaks_gemma(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers comes with modular")
    loaded = transformers.AutoTokenizer.from_pretrained(CASES["pattern2-scalar"].write(tmp_path))
    chat = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Yes?"}]
    text = loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n"
        "<start_of_turn>model\nYes?<end_of_turn>\n<start_of_turn>model\n"
    )
    ids = loaded.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.START_OF_TURN) == 3
    assert ids.count(tokenizer.END_OF_TURN) == 2


def test_random_values_are_the_promised_ones() -> None:
    assert integers("key", 0, 1000, 4) == [761, 967, 966, 893]
    assert integers("key", 7, 512, 5) == integers("key", 7, 512, 9)[:5]
    assert integers("key", 7, 512, 5) != integers("other", 7, 512, 5)
    values = gaussian("key", (400, 100))
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1) < 0.02
    assert np.abs(values).max() < 3.47
    assert 0 <= uniform("key", (1000,)).min() < 0.01
    assert 0.99 < uniform("key", (1000,)).max() < 1


def test_relative_error() -> None:
    assert relative_error([3.0, 4.0], [3.0, 4.0]) == 0
    assert relative_error([3.0, 4.5], [3.0, 4.0]) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="shape"):
        relative_error([1.0], [[1.0]])
    with pytest.raises(ValueError, match="NaN"):
        relative_error([np.nan], [1.0])
