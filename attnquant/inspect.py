"""What attnquant would make of a model, from its config.json alone: `python -m attnquant inspect`.

No weight is read or fetched: shapes, coverage and bytes follow from the config. The source is a
directory, a config.json, or a Hugging Face id, of which only config.json and, where there is one,
hf_quant_config.json are downloaded.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnquant.checkpoint.checkpoint import HUB_ID
from attnquant.checkpoint.hub import hub_json
from attnquant.checkpoint.json_file import read_json_object
from attnquant.decoder_shapes import DecoderShapes, text_config
from attnquant.errors import CheckpointError
from attnquant.memory import MemoryPlan, Serving
from attnquant.memory_report import MemoryReport
from attnquant.nvfp4.accounting import TokenBytes, format_bytes, token_bytes
from attnquant.nvfp4.coverage import Coverage, declared_ignore
from attnquant.nvfp4.report import align
from attnquant.projections import ROLES
from attnquant.settings import Quant

CONFIG = "config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"


@dataclass(frozen=True, kw_only=True)
class InspectReport:
    """What attnquant would make of a model.

    Attributes:
        source: as the user named it.
        shapes: of the decoder.
        coverage: what would be quantized, or is, if the checkpoint is in NVFP4.
        is_nvfp4: the checkpoint is in NVFP4 already; its bits and its coverage are kept.
        before: bytes per token, all in bfloat16.
        after: bytes per token under the coverage.
        self_attn_ignored: bytes per token with only the MLP in NVFP4.
        memory: what fits a device, if that was asked.
    """

    source: str
    shapes: DecoderShapes
    coverage: Coverage
    is_nvfp4: bool
    before: TokenBytes
    after: TokenBytes
    self_attn_ignored: TokenBytes
    memory: MemoryReport | None = None


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a model is to be served on, and how.

    Attributes:
        memory: bytes that are free.
        max_length: tokens of a request; the model's `max_position_embeddings` if None.
        batch: requests at once.
        serving: everything else.
    """

    memory: int
    max_length: int | None = None
    batch: int = 1
    serving: Serving = dataclasses.field(default_factory=Serving)


def inspect(
    source: str | Path,
    *,
    quant: Quant = "nvfp4",
    ignore: Sequence[str] = (),
    quant_lm_head: Quant = "none",
    device: Device | None = None,
) -> InspectReport:
    """Reads a model's config.

    Args:
        source: a checkpoint's directory, a config.json, or a Hugging Face id.
        quant: as `ATTNQUANT_QUANT`.
        ignore: as `ATTNQUANT_QUANT_IGNORE`.
        quant_lm_head: as `ATTNQUANT_QUANT_LM_HEAD`.
        device: what the model is to fit.

    Raises:
        CheckpointError: there is no such model, or its config cannot be used.
        UnsupportedError: attnquant does not serve this architecture or quantization.
        SettingsError: a pattern matches nothing, or a request is longer than the model allows.
    """
    config, hf_quant_config = _configs(source)
    shapes = DecoderShapes.from_config(config)
    projections = shapes.projections
    declared = declared_ignore(config, hf_quant_config)
    head = shapes.head if quant_lm_head == "nvfp4" else None
    if declared is not None:
        own_head = None if shapes.tied else shapes.head
        coverage = Coverage.of(projections, ignore=declared, head=own_head, source=None)
        if head is not None:
            coverage = dataclasses.replace(coverage, lm_head=True)
    elif quant == "nvfp4":
        coverage = Coverage.of(projections, ignore=ignore, head=head, source="--ignore")
    else:
        coverage = Coverage.none(projections)
    return InspectReport(
        source=str(source),
        shapes=shapes,
        coverage=coverage,
        is_nvfp4=declared is not None,
        before=token_bytes(shapes),
        after=token_bytes(shapes, coverage),
        self_attn_ignored=token_bytes(shapes, Coverage.of(projections, ignore=("self_attn",))),
        memory=None if device is None else _memory(config, coverage, device),
    )


