"""A real `run_max.py serve` process, and when it is ready, alive and gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN_MAX = (sys.executable, str(ROOT / "run_max.py"))
MAX = (str(Path(sys.executable).with_name("max")),)
STARTUP_SECONDS = 1200
GRACE_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers.

    Attributes:
        url: what an OpenAI client takes as its base URL.
        process: `run_max.py serve`.
        log: the file that its output goes to.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def serve(
    log: Path, *arguments: str, command: Sequence[str] = RUN_MAX, **variables: str
) -> Iterator[Server]:
    """Starts the server, waits until it answers, and stops it as a supervisor would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*command, "serve", *arguments, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **os.environ,
                "MAX_SERVE_HOST": "127.0.0.1",
                "MAX_SERVE_DISABLE_TELEMETRY": "1",
                **variables,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/v1/models", log)
        yield Server(url=f"http://127.0.0.1:{port}/v1", process=process, log=log)
        process.send_signal(signal.SIGTERM)
        process.wait(GRACE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{_tail(log)}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise TimeoutError(f"no answer after {STARTUP_SECONDS} s:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])
