"""The documentation's tables are what the code says."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from attnquant.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[1]


def shown(default: Any) -> str:
    if default is None or default == ():
        return "unset"
    return f"`{int(default) if isinstance(default, bool) else default}`"


def settings_table() -> list[str]:
    return [
        f"| `{PREFIX}{setting.name.upper()}` | {setting.metadata['allowed']} "
        f"| {shown(setting.default)} | {setting.metadata['doc']} |"
        for setting in fields(Settings)
    ]


def test_configuration_lists_every_setting() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith(f"| `{PREFIX}")]
    assert rows == settings_table()
