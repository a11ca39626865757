"""Settings: the only reader of `ATTNQUANT_*` variables and of config.json's "attnquant" object.

A variable beats the field of the same name (`ATTNQUANT_QUANT_SCALES` is `"quant_scales"`). All
problems are reported at once. Each setting is one dataclass field; its metadata holds the parser
and the sentence that documentation and error messages print.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from reprlib import repr  # shortens what a hostile config puts into a message
from typing import Any, Literal

from attnquant.errors import SettingsError

PREFIX = "ATTNQUANT_"

# Beside the settings, config.json's object says in which format a theta checkpoint was written.
FORMAT = "format"

Gemm = Literal["auto", "dense", "factored"]
Quant = Literal["none", "nvfp4"]
QuantScales = Literal["absmax", "mse", "profile"]


# Names beyond this are shortened in messages.
_LONGEST = 80

_NATURAL = re.compile("[0-9]{1,9}")


def _integer(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        # `int` would also take 1_0, +2 and other scripts' digits.
        if _NATURAL.fullmatch(text) is None or int(text) < minimum:
            raise ValueError
        return int(text)

    return parse


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError
        return text

    return parse


def _switch(text: str) -> bool:
    return {"0": False, "1": True, "false": False, "true": True}[text.lower()]


def patterns(text: str) -> tuple[str, ...]:
    """The patterns of a comma-separated list."""
    return tuple(pattern.strip() for pattern in text.split(",") if pattern.strip())


def _described(parse: Callable[[str], Any], allowed: str, doc: str) -> dict[str, Any]:
    return {"parse": parse, "allowed": allowed, "doc": doc}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked of attnquant; `Settings.read` makes one."""

    blocks: int | None = field(
        default=None,
        metadata=_described(
            _integer(1),
            "a whole number, 1 or more",
            "Shared blocks per role. The number of layers (the default) is passthrough: the "
            "checkpoint's own weights, bit for bit.",
        ),
    )
    rank: int = field(
        default=0,
        metadata=_described(
            _integer(0),
            "a whole number, 0 or more",
            "Rank of the low-rank correction U·Vᵀ that each layer gets below passthrough.",
        ),
    )
    precompute_outside: bool | None = field(
        default=None,
        metadata=_described(
            _switch,
            "0 or 1",
            "1 rebuilds W_eff on the host, once, at load; the graph sees plain weights. 0 keeps "
            "bundles in the graph, each shared block once. Unset is 1, which reads the least where "
            "a block does not stay in a cache, except for a checkpoint whose blocks are in NVFP4.",
        ),
    )
    gemm: Gemm = field(
        default="auto",
        metadata=_described(
            _choice("auto", "dense", "factored"),
            "auto, dense or factored",
            "What a graph does with bundles: rebuilds W_eff in every step, or computes "
            "s·(W0 x) + U·(Vᵀ x). auto takes what is faster on the device.",
        ),
    )
    quant: Quant = field(
        default="none",
        metadata=_described(
            _choice("none", "nvfp4"),
            "none or nvfp4",
            "nvfp4 quantizes every projection while the checkpoint loads.",
        ),
    )
    quant_scales: QuantScales | None = field(
        default=None,
        metadata=_described(
            _choice("absmax", "mse", "profile"),
            "absmax, mse or profile",
            "How a block's scale is chosen: from its largest magnitude, for the least squared "
            "error, or for the least squared error with each input channel counted as loud as "
            "random tokens make it. Unset is profile for Gemma 3, where its gain was measured, and "
            "mse for other decoders.",
        ),
    )
    profile_tokens: int = field(
        default=4096,
        metadata=_described(
            _integer(2),
            "a whole number, 2 or more",
            "Random tokens that `profile` sends through the model, in sequences of 512.",
        ),
    )
    quant_ignore: tuple[str, ...] = field(
        default=(),
        metadata=_described(
            patterns,
            "comma-separated names or globs over module paths",
            "Projections that stay as they are: `self_attn`, `o_proj`, `model.layers.0.*`.",
        ),
    )
    quant_lm_head: Quant = field(
        default="none",
        metadata=_described(
            _choice("none", "nvfp4"),
            "none or nvfp4",
            "nvfp4 quantizes the output head too (a packed copy of a tied embedding).",
        ),
    )

    cache_gb: int = field(
        default=64,
        metadata=_described(
            _integer(0),
            "a whole number of GB, 0 or more",
            "What packed weights, kept in the user's cache so that the next start encodes nothing, "
            "may take on disk, for all models together. 0 keeps none.",
        ),
    )

    @classmethod
    def read(
        cls,
        config: Any = None,
        environ: Mapping[str, str] | None = None,
    ) -> Settings:
        """Reads the settings.

        Args:
            config: what config.json has as "attnquant"; None if it has nothing.
            environ: the environment; `os.environ` if None.

        Raises:
            SettingsError: one line that lists every unknown name and every impossible value.
        """
        environ = os.environ if environ is None else environ
        config = {} if config is None else config
        problems = []
        if not isinstance(config, Mapping):
            problems.append(f"config.json's attnquant is {repr(config)}, expected an object")
            config = {}
        known = {setting.name: setting for setting in fields(cls)}
        variables = [PREFIX + name.upper() for name in known]
        unknown = [
            _unknown(name, variables, PREFIX)
            for name in sorted(environ)
            # Letters of the wrong case make another variable, which nothing would read.
            if name.upper().startswith(PREFIX) and name not in variables
        ]
        unknown += [
            "config.json's attnquant." + _unknown(name, known)
            for name in config
            if name not in known and name != FORMAT
        ]
        problems += unknown
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for name, setting in known.items():
            variable = PREFIX + name.upper()
            if variable in environ:
                source, text = variable, environ[variable]
            elif name in config:
                source = f"config.json's attnquant.{name}"
                text = _as_text(config[name], is_list=setting.metadata["parse"] is patterns)
            else:
                continue
            sources[name] = source
            try:
                values[name] = setting.metadata["parse"](text.strip())
            except (ValueError, KeyError):
                problems.append(f"{source}={repr(text)} is not {setting.metadata['allowed']}")
        if not unknown:
            problems += _contradictions(values, sources, known)
        if problems:
            raise SettingsError("; ".join(problems))
        return cls(**values)


