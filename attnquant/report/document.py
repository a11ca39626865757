"""The shell of a page that needs nothing else: no network, no script, no font."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from attnquant import __version__

_STYLE = """
:root { color-scheme: light dark; --text: #1d2126; --quiet: #5d6670; --back: #ffffff;
  --rule: #dde1e6; --cold: #eef1f5; --hot: #a1260d; --line-0: #1c6fb8; --line-1: #b3540b;
  --line-2: #2d7d46; --line-3: #7a4ab5; --line-4: #97204f; --line-5: #5b6b00; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7eb; --quiet: #98a2ae; --back: #15181c;
  --rule: #333a42; --cold: #262c33; --hot: #ff8a65; --line-0: #6fb1ea; --line-1: #f0a05a;
  --line-2: #74c48c; --line-3: #b99aeb; --line-4: #ec86ab; --line-5: #bcc95a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 72rem; color: var(--text);
  background: var(--back); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.2; overflow-wrap: anywhere; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .25rem; }
p { margin: .25rem 0 1rem; max-width: 44rem; color: var(--quiet); }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .9rem; margin-bottom: .25rem; }
.wide { max-width: 32rem; }
.map { max-width: 26rem; margin-bottom: 1rem; }
.grid-of { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); }
svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--quiet); }
svg text.name { fill: var(--text); }
svg .grid { stroke: var(--rule); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; font-size: .9rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .25rem .75rem; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; }
"""


def document(title: str, *parts: str) -> str:
    """A whole page: its heading, its parts one after the other, and who made it."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts, f"<p>attnquant {__version__}</p>"])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the heads."""
    heads, *others = rows
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in others
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
