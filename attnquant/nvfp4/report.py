"""What quantizing a checkpoint did, for the table that is printed once it is loaded.

One record a projection. The relative error is `|W - decode(Q)| / |W|`, measured while the
projection is in memory anyway. Bytes per token are those of `attnquant.nvfp4.accounting`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from attnquant.nvfp4.accounting import format_bytes
from attnquant.projections import ROLES, ProjectionKey


@dataclass(frozen=True, kw_only=True)
class ProjectionRecord:
    """What became of one projection.

    Attributes:
        key: which one.
        shape: `(out, in)`.
        relative_error: L2 error relative to the weight; None if it was left as it is, or came
            quantized from the file.
        left: why it was left as it is; None if it is in NVFP4.
    """

    key: ProjectionKey
    shape: tuple[int, int]
    relative_error: float | None = None
    left: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What quantizing at load did.

    Attributes:
        records: one a projection.
        before: bytes per token of the unquantized model.
        after: bytes per token of the model as loaded.
        scales: how block scales of what was encoded were chosen, as the setting names it.
        seconds: from the first projection to the last, wall clock.
        kept: the packed weights were kept by an earlier start, and none was encoded.
    """

    records: Sequence[ProjectionRecord]
    before: int
    after: int
    scales: str
    seconds: float
    kept: bool = False

    @property
    def mean_error(self) -> float | None:
        """Mean relative error over the projections that were encoded; None if none was."""
        errors = [record.relative_error for record in self._encoded]
        return sum(error for error in errors if error is not None) / len(errors) if errors else None

    @property
    def worst(self) -> ProjectionRecord | None:
        """The encoded projection with the largest relative error; None if none was encoded."""
        return max(self._encoded, key=lambda record: record.relative_error or 0.0, default=None)

    @property
    def _encoded(self) -> list[ProjectionRecord]:
        return [record for record in self.records if record.relative_error is not None]

    def render(self) -> str:
        """The table, without a trailing newline."""
        rows: list[tuple[str, ...]] = [("projection", "nvfp4", "left", "mean error", "worst error")]
        for role in ROLES:
            records = [record for record in self.records if record.key.role == role]
            if records:
                rows.append(_row(role, records))
        rows.append(_row("all", self.records))
        lines = align(rows)
        reasons = Counter(record.left for record in self.records if record.left is not None)
        lines += [f"left: {count} {reason}" for reason, count in sorted(reasons.items())]
        if (worst := self.worst) is not None:
            lines.append(f"worst: {worst.key.module} {worst.relative_error:.4f}")
        before, after = format_bytes(self.before), format_bytes(self.after)
        ratio = self.before / self.after
        scales = self.scales if self._encoded else "the checkpoint's"
        lines.append(
            f"bytes per token: {before} before, {after} after ({ratio:.2f}x); "
            f"scales: {scales}; {self.seconds:.1f} s"
            + ("; packed by an earlier start" if self.kept else "")
        )
        return "\n".join(lines)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(label: str, records: Sequence[ProjectionRecord]) -> tuple[str, ...]:
    errors = [record.relative_error for record in records if record.relative_error is not None]
    left = sum(record.left is not None for record in records)
    mean, worst = (f"{sum(errors) / len(errors):.4f}", f"{max(errors):.4f}") if errors else ("", "")
    return label, str(len(records) - left), str(left), mean, worst
