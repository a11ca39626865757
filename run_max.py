#!/usr/bin/env python
"""Runs MAX with attnquant: `python run_max.py <any max subcommand> ...`.

A thin wrapper: it cleans the environment of other MAX installations, fills in what the user left
out (`--custom-architectures attnquant`, and a few defaults named below), turns `--model demo` into
a real checkpoint, and calls MAX's own entry point in this process. Everything else is MAX's.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import MutableMapping, Sequence
from contextlib import redirect_stderr, suppress
from importlib.metadata import entry_points
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent

# Subcommands that load a model, and so know --custom-architectures.
MODEL_COMMANDS = ("serve", "generate", "encode", "warm-cache")

MODEL_OPTIONS = ("--model", "--model-path")
DRAFT_OPTION = "--draft-model-path"

# Where MAX writes, rather than where it is installed.
DATA_VARIABLE = re.compile(r"MODULAR_\w*(CACHE|LOG|FILENAME|OUTPUT|DUMP|TRACE)")

# MAX's CLI starts itself anew, once, under another allocator; our lines were printed by then.
RESTARTED = "MODULAR_MAX_ALLOCATOR_REEXEC"


def drop_foreign_variables(environ: MutableMapping[str, str], prefix: Path) -> list[str]:
    """Removes `MODULAR_*` variables that point at an installation outside `prefix`.

    Returns:
        The names that were removed, sorted.
    """
    foreign = sorted(
        name
        for name, value in environ.items()
        if name.startswith("MODULAR_")
        and not DATA_VARIABLE.match(name)
        and any(_is_outside(part, prefix) for part in re.split(f"[{os.pathsep},]", value))
    )
    for name in foreign:
        del environ[name]
    return foreign


def _is_outside(text: str, prefix: Path) -> bool:
    path = Path(text.strip()).expanduser()
    return path.is_absolute() and not path.resolve().is_relative_to(prefix.resolve())


def release_freed_memory(environ: MutableMapping[str, str]) -> None:
    """Has MAX's allocator, jemalloc, give back what was free for 0.1 seconds, unless the user said.

    It keeps it for ten, and then until somebody allocates again: so the start's leavings would
    count beside the weights. A thread of its own looks for it.
    """
    environ.setdefault("MALLOC_CONF", "dirty_decay_ms:100,background_thread:true")


def let_timers_wait(path: Path = Path("/proc/self/timerslack_ns")) -> None:
    """Lets waits that end by themselves end up to a millisecond late, where Linux is.

    From its first graph on, a thread of MAX looks every 100 us for lines to log, and takes 12% of a
    core that decodes. What waits for an event, and not for a time, is as fast as before. Threads
    and processes that begin later inherit it.
    """
    with suppress(OSError):
        path.write_text("1000000", encoding="ascii")


def with_defaults(arguments: Sequence[str], has_accelerator: bool) -> list[str]:
    """Appends what the user left out of a model command.

    `--custom-architectures attnquant`; on `serve`, in-flight batching; without an accelerator,
    `--devices cpu` and `--quantization-encoding float32` (unless `warm-cache` compiles for a
    `--target` that is elsewhere).
    """
    command = arguments[0]
    wanted = [("--custom-architectures", "attnquant")]
    if command == "serve":
        wanted.append(("--enable-in-flight-batching", ""))
    if not has_accelerator and not _given(arguments, "--target"):
        wanted += [("--devices", "cpu"), ("--quantization-encoding", "float32")]
    added = [
        part
        for option, value in wanted
        if not _given(arguments, option)
        for part in (option, value)
        if part
    ]
    return [*arguments, *added]


def with_draft_option(arguments: Sequence[str]) -> list[str]:
    """Spells `--draft-model` as MAX does, which knows `--model` both ways and this one way only."""
    return [re.sub("^--draft-model(?=$|=)", DRAFT_OPTION, argument) for argument in arguments]


def _given(arguments: Sequence[str], option: str) -> bool:
    names = (option, "--no-" + option.removeprefix("--"))
    return any(argument.partition("=")[0] in names for argument in arguments)


def _value(arguments: Sequence[str], options: Sequence[str]) -> str | None:
    """What the user gave for an option, whichever way it is spelled; the last, as MAX takes it."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, separator, value = argument.partition("=")
        if name in options:
            found = value if separator else following
    return found


