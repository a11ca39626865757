"""What a profile makes of what it heard, and its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attnquant.errors import CheckpointError
from attnquant.nvfp4.profile import SEQUENCE_TOKENS, Profile, random_tokens

QKV = "layers.3.self_attn.qkv_proj"
DOWN = "layers.3.mlp.down_proj"
FIRST = [233910, 106151, 225071, 9157]


def profile() -> Profile:
    return Profile(
        mean_squares={
            QKV: np.array([0.0, 1.0, 2.0, 5.0], np.float32),
            DOWN: np.zeros(2, np.float32),
        },
        largest={QKV: 672.0, DOWN: 0.0},
    )


def test_importance_is_one_on_average_and_never_nothing() -> None:
    importance = profile().importance(QKV)
    np.testing.assert_allclose(importance, [1e-4, 0.5, 1.0, 2.5])
    assert importance.dtype == np.float32


def test_a_member_of_a_split_group_has_the_groups() -> None:
    np.testing.assert_array_equal(profile().importance(f"{QKV}.k_proj"), profile().importance(QKV))
    assert profile().input_scale(f"{QKV}.k_proj") == profile().input_scale(QKV)


def test_a_silent_group_counts_all_columns_alike() -> None:
    np.testing.assert_array_equal(profile().importance(DOWN), [1, 1])
    assert profile().input_scale(DOWN) == 1


def test_what_was_heard_takes_a_quarter_of_the_range() -> None:
    assert profile().input_scale(QKV) * 6 * 448 == pytest.approx(4 * 672)


def test_a_file_holds_it_exactly(tmp_path: Path) -> None:
    path = tmp_path / "profile.npz"
    profile().save(path)
    loaded = Profile.load(path)
    assert loaded.largest == profile().largest
    assert list(loaded.mean_squares) == [QKV, DOWN]
    for name, squares in profile().mean_squares.items():
        np.testing.assert_array_equal(loaded.mean_squares[name], squares)


@pytest.mark.parametrize("content", [b"", b"no npz file", b"PK\x03\x04 cut off"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.npz"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"profile\.npz"):
        Profile.load(path)


def test_random_tokens_are_the_same_for_ever() -> None:
    sequences = random_tokens(2 * SEQUENCE_TOKENS + 3, 262_144)
    assert [len(ids) for ids in sequences] == [SEQUENCE_TOKENS, SEQUENCE_TOKENS, 3]
    ids = np.concatenate(sequences)
    assert ids[:4].tolist() == FIRST
    assert ids.min() >= 0
    assert ids.max() < 262_144
    assert len(np.unique(ids)) > 1000


def test_few_tokens_are_one_sequence() -> None:
    assert [len(ids) for ids in random_tokens(2, 100)] == [2]
