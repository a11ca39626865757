"""`python -m attnquant inspect | export`: what needs no server.

Subcommands import what they need when they run, so that `inspect`, which reads a config.json, does
not wait for MAX.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from attnquant import __version__
from attnquant.errors import AttnquantError
from attnquant.settings import patterns


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status: 0, or 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m attnquant", description=__doc__)
    parser.add_argument("--version", action="version", version=f"attnquant {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_inspect(commands.add_parser("inspect", help="what a model reads per token, in NVFP4"))
    _add_export(commands.add_parser("export", help="write a checkpoint in NVFP4"))
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
    parser.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> None:
    from attnquant.inspect import inspect, render, to_json

    report = inspect(
        options.model,
        quant=options.quant,
        ignore=options.ignore,
        quant_lm_head="nvfp4" if options.lm_head else "none",
    )
    print(to_json(report) if options.json else render(report))


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a dense checkpoint's directory; it is only read")
    parser.add_argument("target", help="the new directory")
    parser.add_argument("--quant", choices=("nvfp4",), required=True)
    parser.add_argument(
        "--ignore", type=patterns, default=(), help="as ATTNQUANT_QUANT_IGNORE: self_attn, ..."
    )
    parser.add_argument("--scales", choices=("absmax", "mse"), default="mse")
    parser.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    from tqdm import tqdm

    from attnquant.checkpoint.export import export_nvfp4
    from attnquant.kernels.codec import encode, largest_magnitude
    from attnquant.nvfp4.accounting import format_bytes

    with tqdm(unit="B", unit_scale=True, desc="export", disable=None) as bar:
        report = export_nvfp4(
            options.source,
            options.target,
            encode=partial(encode, scales=options.scales),
            largest_magnitude=largest_magnitude,
            recipe={"scales": options.scales},
            ignore=options.ignore,
            progress=bar.update,
        )
    quantized = len(report.coverage.quantized)
    print(
        f"{options.target}: {quantized} of {len(report.coverage.reasons)} projections in NVFP4, "
        f"{format_bytes(report.before)} -> {format_bytes(report.after)}"
    )
