"""Nothing runs what a checkpoint says, or writes but to the cache and where it is told."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.serve.server import ROOT

SOURCES = [ROOT / "run_max.py", *sorted((ROOT / "attnquant").rglob("*.py"))]

# Modules that run code or make objects of what they read.
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "torch"}
# It is the reference of `parity`, which loads safetensors alone.
RUNS_TORCH = ("attnquant/parity/reference.py", "torch")
FORBIDDEN_FUNCTIONS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {"unsafe_load", "extractall", "system"}
# Where a process is started, and where the network is used.
STARTS_PROCESSES = {"attnquant/kernels/__init__.py"}
USES_THE_NETWORK = {"attnquant/checkpoint/hub.py"}
NETWORK = {"huggingface_hub", "requests", "httpx", "urllib", "socket", "http", "aiohttp"}


def nodes(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield path.relative_to(ROOT).as_posix(), node


def imports() -> Iterator[tuple[str, str]]:
    for place, node in nodes(ast.Import):
        assert isinstance(node, ast.Import)
        yield from ((place, alias.name.split(".")[0]) for alias in node.names)
    for place, node in nodes(ast.ImportFrom):
        assert isinstance(node, ast.ImportFrom)
        yield place, (node.module or "").split(".")[0]


def test_nothing_unpickles_and_few_places_reach_out() -> None:
    found = set(imports())
    assert {pair for pair in found if pair[1] in FORBIDDEN_IMPORTS} == {RUNS_TORCH}
    assert {place for place, name in found if name == "subprocess"} == STARTS_PROCESSES
    assert {place for place, name in found if name in NETWORK} == USES_THE_NETWORK


def test_nothing_evaluates_and_remote_code_is_never_trusted() -> None:
    calls = 0
    for place, node in nodes(ast.Call):
        assert isinstance(node, ast.Call)
        calls += 1
        function = node.func
        if isinstance(function, ast.Name):
            assert function.id not in FORBIDDEN_FUNCTIONS, f"{place}:{node.lineno}: {function.id}"
        if isinstance(function, ast.Attribute):
            assert function.attr not in FORBIDDEN_METHODS, f"{place}:{node.lineno}: {function.attr}"
        for keyword in node.keywords:
            said = keyword.arg, ast.unparse(keyword.value)
            assert keyword.arg != "trust_remote_code", f"{place}:{node.lineno}"
            assert said not in {("allow_pickle", "True"), ("shell", "True")}, place
    assert calls > 1000


# Prints what a command writes, removes, starts and connects to.
AUDIT = """
import os, sys
seen = []
def hook(event, values):
    if event == "open":
        path, mode, flags = values
        if isinstance(path, str) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            seen.append((event, path))
    elif event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink",
                   "os.truncate", "shutil.rmtree", "subprocess.Popen", "os.system",
                   "socket.connect", "pickle.find_class"):
        seen.append((event, *map(str, values[:2])))
sys.addaudithook(hook)
from attnquant.cli import main
status = main(sys.argv[1:])
assert status == 0, status
import json
print("AUDIT" + json.dumps(seen))
"""


def audited(*arguments: str, cache: Path) -> list[list[str]]:
    result = subprocess.run(
        [sys.executable, "-c", AUDIT, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    seen: list[list[str]] = json.loads(result.stdout.rpartition("AUDIT")[2])
    return [event for event in seen if event[1] != "/dev/null"]


def test_a_command_writes_where_it_is_told_and_nowhere_else(
    tmp_path: Path, tiny_directory: Callable[[str], Path]
) -> None:
    model, page = str(tiny_directory("pattern2-scalar")), tmp_path / "out" / "page.html"
    page.parent.mkdir()
    before = {path: path.stat() for path in Path(model).iterdir()}
    assert audited("inspect", model, cache=tmp_path / "cache") == []
    events = audited(
        "report", model, "--blocks", "1", "--ranks", "2", "--html", str(page), cache=tmp_path
    )
    assert events and page.is_file()
    for event in events:
        assert event[0] in {"open", "os.mkdir", "os.rename", "os.rmdir", "shutil.rmtree"}, event
        assert Path(event[1]).is_relative_to(page.parent), event
    assert {path: path.stat().st_mtime_ns for path in Path(model).iterdir()} == {
        path: status.st_mtime_ns for path, status in before.items()
    }


EVIL = "open({place!r}, 'w').write('it ran')\nclass Evil:\n    pass\n"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_in_a_checkpoint_does_not_run(
    name: str, tmp_path: Path, tiny_directory: Callable[[str], Path]
) -> None:
    from max.pipelines import PipelineArgs, PipelineConfig

    from attnquant.nn.tokenizer import DecoderTokenizer
    from attnquant.preflight import check_model

    model, place = tmp_path / "model", tmp_path / "ran"
    model.mkdir()
    for path in tiny_directory("pattern2-scalar").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    (model / "evil.py").write_text(EVIL.format(place=str(place)))
    classes = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    content = json.loads((model / name).read_text())
    auto_map = {kind: "evil.Evil" for kind in classes}
    auto_map["AutoTokenizer"] = ["evil.Evil", "evil.Evil"]  # type: ignore[assignment]
    (model / name).write_text(json.dumps(content | {"auto_map": auto_map}))
    check_model(str(model))
    config = PipelineConfig.from_args(
        PipelineArgs.from_flat_kwargs(
            model_path=str(model),
            custom_architectures=["attnquant"],
            device_specs="cpu",
            quantization_encoding="float32",
        )
    )
    assert config.model.huggingface_config.model_type == "gemma3_text"
    DecoderTokenizer(str(model), config)
    assert not place.exists()