def render(report: InspectReport) -> str:
    """The report as tables, without a trailing newline."""
    shapes, coverage, after = report.shapes, report.coverage, report.after
    roles = [("projection", "nvfp4", "left")]
    for role, (quantized, left) in _by_role(report).items():
        roles.append((role, str(quantized), str(left)))
    total = len(coverage.quantized)
    roles.append(("all", str(total), str(len(coverage.reasons) - total)))
    sizes = [("bytes per token", "bf16", "as served", "ratio")]
    for field in dataclasses.fields(TokenBytes):
        sizes.append(
            _sizes(field.name, getattr(report.before, field.name), getattr(after, field.name))
        )
    sizes.append(_sizes("total", report.before.total, after.total))
    lines = [
        f"{report.source}: {shapes.architecture}, {len(shapes.layers)} layers, hidden "
        f"{shapes.hidden}, vocabulary {shapes.vocab}, {'tied' if shapes.tied else 'untied'} head"
    ]
    if report.is_nvfp4:
        lines.append("This checkpoint is in NVFP4 already: its bits and its coverage are kept.")
    lines += ["", *align(roles)]
    lines += [f"left: {count} {reason}" for reason, count in _reasons(coverage)]
    lines += ["", *align(sizes)]
    if total:
        ignored = report.self_attn_ignored.total
        lines.append(
            f"with self_attn ignored: {format_bytes(ignored)}, {ignored / after.total:.2f}x of this"
        )
    if report.memory is not None:
        lines += ["", *report.memory.render()]
    return "\n".join(lines)


def to_json(report: InspectReport) -> str:
    """The report as one JSON object; bytes are whole numbers, ratios are not rounded."""
    shapes, coverage = report.shapes, report.coverage
    total = len(coverage.quantized)
    return json.dumps(
        {
            "model": report.source,
            "architecture": shapes.architecture,
            "layers": len(shapes.layers),
            "hidden": shapes.hidden,
            "vocab": shapes.vocab,
            "tied": shapes.tied,
            "is_nvfp4": report.is_nvfp4,
            "quantized": total,
            "left": len(coverage.reasons) - total,
            "lm_head": coverage.lm_head,
            "roles": {
                role: {"quantized": quantized, "left": left}
                for role, (quantized, left) in _by_role(report).items()
            },
            "left_because": dict(_reasons(coverage)),
            "bytes_per_token": {
                "before": _part_sizes(report.before),
                "after": _part_sizes(report.after),
                "self_attn_ignored": _part_sizes(report.self_attn_ignored),
            },
            "ratio": report.before.total / report.after.total,
            "ratio_to_self_attn_ignored": report.self_attn_ignored.total / report.after.total,
        }
        | ({} if report.memory is None else {"memory": report.memory.to_dict()}),
        indent=2,
    )


def _memory(config: Mapping[str, Any], coverage: Coverage, device: Device) -> MemoryReport:
    text = text_config(config)
    stored = config.get("dtype") or text.get("dtype") or text.get("torch_dtype") or "bfloat16"
    plan = MemoryPlan.from_config(
        config, coverage, parts_bound=stored == "bfloat16", serving=device.serving
    )
    return MemoryReport(
        plan=plan,
        memory=device.memory,
        max_length=device.max_length or plan.positions,
        batch=device.batch,
    )


def _by_role(report: InspectReport) -> dict[str, tuple[int, int]]:
    """Quantized and left projections of each role that the decoder has."""
    counts: dict[str, tuple[int, int]] = {}
    for role in ROLES:
        reasons = [reason for key, reason in report.coverage.reasons.items() if key.role == role]
        if reasons:
            quantized = reasons.count(None)
            counts[role] = quantized, len(reasons) - quantized
    return counts


def _reasons(coverage: Coverage) -> list[tuple[str, int]]:
    return sorted(Counter(reason for reason in coverage.reasons.values() if reason).items())


def _part_sizes(sizes: TokenBytes) -> dict[str, int]:
    return dataclasses.asdict(sizes) | {"total": sizes.total}


def _sizes(label: str, before: int, after: int) -> tuple[str, str, str, str]:
    return label, format_bytes(before), format_bytes(after), f"{before / after:.2f}x"


def _configs(source: str | Path) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """config.json and, where there is one, hf_quant_config.json."""
    path = Path(source)
    if path.is_file():
        return read_json_object(path), None
    if path.is_dir():
        quant = path / HF_QUANT_CONFIG
        config = read_json_object(path / CONFIG)
        return config, read_json_object(quant) if quant.is_file() else None
    if isinstance(source, Path) or not HUB_ID.fullmatch(source):
        raise CheckpointError(
            f"{source}: found no such file or directory, expected a checkpoint's directory, a "
            "config.json, or a Hugging Face id such as google/gemma-3-270m"
        )
    fetched, quant_config = hub_json(source, CONFIG, HF_QUANT_CONFIG)
    if fetched is None:
        raise CheckpointError(
            f"{source}: found a Hugging Face model without {CONFIG}; name a checkpoint"
        )
    return fetched, quant_config
