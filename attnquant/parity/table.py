"""What `parity` prints."""

from __future__ import annotations

import json
from dataclasses import asdict

from attnquant.nvfp4.report import align
from attnquant.parity.measure import Parity


def render_table(parity: Parity) -> str:
    """A row for each prompt, and what it comes to."""
    rows: list[tuple[str, ...]] = [
        (
            "prompt",
            "tokens",
            "cosine",
            "rel. error",
            "max error",
            "mean KL",
            "max KL",
            "top-1",
            "greedy",
        )
    ]
    for prompt in parity.prompts:
        rows.append(
            (
                prompt.name,
                str(prompt.tokens),
                f"{prompt.cosine:.7f}",
                f"{prompt.relative_error:.1e}",
                f"{prompt.max_error:.1e}",
                f"{prompt.mean_kl:.1e}",
                f"{prompt.max_kl:.1e}",
                f"{prompt.top1:.3f}",
                f"{prompt.greedy}/{prompt.greedy_asked}",
            )
        )
    verdict = "within" if parity.agrees else "beyond"
    return "\n".join(
        [
            f"{parity.model} against transformers' {parity.reference}, float32, CPU; KL in nats",
            "",
            *align(rows),
            "",
            f"worst KL {parity.max_kl:.1e}, {verdict} the limit of {parity.limit:.1e} nats",
        ]
    )


def to_json(parity: Parity) -> str:
    """The same as one JSON object; a figure that is no finite number is null."""
    content = asdict(parity) | {"max_kl": parity.max_kl, "agrees": parity.agrees}
    return json.dumps(_finite(content), indent=2, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
