"""The errors that attnquant raises: each is one line that a user can act on.

A message names the file, tensor or variable, says what was found and what was expected, and ends
with what to do. `run_max.py` and `python -m attnquant` print it without a traceback and exit with
status 2.
"""


class AttnquantError(ValueError):
    """Base of every error that a user can cause and mend."""


class SettingsError(AttnquantError):
    """An `ATTNQUANT_*` variable, or a field of config.json's "attnquant" object, cannot be used."""


class CheckpointError(AttnquantError):
    """A checkpoint's file, header, index, tensor or config cannot be used."""


class UnsupportedError(AttnquantError):
    """The request is well formed, but this model, device or MAX version cannot serve it."""
