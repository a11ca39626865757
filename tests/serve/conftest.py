"""The server that all tests here share: the demo checkpoint, compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.models import MAX_LENGTH
from tests.serve.server import Server, serve


@pytest.fixture(scope="session")
def server(demo_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`run_max.py serve --model demo`, which must be there at the end as it was at the start."""
    log = tmp_path_factory.mktemp("serve") / "server.log"
    with serve(log, "--model", "demo", "--max-length", str(MAX_LENGTH)) as running:
        yield running
        assert running.process.poll() is None


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    """A client of that server."""
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=300)
