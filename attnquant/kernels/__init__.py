"""Mojo kernels, and the Python functions that put them into a graph or run them on the host.

MAX takes a folder of Mojo sources as `custom_extensions`, but parses it again for every graph of
every process, which is seconds each. `extensions` does that once per version of the sources.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from platformdirs import user_cache_path

from attnquant.whole_file import write_whole

EXTENSIONS = Path(__file__).parent / "mojo"
"""The Mojo sources of our operations. Pass `extensions()` to MAX, never this beside it: a process
that holds both has every operation twice, which MAX refuses."""

_PACKAGE = "attnquant_kernels.mojoc"  # the compiler bakes this name in: it must not change

_LEAST_FREE = 1 << 20  # bytes; with less, the disk is why the compiler failed


@cache
def extensions() -> Path:
    """What to pass as `custom_extensions`: our operations as a package that MAX need not parse.

    It is kept in the user's cache, one for each version of the sources and of Mojo. Where that
    directory cannot be written, the sources themselves are returned.
    """
    digest = sha256(version("mojo").encode())
    for source in sorted(EXTENSIONS.glob("*.mojo")):
        digest.update(b"\0" + source.name.encode() + b"\0" + source.read_bytes())
    package = user_cache_path("attnquant") / f"kernels-{digest.hexdigest()[:16]}" / _PACKAGE
    if package.is_file():
        return package
    try:
        write_whole(package, _precompile)
    except OSError:
        return EXTENSIONS
    return package


def _precompile(target: Path) -> None:
    from mojo.run import subprocess_run_mojo

    try:
        subprocess_run_mojo(
            ["precompile", str(EXTENSIONS), "-o", str(target)], capture_output=True, check=True
        )
    except subprocess.CalledProcessError as error:
        if shutil.disk_usage(target.parent).free < _LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target)) from None
        raise RuntimeError(f"{EXTENSIONS}: {error.stderr.decode(errors='replace')}") from error
