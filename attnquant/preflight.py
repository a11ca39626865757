"""What can be found wrong before MAX starts: settings, and a local checkpoint's headers."""

from __future__ import annotations

from pathlib import Path

import attnquant
from attnquant.checkpoint.checkpoint import CONFIG_FILE, Checkpoint
from attnquant.checkpoint.json_file import read_json_object
from attnquant.checkpoint.verify import verify_decoder
from attnquant.decoder_shapes import DecoderShapes
from attnquant.nvfp4.coverage import coverage_of
from attnquant.settings import Settings
from attnquant.theta import blocks_of


def check_settings() -> None:
    """Checks the environment's settings.

    Raises:
        SettingsError: one line that lists all that is wrong.
    """
    Settings.read()


def check_model(model: str | None) -> None:
    """Checks a checkpoint, where it is the directory of a decoder that attnquant serves.

    It takes milliseconds and reads no weights. A Hugging Face id is checked once MAX has fetched
    it, when its weights load.

    Args:
        model: what the user gave as `--model`, if anything.

    Raises:
        SettingsError: a field of config.json's "attnquant" object, or a setting that does not fit.
        CheckpointError: the checkpoint.
        UnsupportedError: a well-formed checkpoint that is not served.
    """
    directory = Path(model) if model else None
    if directory is None or not (directory / CONFIG_FILE).is_file():
        return
    config = read_json_object(directory / CONFIG_FILE)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not set(architectures) & set(attnquant.SERVED):
        return
    settings = Settings.read(config.get("attnquant"))
    checkpoint = Checkpoint.open(directory)
    shapes = DecoderShapes.from_config(config)
    stored = verify_decoder(checkpoint, shapes)
    packed = {path for path, weight in stored.items() if weight.is_nvfp4}
    coverage_of(settings, shapes, packed)
    blocks_of(settings, shapes, packed)
