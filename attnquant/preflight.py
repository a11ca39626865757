"""What can be found wrong before MAX starts: settings, and a local checkpoint's headers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from reprlib import repr  # shortens what a hostile config puts into a message
from typing import Any

import attnquant
from attnquant.checkpoint.checkpoint import CONFIG_FILE, HUB_ID, Checkpoint
from attnquant.checkpoint.companions import check_companions
from attnquant.checkpoint.hub import hub_json
from attnquant.checkpoint.json_file import quote
from attnquant.checkpoint.theta_layout import held_bundles
from attnquant.checkpoint.verify import verify_decoder
from attnquant.config_values import MODEL_TYPES, check_values
from attnquant.decoder_shapes import DecoderShapes
from attnquant.drafter_shapes import DrafterShapes
from attnquant.errors import CheckpointError, SettingsError, UnsupportedError
from attnquant.nvfp4.coverage import coverage_of
from attnquant.settings import Settings
from attnquant.theta import plan_of

# MAX 26.7 looks for a local checkpoint's weights with a glob that begins with its path.
_PATTERN = set("*?[")

# Models of several networks, which MAX serves, have one of these in config.json's place.
_PIPELINES = ("model_index.json", "scheduler_config.json")


def check_settings(model: str | None = None) -> None:
    """Checks the environment's settings, and those of the checkpoint's config.json.

    Args:
        model: what the user gave as `--model`, if anything.

    Raises:
        SettingsError: one line that lists all that is wrong.
    """
    try:
        config = _served_config(model) or {}
    except CheckpointError:  # what is wrong with the checkpoint, `check_model` says
        config = {}
    Settings.read(config.get("attnquant"))


def check_draft(model: str | None, draft: str | None, *, on_cpu: bool) -> None:
    """Checks a drafter, where it and its target are directories, from config.json and headers.

    Args:
        model: what the user gave as `--model`, if anything.
        draft: what the user gave as `--draft-model-path`, if anything.
        on_cpu: the model is to run on a CPU.

    Raises:
        CheckpointError: the drafter is broken, or was not made for this target.
        UnsupportedError: a drafter that is not served, or not there.
    """
    if draft is None:
        return
    if on_cpu:
        raise UnsupportedError(
            f"--draft-model-path {draft}: MAX drafts on GPUs only; leave the drafter out on a CPU"
        )
    config = _served_config(model)
    if config is None or not (Path(draft) / CONFIG_FILE).is_file():
        return
    checkpoint = Checkpoint.open(Path(draft))
    shapes = DrafterShapes.from_config(checkpoint.config, config)
    shapes.check({name: info.shape for name, info in checkpoint.tensors.items()})


def check_model(model: str | None) -> None:
    """Checks a checkpoint, where it is the directory of a decoder that attnquant serves.

    It takes milliseconds and reads no weights. Of a Hugging Face id, only config.json is checked
    here, once it is fetched; the rest when MAX has fetched it and plans its memory.

    Args:
        model: what the user gave as `--model`, if anything.

    Raises:
        SettingsError: settings that do not fit the checkpoint, all of them in one line.
        CheckpointError: the checkpoint.
        UnsupportedError: a well-formed checkpoint that is not served.
    """
    directory = _local(model)
    if directory is None:
        if model and (config := _served_architecture(hub_json(model, CONFIG_FILE)[0], model)):
            check_values(config, DecoderShapes.from_config(config))
        return
    config = _served_config(model)
    if config is None:
        return
    settings = Settings.read(config.get("attnquant"))
    checkpoint = Checkpoint.open(directory)
    shapes = DecoderShapes.from_config(config)
    check_values(config, shapes)
    stored = verify_decoder(checkpoint, shapes)
    check_companions(directory)
    packed = {path for path, weight in stored.items() if weight.is_nvfp4}
    problems = []
    try:
        coverage = coverage_of(settings, shapes, packed)
    except SettingsError as error:
        problems.append(str(error))
        coverage = coverage_of(replace(settings, quant_ignore=()), shapes, packed)
    try:
        plan_of(settings, shapes, coverage, packed=packed, held=held_bundles(config, stored))
    except SettingsError as error:
        problems.append(str(error))
    if problems:
        raise SettingsError("; ".join(problems))


def _local(model: str | None) -> Path | None:
    """The directory that the user named; None for a Hugging Face id, or for nothing."""
    if not model:
        return None
    directory = Path(model)
    if not os.path.lexists(directory):
        if HUB_ID.fullmatch(model):
            return None
        raise CheckpointError(
            f"--model {quote(model)}: found no such directory, expected a checkpoint's directory, "
            "or a Hugging Face id such as google/gemma-3-270m"
        )
    if set(model) & _PATTERN:
        raise CheckpointError(
            f"--model {quote(model)}: found one of {' '.join(sorted(_PATTERN))} in the path, which "
            "MAX takes for a pattern of other paths; rename the directory, or link to it"
        )
    return directory


def _served_config(model: str | None) -> dict[str, Any] | None:
    """A directory's config.json; None for an id, and where MAX has an architecture of its own."""
    directory = _local(model)
    if directory is None:
        return None
    has_config = os.path.lexists(directory / CONFIG_FILE)
    if not has_config and any((directory / name).is_file() for name in _PIPELINES):
        return None
    config = Checkpoint.read_config(directory)
    return _served_architecture(config, quote(directory / CONFIG_FILE))


def _served_architecture(config: dict[str, Any] | None, where: str) -> dict[str, Any] | None:
    """A config that names an architecture of ours; None if it names others, or is None."""
    if config is None:
        return None
    names = config.get("architectures")
    if isinstance(names, list) and any(name in names for name in attnquant.SERVED):
        return config
    own = [name for name, types in MODEL_TYPES.items() if config.get("model_type") in types]
    if own or not (isinstance(names, list) and names and all(isinstance(n, str) for n in names)):
        raise CheckpointError(
            f"{where}: architectures is {repr(names)}, expected a list "
            f"with {' or '.join(own or attnquant.SERVED)}; correct it, or download it again"
        )
    return None
