"""A storm on the server that the other tests share; the long one, with SIGTERM, is slow."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import MAX_LENGTH
from tests.serve.server import ROOT, Server
from tests.serve.storm import memory, references, storm, storm_of

# What freed memory that is not given back, and a page of the cache, may come to.
SLACK_BYTES = 64 << 20


def test_a_storm_changes_nothing(server: Server) -> None:
    requests = storm_of("demo", MAX_LENGTH, 100, good=8, brief=True)

    async def run() -> None:
        expected = await references(server.url, requests)
        assert len(set(expected.values())) > 4
        await storm(server.url, requests[:40], expected)
        before = memory(server)
        tally = await storm(server.url, requests, expected)
        assert tally.wrong == [] and tally.lost == []
        assert tally.answered + tally.left == len(requests)
        assert tally.right > 30 and tally.refused > 30 and tally.left > 2
        assert memory(server) - before < SLACK_BYTES
        # Whoever comes after the storm is served as before it.
        after = await references(server.url, requests[:8])
        assert after and after.items() <= expected.items()

    asyncio.run(run())
    assert server.process.poll() is None


@pytest.mark.slow
def test_the_long_storm(tiny_directory: Callable[[str], Path]) -> None:
    directory = tiny_directory("pattern2-scalar")
    result = subprocess.run(
        [sys.executable, "-m", "tests.serve.storm", "--model", str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    assert "wrong 0, lost 0" in result.stdout
