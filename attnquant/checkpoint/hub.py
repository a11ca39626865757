"""JSON files of a Hugging Face model, fetched or found in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnquant.checkpoint.json_file import quote, read_json_object
from attnquant.errors import CheckpointError


def hub_json(model: str, *names: str) -> list[dict[str, Any] | None]:
    """Reads files of a model; None for a file that the model does not have.

    Args:
        model: a Hugging Face id.
        names: of the files.

    Raises:
        CheckpointError: one line says why a file cannot be had, or read.
    """
    # Imported late: it takes a second, and a directory needs none of it.
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

    def unfetched(reason: str) -> CheckpointError:
        return CheckpointError(
            f"{model}: found no such directory, and {names[0]} cannot be fetched from Hugging "
            f"Face: {reason}"
        )

    cached_only = False
    try:
        # Asks once: without a connection, the downloads would retry for half a minute each.
        get_hf_file_metadata(hf_hub_url(model, names[0]))
    except errors.GatedRepoError:
        raise unfetched("the model is gated; accept its terms and log in") from None
    except errors.RepositoryNotFoundError:
        raise unfetched("there is no such model; check the name, or log in") from None
    except errors.EntryNotFoundError:
        pass
    except Exception:  # the HTTP client raises its own, and a cached file still serves
        cached_only = True
    found: list[dict[str, Any] | None] = []
    for name in names:
        try:
            path = hf_hub_download(model, name, local_files_only=cached_only)
        except errors.LocalEntryNotFoundError:
            if not found:
                raise unfetched("no connection; check the network, or name a directory") from None
            found.append(None)
        except errors.EntryNotFoundError:
            found.append(None)
        except Exception as error:  # the HTTP client and the cache raise their own
            raise unfetched(f"{type(error).__name__}: {quote(error)}") from error
        else:
            found.append(read_json_object(Path(path)))
    return found
