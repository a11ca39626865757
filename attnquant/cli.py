"""`python -m attnquant inspect | export | report | parity`: what needs no server.

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
    """Runs a subcommand; returns the exit status.

    0, 1 where `parity` finds two models too far apart, or 2 for what the user can mend.
    """
    options = make_parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except AttnquantError as error:
        print(f"attnquant: {error}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; each leaves its function as `run`."""
    parser = _Parser(prog="python -m attnquant", description=__doc__)
    parser.add_argument("--version", action="version", version=f"attnquant {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_inspect(
        commands.add_parser("inspect", help="what a model reads per token in NVFP4, and what fits")
    )
    _add_export(commands.add_parser("export", help="write a checkpoint in NVFP4, or as bundles"))
    _add_report(commands.add_parser("report", help="what sharing blocks or NVFP4 does to a model"))
    _add_parity(commands.add_parser("parity", help="logits against transformers'"))
    return parser


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a directory, a config.json, a Hugging Face id, or demo")
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
    from attnquant.demo import checkpoint_directory
    from attnquant.inspect import inspect, render, to_json

    report = inspect(
        str(checkpoint_directory(options.model)),
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
    parser.add_argument("source", help="a dense checkpoint's directory, or demo; it is only read")
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
    from attnquant.demo import checkpoint_directory
    from attnquant.encoder import encoder_of
    from attnquant.kernels.codec import largest_magnitude
    from attnquant.nvfp4.accounting import format_bytes

    if options.blocks is None and options.rank is not None:
        raise SettingsError(f"--rank {options.rank} corrects shared blocks; give --blocks too")
    if options.blocks is None and options.quant == "none":
        raise SettingsError(
            "export: found nothing to write that the source is not; give --quant nvfp4, or --blocks"
        )
    source = checkpoint_directory(options.source)
    encoder = encoder_of(
        source,
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
            source,
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
    parser.description = (
        "Says what sharing blocks (--quant none, the default) or NVFP4 (--quant nvfp4) does to a "
        "model, as tables, and with --html as a page with plots."
    )
    parser.add_argument("model", help="a dense checkpoint's directory, or demo")
    parser.add_argument("--quant", choices=("none", "nvfp4"), default="none")
    parser.add_argument("--html", metavar="FILE", help="write a page with plots too")
    blocks = parser.add_argument_group("sharing blocks")
    blocks.add_argument(
        "--blocks", type=_typed(_counts), help="as ATTNQUANT_BLOCKS, one or more: 9,6,3"
    )
    blocks.add_argument(
        "--ranks", type=_typed(_counts), help="as ATTNQUANT_RANK, one or more: 0,16,32,64"
    )
    nvfp4 = parser.add_argument_group("NVFP4")
    nvfp4.add_argument("--ignore", type=patterns, help="as ATTNQUANT_QUANT_IGNORE: self_attn, ...")
    nvfp4.add_argument(
        "--scales", choices=("absmax", "mse", "profile"), help="as ATTNQUANT_QUANT_SCALES"
    )
    nvfp4.add_argument(
        "--text", metavar="FILE", help="measure KL divergence and perplexity on a text too"
    )
    parser.set_defaults(run=_report)


_REPORT_OPTIONS = {"none": ("blocks", "ranks"), "nvfp4": ("ignore", "scales", "text")}


def _report(options: argparse.Namespace) -> None:
    from pathlib import Path

    from tqdm import tqdm

    from attnquant.demo import checkpoint_directory
    from attnquant.whole_file import write_whole

    for quant, names in _REPORT_OPTIONS.items():
        if quant != options.quant and (said := _given(options, *names)):
            raise SettingsError(
                f"--{next(iter(said))}: found --quant {options.quant}, expected --quant {quant}, "
                "which it is for"
            )
    directory = checkpoint_directory(options.model)
    chosen = _given(options, *_REPORT_OPTIONS[options.quant])
    with tqdm(unit="B", unit_scale=True, desc="report", disable=None) as bar:
        if options.quant == "nvfp4":
            from attnquant.report import nvfp4, nvfp4_page

            if "text" in chosen:
                chosen["text"] = Path(chosen["text"])
            quantized = nvfp4.measure(directory, progress=bar.update, **chosen)
            table = nvfp4_page.render_table(quantized)
            page = nvfp4_page.render_page(quantized)
        else:
            from attnquant.report import measure, render_page, render_table

            shared = measure(directory, progress=bar.update, **chosen)
            table, page = render_table(shared), render_page(shared)
    print(table)
    if options.html is not None:
        path, content = Path(options.html), page.encode()

        def write(place: Path) -> None:
            place.write_bytes(content)

        try:
            if path.exists() and not path.is_file():  # a device or a pipe
                write(path)
            else:
                write_whole(path.resolve(), write)
        except OSError as error:
            raise SettingsError(
                f"--html {options.html}: cannot be written ({error.strerror}); name another file"
            ) from None


def _add_parity(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Holds the logits of attnquant's graph, on the CPU in float32 and under the ATTNQUANT_* "
        "variables, against transformers' own, on a fixed set of prompts. Needs the parity extra."
    )
    parser.add_argument("model", help="a checkpoint's directory, or demo")
    parser.add_argument(
        "--reference", metavar="DIR", help="what transformers loads; default: the same checkpoint"
    )
    parser.add_argument(
        "--max-kl",
        metavar="NATS",
        type=_typed(_distance),
        help="exit with 1 if the KL divergence of any position is above; default 1e-7, which is "
        "for unquantized weights",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_parity)


def _parity(options: argparse.Namespace) -> int:
    from attnquant.demo import checkpoint_directory
    from attnquant.parity import measure, render_table, to_json
    from attnquant.parity.measure import MAX_KL

    reference = options.reference and checkpoint_directory(options.reference)
    found = measure(
        checkpoint_directory(options.model),
        reference=reference or None,
        limit=MAX_KL if options.max_kl is None else options.max_kl,
    )
    print(to_json(found) if options.json else render_table(found))
    return 0 if found.agrees else 1


def _distance(text: str) -> float:
    try:
        if 0 <= (value := float(text)) < float("inf"):
            return value
    except ValueError:
        pass
    raise SettingsError(f"{text!r} is not a number of nats, 0 or more")


def _counts(text: str) -> tuple[int, ...]:
    counts = patterns(text)
    if not counts or not all(part.isascii() and part.isdigit() for part in counts):
        raise SettingsError(f"{text!r} is not a list of whole numbers such as 9,6,3")
    return tuple(map(int, counts))