def _contradictions(
    values: Mapping[str, Any], sources: Mapping[str, str], known: Mapping[str, Field[Any]]
) -> list[str]:
    """What values say against each other, as far as they could be read."""

    def said(name: str) -> Any:
        """A value, its default where nobody said one, or None where it could not be read."""
        return values.get(name, None if name in sources else known[name].default)

    problems = []
    if said("quant") == "none":
        problems += [
            f"{sources[name]} says how to quantize, and {PREFIX}QUANT=nvfp4 is not set"
            for name in ("quant_scales", "profile_tokens", "quant_ignore", "quant_lm_head")
            if name in values and values[name] != known[name].default
        ]
    elif said("quant_lm_head") == "nvfp4" and "lm_head" in (said("quant_ignore") or ()):
        problems.append(
            f"{sources['quant_ignore']} names lm_head, and {sources['quant_lm_head']}=nvfp4 asks "
            "for it"
        )
    unread = "precompute_outside" in sources and "precompute_outside" not in values
    asked = said("gemm") not in (None, known["gemm"].default)
    if asked and not unread and said("precompute_outside") is not False:
        problems.append(
            f"{sources['gemm']}={values['gemm']} says what a graph does with bundles, and "
            f"{PREFIX}PRECOMPUTE_OUTSIDE=0, which keeps them in it, is not set"
        )
    return problems


def _unknown(name: str, known: Iterable[str], prefix: str = "") -> str:
    by_short = {one.removeprefix(prefix).upper(): one for one in known}
    near = difflib.get_close_matches(name[len(prefix) : _LONGEST].upper(), by_short, n=1)
    shown = name if name.isprintable() and len(name) < _LONGEST else repr(name)
    hint = f"did you mean {by_short[near[0]]}?" if near else f"known are {', '.join(known)}"
    return f"{shown} is not a setting: {hint}"


def _as_text(value: Any, *, is_list: bool) -> str:
    """A field as a variable would say it: `true`, `null` and `[1]` as JSON writes them."""
    if is_list and isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
