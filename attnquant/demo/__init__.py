"""The demo checkpoint: a real Gemma 3 270M that `--model demo` prepares from packages, once.

`prepare_demo` makes a Hugging Face directory in the user's cache from the GGUF file that the
`[demo]` extra installs. Nothing is downloaded here, and nothing else in attnquant knows GGUF.
"""

from pathlib import Path

from attnquant.demo.prepare import DemoError, prepare_demo

COMPLETION_TEMPLATE = Path(__file__).parent / "completion.jinja"
"""A chat template without turns: a base model continues the text that it is given."""

__all__ = ["COMPLETION_TEMPLATE", "DemoError", "checkpoint_directory", "prepare_demo"]


def checkpoint_directory(model: str) -> Path:
    """The directory that a user named, or the demo's where it was `demo`.

    Raises:
        DemoError: the demo cannot be prepared.
    """
    return prepare_demo() if model == "demo" else Path(model)
