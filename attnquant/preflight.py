"""What can be found wrong before MAX starts: settings, and a local checkpoint's headers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import attnquant
from attnquant.checkpoint.checkpoint import CONFIG_FILE, Checkpoint
from attnquant.checkpoint.json_file import read_json_object
from attnquant.checkpoint.theta_layout import held_bundles
from attnquant.checkpoint.verify import verify_decoder
from attnquant.decoder_shapes import DecoderShapes
from attnquant.drafter_shapes import DrafterShapes
from attnquant.errors import CheckpointError, SettingsError, UnsupportedError
from attnquant.nvfp4.coverage import coverage_of
from attnquant.settings import Settings
from attnquant.theta import plan_of


def check_settings(model: str | None = None) -> None:
    """Checks the environment's settings, and those of the checkpoint's config.json.

    Args:
        model: what the user gave as `--model`, if anything.

    Raises:
        SettingsError: one line that lists all that is wrong.
    """
    try:
        config = _served_config(model) or {}
    except CheckpointError:  # what is wrong with config.json, `check_model` says
        config = {}
    Settings.read(config.get("attnquant"))


def check_draft(model: str | None, draft: str | None, *, on_cpu: bool) -> None:
    """Checks a drafter, where it and its target are directories, from config.json and headers.

    Args:
        model: what the user gave as `--model`, if anything.
        draft: what the user gave as `--draft-model`, if anything.
        on_cpu: the model is to run on a CPU.

    Raises:
        CheckpointError: the drafter is broken, or was not made for this target.
        UnsupportedError: a drafter that is not served, or not there.
    """
    if draft is None:
        return
    if on_cpu:
        raise UnsupportedError(
            f"--draft-model {draft}: MAX drafts on GPUs only; leave the drafter out on a CPU"
        )
    config = _served_config(model)
    if config is None or not (Path(draft) / CONFIG_FILE).is_file():
        return
    checkpoint = Checkpoint.open(Path(draft))
    shapes = DrafterShapes.from_config(checkpoint.config, config)
    shapes.check({name: info.shape for name, info in checkpoint.tensors.items()})


def check_model(model: str | None) -> None:
    """Checks a checkpoint, where it is the directory of a decoder that attnquant serves.

    It takes milliseconds and reads no weights. A Hugging Face id is checked once MAX has fetched
    it, when its memory is planned.

    Args:
        model: what the user gave as `--model`, if anything.

    Raises:
        SettingsError: settings that do not fit the checkpoint, all of them in one line.
        CheckpointError: the checkpoint.
        UnsupportedError: a well-formed checkpoint that is not served.
    """
    config = _served_config(model)
    if config is None:
        return
    settings = Settings.read(config.get("attnquant"))
    checkpoint = Checkpoint.open(Path(model or ""))
    shapes = DecoderShapes.from_config(config)
    stored = verify_decoder(checkpoint, shapes)
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


def _served_config(model: str | None) -> dict[str, Any] | None:
    """config.json of a directory that holds a decoder which attnquant serves."""
    directory = Path(model) if model else None
    if directory is None or not (directory / CONFIG_FILE).is_file():
        return None
    config = read_json_object(directory / CONFIG_FILE)
    names = config.get("architectures")
    served = isinstance(names, list) and any(name in names for name in attnquant.SERVED)
    return config if served else None
