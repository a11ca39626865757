"""A profile hears what goes into each projection: against the same layers in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attnquant.encoder import encoder_of
from attnquant.errors import SettingsError
from attnquant.nn import profiled
from attnquant.nvfp4.profile import Profile, random_tokens
from tests.tiny.cases import CASES
from tests.tiny.gemma3 import TinyGemma3

# Less than the window, so that every layer attends to everything.
TOKENS = 100
CASE = CASES["pattern2-scalar"]

Array = NDArray[np.float64]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(profiled, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "attnquant" / "profiles"


@pytest.fixture
def profile(tiny_directory: Callable[[str], Path], cache: Path) -> Profile:
    made = encoder_of(tiny_directory(CASE.name), "profile", tokens=TOKENS).profile
    assert made is not None
    return made


def test_it_hears_what_the_layers_hear(profile: Profile) -> None:
    (ids,) = random_tokens(TOKENS, CASE.vocab)
    expected = inputs_of_projections(ids)
    assert list(profile.mean_squares) == list(expected)
    for module, x in expected.items():
        heard = profile.mean_squares[module]
        np.testing.assert_allclose(heard, (x[1:] ** 2).mean(axis=0), rtol=1e-3, err_msg=module)
        assert profile.largest[module] == pytest.approx(np.abs(x[1:]).max(), rel=1e-3), module


def test_it_is_made_once(
    profile: Profile,
    tiny_directory: Callable[[str], Path],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("made again")

    (kept,) = cache.glob("*.npz")
    with monkeypatch.context() as patch:
        patch.setattr(profiled, "profile_decoder", refuse)
        again = encoder_of(tiny_directory(CASE.name), "profile", tokens=TOKENS).profile
        assert again is not None
        for module, squares in profile.mean_squares.items():
            np.testing.assert_array_equal(again.mean_squares[module], squares)
        # Other tokens, and other weights of the same shapes, are other profiles.
        for name, tokens in ((CASE.name, TOKENS + 1), ("linear-rope-old-config", TOKENS)):
            with pytest.raises(AssertionError, match="made again"):
                encoder_of(tiny_directory(name), "profile", tokens=tokens)
    kept.write_bytes(b"cut off")
    anew = encoder_of(tiny_directory(CASE.name), "profile", tokens=TOKENS).profile
    assert anew is not None
    for module, squares in profile.mean_squares.items():
        np.testing.assert_array_equal(anew.mean_squares[module], squares)


def test_shared_blocks_have_none(tiny_directory: Callable[[str], Path]) -> None:
    assert encoder_of(tiny_directory(CASE.name), None, shared=True).profile is None
    with pytest.raises(SettingsError, match="--scales profile needs each layer's own"):
        encoder_of(tiny_directory(CASE.name), "profile", shared=True)


def inputs_of_projections(ids: NDArray[np.int64]) -> dict[str, Array]:
    """`[tokens, in]` of each fused group: Gemma 3 in float64, after its paper and transformers."""
    case = CASE
    assert isinstance(case, TinyGemma3)
    weights = {
        name.removeprefix("model."): array.astype(np.float64)
        for name, array in case.tensors().items()
    }
    x = weights["embed_tokens.weight"][ids] * case.hidden**0.5
    heard = {}
    for index, kind in enumerate(case.layer_types):
        theta = case.rope_theta if kind == "full_attention" else case.rope_local_theta

        def weight(name: str, layer: int = index) -> Array:
            return weights[f"layers.{layer}.{name}.weight"]

        def norm(name: str, of: Array, gain: Callable[[str], Array] = weight) -> Array:
            scale = np.sqrt((of**2).mean(axis=-1, keepdims=True) + case.rms_norm_eps)
            return of / scale * (1 + gain(name))

        def heads(name: str, of: Array, gain: Callable[[str], Array] = weight) -> Array:
            split = (of @ gain(f"self_attn.{name}_proj").T).reshape(len(ids), -1, case.head_dim)
            return split.transpose(1, 0, 2)

        def rotated(of: Array, base: float = theta) -> Array:
            half = case.head_dim // 2
            angles = np.outer(np.arange(len(ids)), base ** (-np.arange(half) / half))
            left, right = of[..., :half], of[..., half:]
            cos, sin = np.cos(angles), np.sin(angles)
            return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

        block = f"layers.{index}.self_attn"
        heard[f"{block}.qkv_proj"] = normed = norm("input_layernorm", x)
        q = rotated(norm("self_attn.q_norm", heads("q", normed)))
        k = rotated(norm("self_attn.k_norm", heads("k", normed)))
        k, v = (np.repeat(a, case.heads // case.kv_heads, axis=0) for a in (k, heads("v", normed)))
        scores = q @ k.transpose(0, 2, 1) * case.query_pre_attn_scalar**-0.5
        scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
        likely = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = likely / likely.sum(axis=-1, keepdims=True) @ v
        heard[f"{block}.o_proj"] = joined = attended.transpose(1, 0, 2).reshape(len(ids), -1)
        x = x + norm("post_attention_layernorm", joined @ weight("self_attn.o_proj").T)

        block = f"layers.{index}.mlp"
        heard[f"{block}.gate_up_proj"] = normed = norm("pre_feedforward_layernorm", x)
        gate = normed @ weight("mlp.gate_proj").T
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        gelu = 0.5 * gate * (1 + np.tanh(inner))
        heard[f"{block}.down_proj"] = product = gelu * (normed @ weight("mlp.up_proj").T)
        x = x + norm("post_feedforward_layernorm", product @ weight("mlp.down_proj").T)
    return heard
