"""The commands that README and quickstart print, block by block."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:<!-- (?P<note>[^>]*) -->\n\s*)?```(?P<language>\w*)\n(?P<text>.*?)```\n"
    r"(?:(?:(?!```|\n#).)*?```text\n(?P<output>.*?)```)?",
    re.DOTALL,
)
_LANGUAGES = {"", "sh", "bash"}
_VARIABLE = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of commands.

    Attributes:
        file: whose it is.
        text: as printed.
        output: what a block of text after it says that it prints, if there is one.
        note: why a test does not run it, from the comment before it; None if one does.
    """

    file: str
    text: str
    output: str | None
    note: str | None

    def commands(self) -> list[list[str]]:
        """Its commands as words, without variables before them; `a && b` are two."""
        found: list[list[str]] = [[]]
        lines = self.text.replace("\\\n", " ").strip().splitlines()
        for line in lines:
            lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
            lexer.whitespace_split = True
            for word in lexer:
                if set(word) <= set("&;|"):
                    found.append([])
                elif found[-1] or not _VARIABLE.fullmatch(word):
                    found[-1].append(word)
            found.append([])
        return [words for words in found if words]


def blocks(path: Path) -> list[Block]:
    """All blocks of commands of a file, in order."""
    return [
        Block(
            file=path.name,
            text=match["text"],
            output=match["output"],
            note=match["note"],
        )
        for match in _BLOCK.finditer(path.read_text(encoding="utf-8"))
        if match["language"] in _LANGUAGES
    ]
