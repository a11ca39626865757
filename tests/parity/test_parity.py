"""`python -m attnquant parity`: figures by their definition, and a command that notices damage."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from attnquant.cli import main
from attnquant.errors import CheckpointError
from attnquant.parity import Parity, PromptParity, render_table, to_json
from attnquant.parity.measure import GREEDY_TOKENS, MAX_KL
from attnquant.text import load_text
from tests.damaged import flip_row
from tests.golden.data import load_tiny
from tests.tiny.gemma3 import CASES

# The graph with every position's logits that `tests/gemma3/test_abi.py` compiles too.
CASE = "untied-sharded"
FLIPPED = ("model.layers.1.self_attn.k_proj.weight", 3)


@dataclass
class Table:
    """A model of one token's memory, by its logits: what comes after each token."""

    rows: NDArray[np.float32]

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        return self.rows[tokens]

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        chosen = [*tokens]
        for _ in range(count):
            chosen.append(int(self.rows[chosen[-1]].argmax()))
        return chosen[len(tokens) :]


def table(seed: int) -> Table:
    return Table(np.random.default_rng(seed).normal(size=(9, 9)).astype(np.float32))


def test_figures_are_their_definitions() -> None:
    one, other, tokens = table(0), table(1), [2, 5, 7]
    found = PromptParity.of("x", tokens, one, other)
    p, q = one.logits(tokens).astype(np.float64), other.logits(tokens).astype(np.float64)
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(p, q, strict=True)]
    assert found.cosine == pytest.approx(min(cosines))
    assert found.max_error == pytest.approx(np.abs(p - q).max())
    assert found.relative_error == pytest.approx(np.linalg.norm(p - q) / np.linalg.norm(p))
    log_p, log_q = (rows - np.logaddexp.reduce(rows, axis=1, keepdims=True) for rows in (p, q))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    assert (found.mean_kl, found.max_kl) == (pytest.approx(kl.mean()), pytest.approx(kl.max()))
    assert found.top1 == np.mean(p.argmax(axis=1) == q.argmax(axis=1))
    theirs, ours = (model.greedy(tokens, GREEDY_TOKENS) for model in (one, other))
    assert found.greedy < found.greedy_asked == GREEDY_TOKENS
    assert theirs[: found.greedy] == ours[: found.greedy]
    assert theirs[found.greedy] != ours[found.greedy]


def test_a_model_agrees_with_itself_and_nothing_with_nan() -> None:
    same = PromptParity.of("x", [2, 5], table(0), table(0))
    assert (same.max_kl, same.top1, same.greedy) == (pytest.approx(0), 1, GREEDY_TOKENS)
    broken = table(0)
    broken.rows[5, 3] = np.nan
    lost = PromptParity.of("x", [2, 5], table(0), broken)
    for prompts, agrees in (([same], True), ([same, lost], False), ([lost, same], False)):
        parity = Parity(model="a", reference="b", limit=1e9, prompts=prompts)
        assert parity.agrees is agrees
        assert json.loads(to_json(parity))["agrees"] is agrees
        assert ("beyond" in render_table(parity)) is not agrees


def test_other_vocabularies_are_refused() -> None:
    small = Table(table(0).rows[:, :8])
    with pytest.raises(CheckpointError, match=r"logits \[2, 9\], expected \[2, 8\]"):
        PromptParity.of("x", [2, 5], table(0), small)


def test_one_flipped_row_is_noticed(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    good = tiny_directory(CASE)
    damaged = flip_row(good, tmp_path / "damaged", *FLIPPED)
    prompt = load_tiny(CASE).prompts[2]
    expected = load_text(good)
    found = PromptParity.of("x", prompt.tokens, expected, load_text(damaged))
    assert found.max_kl > 100 * MAX_KL
    assert prompt.every is not None
    assert np.abs(expected.logits(prompt.tokens) - prompt.every).max() < 1e-3


def test_without_torch_it_says_so_in_one_line(
    tiny_directory: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["parity", str(tiny_directory(CASE))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("attnquant: parity: found no torch") and "[parity]" in line


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x"])
def test_the_limit_is_a_distance(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["parity", "demo", f"--max-kl={value}"])
    assert caught.value.code == 2
    assert "is not a number of nats" in capsys.readouterr().err


class TestAgainstTransformers:
    @pytest.fixture(autouse=True)
    def torch(self) -> None:
        pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")

    def test_a_tiny_checkpoint_agrees_and_a_damaged_one_does_not(
        self,
        tiny_directory: Callable[[str], Path],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        good = tiny_directory(CASE)
        damaged = flip_row(good, tmp_path / "damaged", *FLIPPED)
        assert main(["parity", str(good)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"{good} against transformers' {good}")
        assert lines[-1].endswith("within the limit of 1.0e-07 nats")
        assert main(["parity", str(damaged), "--reference", str(good), "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert not found["agrees"] and found["max_kl"] > 100 * MAX_KL
        assert found["prompts"][-1]["tokens"] == CASES[CASE].sliding_window + 64
        assert main(["parity", str(damaged), "--reference", str(good), "--max-kl", "99"]) == 0

    @pytest.mark.slow
    def test_gemma4_agrees(self, tiny_directory: Callable[[str], Path]) -> None:
        assert main(["parity", str(tiny_directory("gemma4-shared-values"))]) == 0

    @pytest.mark.slow
    def test_the_demo_agrees_and_with_one_flipped_row_does_not(
        self, demo_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["parity", "demo"]) == 0
        damaged = flip_row(
            demo_directory, tmp_path / "damaged", "model.layers.9.mlp.gate_proj.weight", 100
        )
        assert main(["parity", str(damaged), "--reference", "demo"]) == 1
        assert "beyond the limit" in capsys.readouterr().out

    def test_what_transformers_cannot_load_is_one_line(
        self,
        tiny_directory: Callable[[str], Path],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        model = str(tiny_directory(CASE))
        (tmp_path / "config.json").write_text("{}")
        assert main(["parity", model, "--reference", str(tmp_path)]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"attnquant: {tmp_path}: transformers cannot load it")
