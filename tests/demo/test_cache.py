"""A directory is made once, completely or not at all, however its makers end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from attnquant.demo.cache import make_once

FILES = ("a", "b", "c")

# A maker whose work takes a while: prints "ready", then whether it made the directory.
MAKER = """
import sys, time
from pathlib import Path
from attnquant.demo.cache import make_once

def build(directory):
    for name in "abc":
        (directory / name).write_bytes(name.encode() * 100_000)
        time.sleep(float(sys.argv[2]))

print("ready", flush=True)
made = make_once(Path(sys.argv[1]), "abc", build, lambda: print("waiting", flush=True))
print("made" if made else "found", flush=True)
"""


def build(directory: Path) -> None:
    for name in FILES:
        (directory / name).write_text(name)


def fail(directory: Path) -> None:
    raise AssertionError(f"{directory} was built again")


def start_maker(target: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAKER, str(target), str(pause)]
    # Kernels that ran in this process set variables, below Python, that mislead another one.
    environ = dict(os.environ)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)


def assert_whole(target: Path) -> None:
    content = {path.name: path.read_bytes() for path in target.iterdir()}
    assert content == {name: name.encode() * 100_000 for name in FILES}


def test_made_once(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "down" / "demo"
    assert make_once(target, FILES, build)
    assert sorted(path.name for path in target.iterdir()) == list(FILES)
    assert not make_once(target, FILES, fail)
    assert sorted(path.name for path in target.parent.iterdir()) == ["demo", "demo.lock"]


def test_a_directory_that_lacks_a_file_is_made_again(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    make_once(target, FILES, build)
    (target / "b").unlink()
    (target / "c").write_text("old")
    assert make_once(target, FILES, build)
    assert [(target / name).read_text() for name in FILES] == list(FILES)


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "home"
    target.mkdir()
    (target / "thesis.txt").write_text("mine")
    (target / "a").write_text("mine too")
    with pytest.raises(OSError, match="not empty"):
        make_once(target, FILES, fail)
    assert (target / "thesis.txt").read_text() == "mine"
    assert (target / "a").read_text() == "mine too"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_a_failure_leaves_nothing_and_the_next_try_works(
    tmp_path: Path, error: type[BaseException]
) -> None:
    target = tmp_path / "demo"

    def half(directory: Path) -> None:
        (directory / "a").write_text("a")
        raise error

    with pytest.raises(error):
        make_once(target, FILES, half)
    assert [path.name for path in tmp_path.iterdir()] == ["demo.lock"]
    assert make_once(target, FILES, build)


def test_what_a_killed_maker_left_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    leftover = tmp_path / "demo.partial"
    (leftover / "folder").mkdir(parents=True)
    (leftover / "folder" / "a").write_text("old")
    assert make_once(target, FILES, build)
    assert not leftover.exists()
    assert sorted(path.name for path in target.iterdir()) == list(FILES)


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    made: list[bool] = []

    def slow(directory: Path) -> None:
        time.sleep(0.1)
        build(directory)

    threads = [
        threading.Thread(target=lambda: made.append(make_once(target, FILES, slow)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False, False, False, True]


def test_processes_that_come_later_wait_and_use_what_the_first_made(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    makers = [start_maker(target, pause=0.5) for _ in range(3)]
    outputs = [maker.communicate(timeout=120)[0].split() for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0, 0]
    assert sorted(output[-1] for output in outputs) == ["found", "found", "made"]
    assert_whole(target)


def test_kill_9_at_any_moment_leaves_nothing_half_made(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    moments = random.Random(9)
    killed = 0
    for _ in range(6):
        maker = start_maker(target, pause=0.05)
        assert maker.stdout is not None
        assert maker.stdout.readline() == "ready\n"
        time.sleep(moments.uniform(0, 0.2))
        maker.kill()
        maker.communicate(timeout=60)
        killed += maker.returncode == -signal.SIGKILL
        if target.exists():
            assert_whole(target)
            for name in FILES:
                (target / name).unlink()
            target.rmdir()
    assert killed, "no maker was killed at work: the moments come too late"
    assert start_maker(target, pause=0).wait(timeout=60) == 0
    assert_whole(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "demo.lock"]
