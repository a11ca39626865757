"""The files beside a checkpoint's weights that a server reads: tokenizer, templates, generation.

A clone without Git LFS, or a download that was cut short, breaks these as it does weights. MAX
starts without some of them all the same: without end-of-sequence ids, or with an empty vocabulary.
"""

from __future__ import annotations

from pathlib import Path

from attnquant.checkpoint.checkpoint import contained
from attnquant.checkpoint.json_file import (
    foreign_format,
    quote,
    read_json_object,
    read_regular_file,
)
from attnquant.errors import CheckpointError

TOKENIZER, TOKENIZER_MODEL = "tokenizer.json", "tokenizer.model"
_OBJECTS = (
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
_TEMPLATE = "chat_template.jinja"
_START = 512
_MOST_BYTES = 256 << 20
_AGAIN = "download the file again"


def check_companions(root: Path) -> None:
    """Checks these files, as far as they are there; one tokenizer must be.

    Raises:
        CheckpointError: one line on the first file that is not what its name says.
    """
    found = {entry.name for entry in root.iterdir()}
    for name in _OBJECTS:
        if name in found:
            read_json_object(contained(root, name))
    if not {TOKENIZER, TOKENIZER_MODEL} & found:
        raise CheckpointError(
            f"{quote(root)}: found no tokenizer, expected {TOKENIZER} or {TOKENIZER_MODEL}; "
            "download it"
        )
    if TOKENIZER in found:
        _check_tokenizer(contained(root, TOKENIZER))
    for name in (TOKENIZER_MODEL, _TEMPLATE):
        if name in found:
            _refuse_foreign(contained(root, name), may_be_empty=name == _TEMPLATE)


def _check_tokenizer(path: Path) -> None:
    """A Gemma's has 33 MB of JSON: parsing it would take as long as all other checks."""
    _refuse_foreign(path)
    data, size = read_regular_file(path, _MOST_BYTES)
    text = data.strip()
    if size > _MOST_BYTES or not (text.startswith(b"{") and text.endswith(b"}")):
        raise CheckpointError(
            f"{quote(path)}: found {size} bytes that are no whole JSON object, expected one of "
            f"{_MOST_BYTES} bytes at most; {_AGAIN}"
        )
    if b'"model"' not in text:
        raise CheckpointError(f'{quote(path)}: found no "model", expected a tokenizer; {_AGAIN}')


def _refuse_foreign(path: Path, *, may_be_empty: bool = False) -> None:
    """Refuses the usual stand-ins for a file's content."""
    start, size = read_regular_file(path, _START)
    what = foreign_format(start)
    if what is not None and not (may_be_empty and not size):
        raise CheckpointError(f"{quote(path)}: found {what}, expected the content; {_AGAIN}")
