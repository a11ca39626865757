"""`python -m attnquant inspect | export | report`: what needs no server.

Subcommands import what they need when they run, so that `inspect`, which reads a config.json, does
not wait for MAX.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from attnquant import __version__
from attnquant.errors import AttnquantError, SettingsError
from attnquant.settings import Settings, patterns

if TYPE_CHECKING:
    from attnquant.inspect import Device

T = TypeVar("T")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with a command in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"attnquant: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status: 0, or 2 for what the user can mend."""
    parser = _Parser(prog="python -m attnquant", description=__doc__)
    parser.add_argument("--version", action="version", version=f"attnquant {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_inspect(
        commands.add_parser("inspect", help="what a model reads per token in NVFP4, and what fits")
    )
    _add_export(commands.add_parser("export", help="write a checkpoint in NVFP4, or as bundles"))
    _add_report(commands.add_parser("report", help="what sharing blocks would cost a model"))
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except AttnquantError as error:
        print(f"attnquant: {error}", file=sys.stderr)
        return 2
    return 0


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a directory, a config.json, or a Hugging Face id")
    parser.add_argument("--quant", choices=("none", "nvfp4"), default="nvfp4")
    parser.add_argument(
        "--ignore", type=patterns, default=(), help="as ATTNQUANT_QUANT_IGNORE: self_attn, ..."
    )
    parser.add_argument("--lm-head", action="store_true", help="quantize the output head too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    device = parser.add_argument_group("what fits a device")
    device.add_argument(
        "--memory", metavar="SIZE", type=_typed(_size), help="free memory: 32GiB, 32GB, 24gb"
    )
    count, part = _typed(_count), _typed(_part)
    device.add_argument("--batch", metavar="N", type=count, help="requests at once; default 1")
    # MAX's own options: what is said here is what MAX does, given the same.
    for option, kind, default in (
        ("--max-length", count, "what the model is made for"),
        ("--max-batch-input-tokens", count, "8192"),
        ("--device-memory-utilization", part, "0.9"),
    ):
        device.add_argument(option, metavar="N", type=kind, help=f"as MAX's; default {default}")
    parser.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> None:
    from attnquant.inspect import inspect, render, to_json

    report = inspect(
        options.model,
        quant=options.quant,
        ignore=options.ignore,
        quant_lm_head="nvfp4" if options.lm_head else "none",
        device=_device(options),
    )
    print(to_json(report) if options.json else render(report))


def _device(options: argparse.Namespace) -> Device | None:
    """What the model is to fit; None if nothing was said of a device."""
    from attnquant.inspect import Device
    from attnquant.memory import Serving

    of_device = _given(options, "max_length", "batch")
    of_serving = _given(options, "max_batch_input_tokens", "device_memory_utilization")
    if options.memory is not None:
        return Device(memory=options.memory, serving=Serving(**of_serving), **of_device)
    if said := [*of_device, *of_serving]:
        names = ", ".join("--" + name.replace("_", "-") for name in said)
        raise SettingsError(f"{names}: expected --memory too, the size that it is to fit")
    return None


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser whose errors argparse prints as they are."""

    def typed(text: str) -> T:
        try:
            return parse(text)
        except AttnquantError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def _size(text: str) -> int:
    from attnquant.memory import parse_size

    return parse_size(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise SettingsError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def _part(text: str) -> float:
    try:
        if 0 < (value := float(text)) <= 1:
            return value
    except ValueError:
        pass
    raise SettingsError(f"{text!r} is not a number above 0, 1 at most")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a dense checkpoint's directory; it is only read")
    parser.add_argument("target", help="the new directory")
    parser.add_argument("--quant", choices=("none", "nvfp4"), default="none")
    parser.add_argument(
        "--blocks", type=int, help="write theta bundles of this many blocks; nvfp4 packs the blocks"
    )
    parser.add_argument("--rank", type=int, help="of the bundles' corrections (default: 0)")
    parser.add_argument(
        "--ignore", type=patterns, default=(), help="as ATTNQUANT_QUANT_IGNORE: self_attn, ..."
    )
    parser.add_argument(
        "--scales",
        choices=("absmax", "mse", "profile"),
        help="as ATTNQUANT_QUANT_SCALES; blocks of bundles have no profile",
    )
    parser.add_argument(
        "--profile-tokens",
        metavar="N",
        type=_typed(_count),
        default=Settings.profile_tokens,
        help="as ATTNQUANT_PROFILE_TOKENS; default %(default)s",
    )
    parser.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    from tqdm import tqdm

    from attnquant.checkpoint.export import export_nvfp4
    from attnquant.checkpoint.export_theta import export_theta
    from attnquant.encoder import encoder_of
    from attnquant.kernels.codec import largest_magnitude
    from attnquant.nvfp4.accounting import format_bytes

    if options.blocks is None and options.rank is not None:
        raise SettingsError(f"--rank {options.rank} corrects shared blocks; give --blocks too")
    if options.blocks is None and options.quant == "none":
        raise SettingsError(
            "export: found nothing to write that the source is not; give --quant nvfp4, or --blocks"
        )
    encoder = encoder_of(
        options.source,
        options.scales,
        shared=options.blocks is not None,
        tokens=options.profile_tokens,
    )
    export = partial(export_nvfp4, input_scale=encoder.input_scale)
    if options.blocks is not None:
        export = partial(
            export_theta, blocks=options.blocks, rank=options.rank or 0, quant=options.quant
        )
    with tqdm(unit="B", unit_scale=True, desc="export", disable=None) as bar:
        report = export(
            options.source,
            options.target,
            encode=encoder,
            largest_magnitude=largest_magnitude,
            recipe=encoder.recipe,
            ignore=options.ignore,
            progress=bar.update,
        )
    quantized = len(report.coverage.quantized)
    bundles = f"{options.blocks} blocks of rank {options.rank or 0}, " if options.blocks else ""
    print(
        f"{options.target}: {bundles}{quantized} of {len(report.coverage.reasons)} projections in "
        f"NVFP4, {format_bytes(report.before)} -> {format_bytes(report.after)}"
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a dense checkpoint's directory")
    parser.add_argument(
        "--blocks", type=_typed(_counts), help="as ATTNQUANT_BLOCKS, one or more: 9,6,3"
    )
    parser.add_argument(
        "--ranks", type=_typed(_counts), help="as ATTNQUANT_RANK, one or more: 0,16,32,64"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with plots too")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    from pathlib import Path

    from tqdm import tqdm

    from attnquant.report import measure, render_page, render_table
    from attnquant.whole_file import write_whole

    with tqdm(unit="B", unit_scale=True, desc="report", disable=None) as bar:
        report = measure(options.model, progress=bar.update, **_given(options, "blocks", "ranks"))
    print(render_table(report))
    if options.html is not None:
        path, page = Path(options.html), render_page(report).encode()

        def write(place: Path) -> None:
            place.write_bytes(page)

        try:
            if path.exists() and not path.is_file():  # a device or a pipe
                write(path)
            else:
                write_whole(path.resolve(), write)
        except OSError as error:
            raise SettingsError(
                f"--html {options.html}: cannot be written ({error.strerror}); name another file"
            ) from None


def _counts(text: str) -> tuple[int, ...]:
    counts = patterns(text)
    if not counts or not all(part.isascii() and part.isdigit() for part in counts):
        raise SettingsError(f"{text!r} is not a list of whole numbers such as 9,6,3")
    return tuple(map(int, counts))