def _replaced(arguments: Sequence[str], options: Sequence[str], value: str) -> list[str]:
    """The arguments with another value for an option, wherever it is given."""
    result = []
    for previous, argument in zip(["", *arguments], arguments, strict=False):
        name, separator, _ = argument.partition("=")
        if previous in options:
            argument = value
        elif separator and name in options:
            argument = f"{name}={value}"
        result.append(argument)
    return result


def model_of(arguments: Sequence[str]) -> str | None:
    """The model that the user named: by an option, or in a file of options.

    Raises:
        SettingsError: the file cannot be read, or is no YAML.
    """
    model = _value(arguments, MODEL_OPTIONS)
    file = _value(arguments, ("--config-file",))
    if model is not None or file is None:
        return model
    import yaml

    from attnquant.errors import SettingsError

    try:
        section = (yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}).get("model") or {}
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SettingsError(
            f"--config-file {file}: cannot be read as YAML options ({reason}); see recipes/"
        ) from None
    named = section.get("model_path") if isinstance(section, dict) else None
    return named if isinstance(named, str) else None


def with_demo(arguments: Sequence[str]) -> list[str]:
    """Puts the demo checkpoint in the place of `--model demo`; prepares it if need be.

    On `serve` the model is called `demo`. On `generate` the prompt is continued as it stands, since
    a base model has not learned to answer in turns, and greedily, so that everyone reads the same.
    """
    if _value(arguments, MODEL_OPTIONS) != "demo":
        return list(arguments)
    from attnquant.demo import COMPLETION_TEMPLATE, prepare_demo

    with redirect_stderr(StringIO() if RESTARTED in os.environ else sys.stderr):
        directory = prepare_demo()
    result = _replaced(arguments, MODEL_OPTIONS, str(directory))
    if arguments[0] == "serve" and not _given(arguments, "--served-model-name"):
        result += ["--served-model-name", "demo"]
    if arguments[0] == "generate":
        if not _given(arguments, "--chat-template"):
            result += ["--chat-template", str(COMPLETION_TEMPLATE)]
        if not any(_given(arguments, option) for option in ("--top-k", "--top-p", "--temperature")):
            result += ["--top-k", "1"]
    return result


def main(arguments: Sequence[str]) -> int:
    """Runs MAX's entry point; returns the exit status."""
    dropped = drop_foreign_variables(os.environ, Path(sys.prefix))
    if dropped:
        print(
            f"run_max.py: ignoring {', '.join(dropped)}: set for another MAX installation",
            file=sys.stderr,
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))

    from attnquant import preflight
    from attnquant.errors import AttnquantError

    arguments = list(arguments)
    wants_help = "--help" in arguments
    try:
        if arguments and arguments[0] in MODEL_COMMANDS and not wants_help:
            preflight.check_settings(model_of(arguments))
            arguments = with_draft_option(with_demo(arguments))
            model = model_of(arguments)
            preflight.check_model(model)
            if (given := _value(arguments, MODEL_OPTIONS)) and given.rstrip("/"):
                # MAX 26.7 finds no weights in a relative path that ends in a slash.
                arguments = _replaced(arguments, MODEL_OPTIONS, given.rstrip("/"))
            from max.driver import accelerator_count

            arguments = with_defaults(arguments, has_accelerator=accelerator_count() > 0)
            on_cpu = _value(arguments, ("--devices",)) == "cpu"
            preflight.check_draft(model, _value(arguments, (DRAFT_OPTION,)), on_cpu=on_cpu)
            release_freed_memory(os.environ)
            if on_cpu:
                let_timers_wait()
        if wants_help and arguments[0] == "--help":
            print(__doc__.strip(), end="\n\n")
        # MAX 26.7 declares some options twice, and recent versions of click say so at every start.
        warnings.filterwarnings("ignore", "The parameter --", UserWarning)
        (max_main,) = entry_points(group="console_scripts", name="max")
        sys.argv = [sys.argv[0], *arguments]
        max_main.load()()
    except AttnquantError as error:
        print(f"run_max.py: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        from max.pipelines.context.exceptions import InputError  # what a prompt must not hold

        if not isinstance(error, InputError):
            raise
        print(f"run_max.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
