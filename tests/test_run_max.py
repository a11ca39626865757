"""run_max.py: what it takes out of the environment, what it adds to the command, how it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import run_max
from attnquant.demo import COMPLETION_TEMPLATE
from attnquant.errors import SettingsError

SCRIPT = Path(run_max.__file__)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=300,
        check=False,
    )


def test_foreign_installations_are_dropped_and_knobs_stay(tmp_path: Path) -> None:
    prefix = tmp_path / "venv"
    foreign = {
        "MODULAR_HOME": "/opt/other/share/max",
        "MODULAR_MAX_PACKAGE_ROOT": str(tmp_path / "elsewhere"),
        "MODULAR_MOJO_MAX_IMPORT_PATH": f"{prefix}/lib,/opt/other/lib/mojo",
    }
    kept = {
        "MODULAR_DERIVED_PATH": str(prefix / "derived"),
        "MODULAR_CACHE_DIR": "/big/disk/cache",
        "MODULAR_ENABLE_PROFILING": "1",
        "MODULAR_MAX_ALLOCATOR": "system",
        "HOME": "/home/somebody",
    }
    environ = foreign | kept
    assert run_max.drop_foreign_variables(environ, prefix) == sorted(foreign)
    assert environ == kept


def test_the_dropped_names_are_said_in_one_line() -> None:
    result = run("--version", MODULAR_HOME="/opt/other/share/max")
    assert result.returncode == 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("run_max.py:")]
    assert lines == ["run_max.py: ignoring MODULAR_HOME: set for another MAX installation"]


@pytest.mark.parametrize("given", [{}, {"MALLOC_CONF": "narenas:1"}])
def test_the_users_allocator_options_stay(given: dict[str, str]) -> None:
    environ = dict(given)
    run_max.release_freed_memory(environ)
    assert environ == {"MALLOC_CONF": "dirty_decay_ms:100,background_thread:true"} | given


def test_timers_wait_in_processes_that_begin_later(tmp_path: Path) -> None:
    path = Path("/proc/self/timerslack_ns")
    if not path.exists():
        pytest.skip("needs Linux")
    code = (
        "import run_max, subprocess, sys; run_max.let_timers_wait(); "
        f"subprocess.run([sys.executable, '-c', 'print(open(\"{path}\").read())'], check=True)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=run_max.ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["1000000"]
    # Elsewhere there is no such file, and none is made.
    run_max.let_timers_wait(tmp_path / "none" / "timerslack_ns")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "accelerator", "expected"),
    [
        pytest.param(
            ["generate", "--model", "m"],
            True,
            ["--custom-architectures", "attnquant"],
            id="generate-gpu",
        ),
        pytest.param(
            ["serve", "--model", "m"],
            True,
            ["--custom-architectures", "attnquant", "--enable-in-flight-batching"],
            id="serve-gpu",
        ),
        pytest.param(
            ["generate", "--model", "m"],
            False,
            [
                *("--custom-architectures", "attnquant"),
                *("--devices", "cpu", "--quantization-encoding", "float32"),
            ],
            id="generate-cpu",
        ),
        pytest.param(
            [
                *("serve", "--custom-architectures=mine", "--no-enable-in-flight-batching"),
                *("--devices=cpu", "--quantization-encoding", "float32"),
            ],
            False,
            [],
            id="all-given",
        ),
        pytest.param(
            ["warm-cache", "--target", "cuda:sm_90a", "--devices", "gpu"],
            False,
            ["--custom-architectures", "attnquant"],
            id="warm-cache-for-elsewhere",
        ),
    ],
)
def test_only_what_is_missing_is_added(
    arguments: list[str], accelerator: bool, expected: list[str]
) -> None:
    assert run_max.with_defaults(arguments, accelerator) == [*arguments, *expected]


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        pytest.param(
            ["generate", "--model", "demo"],
            ["--chat-template", str(COMPLETION_TEMPLATE), "--top-k", "1"],
            id="generate",
        ),
        pytest.param(
            ["generate", "--model-path=demo", "--temperature", "1", "--chat-template", "mine"],
            [],
            id="generate-all-given",
        ),
        pytest.param(["serve", "--model=demo"], ["--served-model-name", "demo"], id="serve"),
        pytest.param(["generate", "--model", "./demo"], [], id="a-directory"),
    ],
)
def test_the_demo_is_put_in_place(
    arguments: list[str], added: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("attnquant.demo.prepare_demo", lambda: tmp_path)
    replaced = [
        str(tmp_path) if word == "demo" else word.replace("=demo", f"={tmp_path}")
        for word in arguments
    ]
    assert run_max.with_demo(arguments) == [*replaced, *added]


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (["serve", "--model", "a", "--model=b"], "b"),
        (["serve", "--model-path=a", "--config-file", "absent"], "a"),
        (["serve"], None),
    ],
)
def test_the_model_is_the_one_that_max_takes(arguments: list[str], model: str | None) -> None:
    assert run_max.model_of(arguments) == model


@pytest.mark.parametrize(
    ("content", "model"),
    [
        ("model:\n  model_path: a/b\n", "a/b"),
        ("model: {model_path: [1]}", None),
        ("model: 3", None),
        ("", None),
        ("[1]", "cannot be read as YAML options"),
        ("a: b: c", "cannot be read as YAML options"),
        ("\0", "cannot be read as YAML options"),
    ],
)
def test_the_model_of_an_option_file(content: str, model: str | None, tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text(content)
    arguments = ["serve", "--config-file", str(tmp_path / "options.yaml")]
    if content in ("[1]", "a: b: c", "\0"):
        with pytest.raises(SettingsError, match=model) as caught:
            run_max.model_of(arguments)
        assert str(caught.value).isprintable()
    else:
        assert run_max.model_of(arguments) == model


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["generate", "--help"]])
def test_help(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    assert "Usage:" in result.stdout
    assert "demo" not in result.stderr


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_impossible_settings_are_one_line_and_status_2(command: str) -> None:
    result = run(command, "--model", "demo", ATTNQUANT_BLOCKS="many", ATTNQUANT_BLOKS="3")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines() == [
        "run_max.py: ATTNQUANT_BLOKS is not a setting: did you mean ATTNQUANT_BLOCKS?; "
        "ATTNQUANT_BLOCKS='many' is not a whole number, 1 or more"
    ]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ATTNQUANT_quant", "nvfp4", "did you mean ATTNQUANT_QUANT?"),
        ("ATTNQUANT_BLOCKS", "", "ATTNQUANT_BLOCKS='' is not a whole number, 1 or more"),
        ("ATTNQUANT_BLOCKS", "٣", "is not a whole number, 1 or more"),
        ("ATTNQUANT_A\nB", "1", "'ATTNQUANT_A\\nB' is not a setting"),
        ("ATTNQUANT_QUANT_LM_HEAD", "nvfp4", "ATTNQUANT_QUANT=nvfp4 is not set"),
    ],
)
def test_no_wrong_setting_is_overlooked(variable: str, value: str, words: str) -> None:
    result = run("serve", "--model", "google/gemma-3-1b-it", **{variable: value})
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("run_max.py: ") and words in line


def test_draft_model_is_spelled_as_max_spells_it() -> None:
    given = ["serve", "--draft-model", "a", "--draft-model=b", "--draft-model-path", "c"]
    assert run_max.with_draft_option(given) == [
        *("serve", "--draft-model-path", "a", "--draft-model-path=b", "--draft-model-path", "c")
    ]
