"""What fits a device's memory, as tables and as JSON: `python -m attnquant inspect --memory`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from attnquant.errors import SettingsError
from attnquant.memory import MemoryPlan
from attnquant.nvfp4.accounting import format_bytes
from attnquant.nvfp4.report import align


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What fits.

    Attributes:
        plan: the model and how it is served.
        memory: bytes of the device, as far as they are free.
        max_length: tokens of a request.
        batch: requests at once.

    Raises:
        SettingsError: requests that are longer than the model is made for.
    """

    plan: MemoryPlan
    memory: int
    max_length: int
    batch: int

    def __post_init__(self) -> None:
        if self.max_length > self.plan.positions:
            raise SettingsError(
                f"--max-length={self.max_length} is beyond config.json's max_position_embeddings, "
                f"{self.plan.positions}; ask for less"
            )

    @property
    def usable(self) -> int:
        """What MAX may use of the memory."""
        return int(self.memory * self.plan.serving.device_memory_utilization)

    @property
    def parts(self) -> dict[str, dict[str, int]]:
        """Bytes of weights and of activations, by part."""
        weights = self.plan.weights(self.max_length)
        activations = self.plan.activations(self.batch)
        return {
            "weights": asdict(weights) | {"total": weights.total},
            "activations": asdict(activations)
            | {"margin": activations.margin, "total": activations.total},
        }

    @property
    def budget(self) -> int:
        """Bytes that are left for the cache; below 0 if weights and activations do not fit."""
        return self.plan.cache_budget(self.memory, self.max_length, self.batch)

    def render(self) -> list[str]:
        """Lines: a table of bytes, and what follows from it."""
        plan, batch, length = self.plan, self.batch, self.max_length
        rows = [("memory", "bytes")]
        rows += [
            (f"{group}: {name}", format_bytes(size))
            for group, sizes in self.parts.items()
            for name, size in sizes.items()
        ]
        rows += [
            ("left for the cache", format_bytes(self.budget) if self.budget > 0 else "nothing"),
            (f"cache of {batch} x {length} tokens", format_bytes(plan.cache(length, batch))),
        ]
        lines = align(rows)
        for kind, cache in plan.caches.items():
            kept = cache.kept(plan.serving.kv_cache_page_size)
            lines.append(
                f"cache per token, {kind}: {format_bytes(cache.token_bytes)}, "
                + ("all tokens" if kept is None else f"up to {kept} tokens of a request")
            )
        share = plan.serving.device_memory_utilization
        fits = "fits" if plan.fits(self.memory, length, batch) else "does not fit"
        return [
            *lines,
            f"{fits} {format_bytes(self.usable)}, {share:.0%} of {format_bytes(self.memory)}",
            f"longest context at batch {batch}: {plan.longest_context(self.memory, batch)} "
            f"of {plan.positions} tokens",
            f"largest batch at {length} tokens: {plan.largest_batch(self.memory, length)}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values; bytes are whole numbers."""
        plan = self.plan
        return {
            "memory": self.memory,
            "usable": self.usable,
            "max_length": self.max_length,
            "batch": self.batch,
            **self.parts,
            "cache_per_token": {kind: cache.token_bytes for kind, cache in plan.caches.items()},
            "cache": plan.cache(self.max_length, self.batch),
            "cache_budget": self.budget,
            "fits": plan.fits(self.memory, self.max_length, self.batch),
            "longest_context": plan.longest_context(self.memory, self.batch),
            "largest_batch": plan.largest_batch(self.memory, self.max_length),
        }
