"""Coverage: which projections are quantized, decided once and asked by everyone.

A pattern is a name or a glob over module paths. It matches a module if it matches any run of whole
components of its path, under any prefix that checkpoints use: `self_attn`, `mlp.down_proj`,
`layers.3`, `model.layers.0.*`, `layers.*.mlp.down_proj` and `*attn*` all do what they seem to.
`re:` in front makes the rest a regular expression, from the start of such a run, as
compressed-tensors writes them. One matcher serves ATTNQUANT_QUANT_IGNORE and the lists in NVFP4
checkpoints.

A fused group needs one answer for all its rows. Where a pattern splits a group, that group is left
unfused: each projection is then a group of its own, and keeps its own answer.
"""

from __future__ import annotations

import fnmatch
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from reprlib import repr  # shortens what a hostile config puts into a message
from typing import Any

from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import CheckpointError, SettingsError, UnsupportedError
from attnquant.nvfp4.format import BLOCK_SIZE
from attnquant.projections import PREFIXES, ROLES, ProjectionKey, Role, fused_groups
from attnquant.settings import Settings

LM_HEAD = "lm_head"
IGNORED = "ignored"
NOT_ASKED = "not asked for"

_MODELOPT_METHODS = ("modelopt", "modelopt_fp4")
_COMPRESSED_TENSORS_FORMAT = "nvfp4-pack-quantized"

_GLOB = re.compile(r"[*?[]")

# What a checkpoint's own list may cost. Lists of real checkpoints take a twentieth of a second.
_MOST_SECONDS = 1.0
_MOST_STEPS = 50**3  # of one regular expression, on a path of 50 characters


@dataclass(frozen=True, kw_only=True)
class Group:
    """Projections of one layer that one matmul serves, and whether it runs from NVFP4."""

    roles: tuple[Role, ...]
    quantized: bool


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The set of projections that are quantized.

    Attributes:
        reasons: for every projection of the decoder, why it is left as it is, or None if it is
            quantized.
        lm_head: the output head is quantized too.
    """

    reasons: Mapping[ProjectionKey, str | None]
    lm_head: bool = False

    @classmethod
    def of(
        cls,
        shapes: Mapping[ProjectionKey, tuple[int, int]],
        *,
        ignore: Collection[str] = (),
        head: tuple[int, int] | None = None,
        source: str | None = "ATTNQUANT_QUANT_IGNORE",
    ) -> Coverage:
        """Quantizes every projection that no pattern matches and whose `in` is a multiple of 16.

        Args:
            shapes: `(out, in)` of every projection, as `DecoderShapes.projections`.
            ignore: patterns of what stays as it is.
            head: `(vocab, hidden)` if the output head is to be quantized too.
            source: where the patterns are from; every one of them must match something. None for
                a checkpoint's own list, which also names towers and norms.

        Raises:
            CheckpointError: a checkpoint's own list holds no patterns, or takes too long.
            SettingsError: patterns that match nothing, all of them; lists what exists.
        """
        started = time.process_time()

        def check_cost() -> None:
            if source is None and time.process_time() - started > _MOST_SECONDS:
                raise CheckpointError(
                    f"config.json: ignore: found {len(ignore)} patterns that take too long to "
                    "match, expected few; write whole modules' names, or quantize again"
                )

        paths = {key: _paths(key.module) for key in shapes}
        head_paths = _paths(LM_HEAD)
        matchers, problems = {}, []
        for pattern in ignore:
            check_cost()
            try:
                matchers[pattern] = _matcher(pattern, source)
            except SettingsError as error:
                problems.append(str(error))
        if source is not None:
            everything = [*paths.values(), head_paths]
            idle = [
                repr(pattern)
                for pattern, matches in matchers.items()
                if not any(map(matches, everything))
            ]
            if idle:
                problems.append(
                    f"{source}: {', '.join(idle)} match{'es' if len(idle) == 1 else ''} no "
                    f"projection; there are {_existing(shapes)}"
                )
        if problems:
            raise SettingsError("; ".join(problems))
        ignored = matchers.values()
        reasons: dict[ProjectionKey, str | None] = {}
        for key, (_, columns) in shapes.items():
            check_cost()
            if any(matches(paths[key]) for matches in ignored):
                reasons[key] = IGNORED
            elif columns % BLOCK_SIZE:
                reasons[key] = f"in = {columns} is not a multiple of {BLOCK_SIZE}"
            else:
                reasons[key] = None
        return cls(
            reasons=reasons,
            lm_head=head is not None
            and head[1] % BLOCK_SIZE == 0
            and not any(matches(head_paths) for matches in ignored),
        )

    @classmethod
    def none(cls, shapes: Iterable[ProjectionKey]) -> Coverage:
        """Nothing is quantized."""
        return cls(reasons=dict.fromkeys(shapes, NOT_ASKED))

    def is_quantized(self, key: ProjectionKey) -> bool:
        """Whether this projection is quantized; KeyError if the decoder does not have it."""
        return self.reasons[key] is None

    @property
    def quantized(self) -> tuple[ProjectionKey, ...]:
        """The quantized projections, layer by layer."""
        return tuple(key for key, reason in self.reasons.items() if reason is None)

    def groups(self, layer: int) -> tuple[Group, ...]:
        """The matmuls of one layer: its fused groups, or their members where a group is split."""
        roles = tuple(key.role for key in self.reasons if key.layer == layer)
        groups: list[Group] = []
        for members in fused_groups(roles):
            answers = [self.is_quantized(ProjectionKey(layer=layer, role=role)) for role in members]
            if len(set(answers)) == 1:
                groups.append(Group(roles=members, quantized=answers[0]))
            else:
                groups += [
                    Group(roles=(role,), quantized=answer)
                    for role, answer in zip(members, answers, strict=True)
                ]
        return tuple(groups)


def coverage_of(settings: Settings, shapes: DecoderShapes, packed: Collection[str]) -> Coverage:
    """What a decoder runs from NVFP4: what the settings ask for, and what the checkpoint has so.

    Args:
        settings: what the user asked for.
        shapes: of the decoder.
        packed: module paths below the decoder of what the checkpoint holds in NVFP4.

    Raises:
        SettingsError: a pattern of ATTNQUANT_QUANT_IGNORE matches nothing.
    """
    asked = Coverage.none(shapes.projections)
    if settings.quant == "nvfp4":
        asked = Coverage.of(
            shapes.projections,
            ignore=settings.quant_ignore,
            head=shapes.head if settings.quant_lm_head == "nvfp4" else None,
        )
    return Coverage(
        reasons={
            key: None if key.module in packed else reason for key, reason in asked.reasons.items()
        },
        lm_head=asked.lm_head or LM_HEAD in packed,
    )


def declared_ignore(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None
) -> tuple[str, ...] | None:
    """What an NVFP4 checkpoint says it left unquantized; None if the checkpoint is dense.

    Args:
        config: config.json. ModelOpt's and compressed-tensors' `quantization_config` are read.
        hf_quant_config: hf_quant_config.json, which older ModelOpt exports write beside it.

    Raises:
        UnsupportedError: the checkpoint is quantized, but not to NVFP4.
        CheckpointError: the list is not a list of names.
    """
    file, declared = "config.json: quantization_config", config.get("quantization_config")
    if not declared and hf_quant_config is not None:
        file, declared = "hf_quant_config.json", hf_quant_config.get("quantization")
    if not declared:
        return None
    if not isinstance(declared, Mapping):
        raise CheckpointError(f"{file} is {repr(declared)}, expected an object")
    method = declared.get("quant_method", "modelopt")
    is_modelopt = method in _MODELOPT_METHODS and declared.get("quant_algo") == "NVFP4"
    if not is_modelopt and declared.get("format") != _COMPRESSED_TENSORS_FORMAT:
        what = declared.get("quant_algo") or declared.get("format") or "unnamed"
        raise UnsupportedError(
            f"{file} says {_word(method)}, {_word(what)}; attnquant loads dense checkpoints, and "
            "NVFP4 from ModelOpt or compressed-tensors"
        )
    for field in ("ignore", "exclude_modules", "ignored_layers"):
        names = declared.get(field)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(
                f"{file}: {field} is {repr(names)}, expected a list of module names"
            )
        return tuple(names)
    return ()


def _word(value: object) -> str:
    return repr(str(value))[1:-1]


def _paths(module: str) -> frozenset[str]:
    """The module's path under every prefix, and every run of whole components of those."""
    runs: set[str] = set()
    for prefix in PREFIXES:
        parts = (prefix + module).split(".")
        ends = range(1, len(parts) + 1)
        runs |= {".".join(parts[start:end]) for end in ends for start in range(end)}
    return frozenset(runs)


