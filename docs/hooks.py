"""What the site says that the code knows: settings, and the figures that `bench` wrote.

MkDocs calls `on_page_markdown` for each page; a page has the marker where the text goes.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from attnquant.settings import PREFIX, Settings

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
SETTINGS_MARKER = "<!-- settings -->"
COMPARISON_MARKER = "<!-- comparison -->"

# `bench.decode` and `bench.quality` name what is in NVFP4 in their own words.
_DECODED = {
    "float32": "nothing",
    "NVFP4": "every projection",
    "NVFP4, head too": "every projection and the head",
}
_ANSWERED = {
    "attention + MLP": "every projection",
    "attention only": "attention only",
    "MLP only": "MLP only",
}
# What `bench.decode` and `bench.quality` run, and what a checkpoint's default scales are there.
_MODEL, _SCALES = "Gemma 3 270M", "profile"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts what the code knows in the place of the markers."""
    if SETTINGS_MARKER in markdown:
        markdown = markdown.replace(SETTINGS_MARKER, "\n".join(settings_list()))
    if COMPARISON_MARKER in markdown:
        # In a script element `<` could end it.
        data = json.dumps(comparison()).replace("<", "\\u003c")
        text = f'<script type="application/json" id="comparison-data">{data}</script>'
        markdown = markdown.replace(COMPARISON_MARKER, text)
    return markdown


def settings_list() -> list[str]:
    """Every setting: variable, field, values, default, and what it does; lines of Markdown."""
    lines = []
    for setting in fields(Settings):
        meta = setting.metadata
        lines += [
            f"### `{PREFIX}{setting.name.upper()}` {{ #{setting.name} }}",
            "",
            f"In `config.json`: `{setting.name}` · values: {meta['allowed']} · default: "
            f"{_shown(setting.default)}",
            "",
            meta["doc"],
            "",
        ]
    return lines


def _shown(default: Any) -> str:
    if default is None or default == ():
        return "unset"
    return f"`{int(default) if isinstance(default, bool) else default}`"


def comparison() -> list[dict[str, Any]]:
    """Figures, one a record: `model`, `coverage`, `figure`, `value`, `spread`, `device`, `command`.

    Figures are `bytes` per token, `rate` in tokens per second, and `kl` in nats. A spread is what
    is on either side of the value: half the distance from the least round to the largest, or a
    standard error.
    """
    records = []
    if content := _result("bytes"):
        source = {"device": "none: exact, from shapes", "command": content["command"]}
        for model, sizes in content["figures"]["bytes_per_token"].items():
            for coverage, size in sizes.items():
                records.append(_record(model, coverage, "bytes", size["total"], 0, source))
    if content := _result("decode"):
        source = {"device": _device(content), "command": content["command"]}
        for side, rate in content["figures"]["tokens_per_second"].items():
            value, spread = rate["median"], rate["spread"] / 2
            coverage = _DECODED.get(side, side)  # a peer is called what it is
            records.append(_record(_MODEL, coverage, "rate", value, spread, source))
    if content := _result("quality"):
        source = {"device": _device(content), "command": content["command"]}
        records.append(_record(_MODEL, "nothing", "kl", 0, 0, source))
        for name, quality in content["figures"]["qualities"].items():
            coverage, _, scales = name.rpartition(", ")
            if scales == _SCALES:
                value, error = quality["kl"], quality["kl_error"]
                records.append(_record(_MODEL, _ANSWERED[coverage], "kl", value, error, source))
    return records


def _record(
    model: str, coverage: str, figure: str, value: float, spread: float, source: dict[str, str]
) -> dict[str, Any]:
    names = {"model": model, "coverage": coverage, "figure": figure}
    return names | {"value": value, "spread": spread} | source


def _result(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _device(content: dict[str, Any]) -> str:
    device = content["device"]
    return f"{device['cpu']}, {device['cores']} cores"
