"""A stand-in for Hugging Face."""

from __future__ import annotations

from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors


class Hub:
    """Stands in for Hugging Face: serves files from a directory, and records what was asked."""

    model = "google/gemma-4-31b-it"

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.asked: list[str] = []
        self.probe_error: Exception | None = None
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", self.probe)

    def probe(self, url: str) -> None:
        assert url.endswith(f"/{self.model}/resolve/main/config.json")
        if self.probe_error is not None:
            raise self.probe_error

    def download(self, repo_id: str, filename: str, *, local_files_only: bool) -> str:
        assert repo_id == self.model
        self.asked.append(filename)
        path = self.directory / filename
        if path.is_file():
            return str(path)
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not in the cache")
        raise http_error(errors.RemoteEntryNotFoundError)


def http_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    request = httpx.Request("HEAD", "https://example.invalid")
    return kind("a long story\nof two lines", response=httpx.Response(404, request=request))