def _matcher(pattern: str, source: str | None) -> Callable[[frozenset[str]], bool]:
    """Whether a pattern matches a module, given its `_paths`."""
    if not pattern.startswith("re:") and not _GLOB.search(pattern):
        return lambda paths: pattern in paths
    text = pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)
    error: Exception | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that a later Python may read differently
            expression = re.compile(text)
    except (re.error, OverflowError, RecursionError) as caught:
        error = caught
    if error is not None:
        raise (CheckpointError if source is None else SettingsError)(
            f"{source or 'config.json: ignore'}: {repr(pattern)} is not a regular expression: "
            f"{error}"
        )
    if source is None and pattern.startswith("re:") and _steps(text) > _MOST_STEPS:
        raise CheckpointError(
            f"config.json: ignore: {repr(pattern)} could be matched for ever, expected few "
            "repetitions, and none of a group; write it as a glob"
        )
    return lambda paths: any(map(expression.match, paths))


def _existing(shapes: Collection[ProjectionKey]) -> str:
    """A short list of what a pattern may name."""
    roles = [role for role in ROLES if any(key.role == role for key in shapes)]
    last = max((key.layer for key in shapes), default=0)
    return f"{', '.join(['self_attn', 'mlp', *roles, LM_HEAD])}, in layers.0 to layers.{last}"


def _steps(expression: str) -> float:
    """At most so many steps backtracking takes on a path of 50 characters."""
    if re.search(r"\)[*+{]|\(\?P?[=<(]", expression):
        return float("inf")
    repetitions, bars = len(re.findall(r"[*+{]", expression)), expression.count("|")
    choices = (bars + 1.0) ** min(bars, expression.count("("))
    return 50.0 ** min(repetitions, 9) * 2.0 ** min(expression.count("?"), 99) * choices
