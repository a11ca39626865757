"""Draws the README's picture from what was measured: `python -m bench.picture`.

Left, bytes that one token of Gemma 4 31B reads (`bench.bytes`), part by part. Right, how fast
Gemma 3 270M decodes on a CPU (`bench.decode`): medians, and a line from the least round to the
largest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bench.common import RESULTS, ROOT

PICTURE = ROOT / "docs" / "images" / "effect.svg"
MODEL = "Gemma 4 31B"
COVERAGES = {
    "nothing": "bfloat16",
    "MLP only": "MLP in NVFP4",
    "every projection": "attention too",
    "every projection and the head": "and the head",
}
SIDES = {
    "float32": "float32",
    "NVFP4": "NVFP4",
    "NVFP4, head too": "NVFP4 + head",
    "llama.cpp Q4_K_M": "llama.cpp Q4",
}
PARTS = {"attention": "#1c6fb8", "mlp": "#b3540b", "head": "#2d7d46"}
NAMES = {"attention": "attention", "mlp": "MLP", "head": "head"}
WIDTH, HEIGHT, TOP, STEP, BAR = 860, 236, 66, 36, 22
LABEL, LENGTH = 104, 236


def draw(results: Path = RESULTS) -> str:
    """The picture's text.

    Raises:
        OSError: a result is missing; run its command.
    """
    sizes = _read(results / "bytes.json")["figures"]["bytes_per_token"][MODEL]
    decode = _read(results / "decode.json")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(_description(sizes, decode))}">',
        "<style>text{font:13px system-ui,sans-serif;fill:#1d2126}.h{font-weight:600;"
        "font-size:14px}.q{fill:#5d6670;font-size:12px}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff"/>',
        f'<text class="h" x="16" y="26">{MODEL}: GB that a token reads</text>',
        *_legend(16, 46),
        *_bytes(sizes),
        '<text class="h" x="456" y="26">Gemma 3 270M on a CPU: tokens per second</text>',
        f'<text class="q" x="456" y="46">{escape(_device(decode))}</text>',
        *_rates(decode["figures"]["tokens_per_second"]),
        f'<text class="q" x="16" y="{HEIGHT - 12}">From shapes, python -m bench.bytes</text>',
        f'<text class="q" x="456" y="{HEIGHT - 12}">Measured, python -m bench.decode</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _device(content: Mapping[str, Any]) -> str:
    device = content["device"]
    return f"{device['cpu'].partition(' (')[0]}, {device['cores']} cores"


def _description(sizes: Mapping[str, Any], decode: Mapping[str, Any]) -> str:
    reads = [f"{label} {sizes[name]['total'] / 1e9:.1f} GB" for name, label in COVERAGES.items()]
    rates = decode["figures"]["tokens_per_second"]
    speeds = [f"{label} {rates[n]['median']:.1f}" for n, label in SIDES.items() if n in rates]
    return (
        f"Bytes that a token of {MODEL} reads: {', '.join(reads)}. "
        f"Tokens per second of Gemma 3 270M on a CPU: {', '.join(speeds)}."
    )


def _legend(x: int, y: int) -> Iterator[str]:
    for part, colour in PARTS.items():
        yield f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{colour}"/>'
        yield f'<text class="q" x="{x + 16}" y="{y}">{NAMES[part]}</text>'
        x += 90


def _bytes(sizes: Mapping[str, Any]) -> Iterator[str]:
    scale = LENGTH / max(size["total"] for size in sizes.values())
    for row, (name, label) in enumerate(COVERAGES.items()):
        x, y = 16.0 + LABEL, TOP + STEP * row
        yield _label(16, y, label)
        for part, colour in PARTS.items():
            width = sizes[name][part] * scale
            yield _bar(x, y, width, colour)
            x += width
        yield f'<text x="{x + 6:.1f}" y="{y + 16}">{sizes[name]["total"] / 1e9:.1f}</text>'


def _rates(rates: Mapping[str, Any]) -> Iterator[str]:
    shown = {label: rates[name] for name, label in SIDES.items() if name in rates}
    scale = (LENGTH - 20) / max(max(rate["values"]) for rate in shown.values())
    for row, (name, rate) in enumerate(shown.items()):
        x, y = 456.0 + LABEL, TOP + STEP * row
        yield _label(456, y, name)
        yield _bar(x, y, rate["median"] * scale, "#5b6b00")
        least, most = (x + scale * pick(rate["values"]) for pick in (min, max))
        middle = y + BAR / 2
        yield (
            f'<path d="M{least:.1f} {middle}H{most:.1f}M{least:.1f} {middle - 4}v8'
            f'M{most:.1f} {middle - 4}v8" stroke="#1d2126" fill="none"/>'
        )
        yield f'<text x="{most + 8:.1f}" y="{y + 16}">{rate["median"]:.1f}</text>'


def _label(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y + 16}">{escape(text)}</text>'


def _bar(x: float, y: int, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw(), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
