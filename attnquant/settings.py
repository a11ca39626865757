"""Settings: the only reader of `ATTNQUANT_*` variables and of config.json's "attnquant" object.

A variable beats the field of the same name (`ATTNQUANT_QUANT_SCALES` is `"quant_scales"`). All
problems are reported at once. Each setting is one dataclass field; its metadata holds the parser
and the sentence that documentation and error messages print.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from attnquant.errors import SettingsError

PREFIX = "ATTNQUANT_"
Quant = Literal["none", "nvfp4"]
QuantScales = Literal["absmax", "mse"]


def _integer(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise ValueError
        return value

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
    precompute_outside: bool = field(
        default=True,
        metadata=_described(
            _switch,
            "0 or 1",
            "1 rebuilds W_eff on the host, once, at load; the graph sees plain weights.",
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
    quant_scales: QuantScales = field(
        default="mse",
        metadata=_described(
            _choice("absmax", "mse"),
            "absmax or mse",
            "How a block's scale is chosen: from its largest magnitude, or for the least squared "
            "error.",
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

    @classmethod
    def read(
        cls,
        config: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Settings:
        """Reads the settings.

        Args:
            config: config.json's "attnquant" object, if the checkpoint has one.
            environ: the environment; `os.environ` if None.

        Raises:
            SettingsError: one line that lists every unknown name and every impossible value.
        """
        environ = os.environ if environ is None else environ
        config = {} if config is None else config
        known = {setting.name: setting for setting in fields(cls)}
        problems = [
            _unknown(name, [known_name.upper() for known_name in known], PREFIX)
            for name in sorted(environ)
            if name.startswith(PREFIX) and name.removeprefix(PREFIX).lower() not in known
        ]
        problems += [
            "config.json's attnquant." + _unknown(name, known)
            for name in config
            if name not in known
        ]
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for name, setting in known.items():
            variable = PREFIX + name.upper()
            if variable in environ:
                source, text = variable, environ[variable]
            elif name in config:
                source, text = f"config.json's attnquant.{name}", _as_text(config[name])
            else:
                continue
            sources[name] = source
            try:
                values[name] = setting.metadata["parse"](text.strip())
            except (ValueError, KeyError):
                problems.append(f"{source}={text!r} is not {setting.metadata['allowed']}")
        if not problems and values.get("quant", cls.quant) == "none":
            problems += [
                f"{sources[name]} says how to quantize, and {PREFIX}QUANT=nvfp4 is not set"
                for name in ("quant_scales", "quant_ignore", "quant_lm_head")
                if name in values and values[name] != known[name].default
            ]
        if problems:
            raise SettingsError("; ".join(problems))
        return cls(**values)


def _unknown(name: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name.removeprefix(prefix), known, n=1)
    everything = ", ".join(prefix + one for one in known)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known are {everything}"
    return f"{name} is not a setting: {hint}"


def _as_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)
