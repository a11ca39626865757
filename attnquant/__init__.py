"""attnquant: Gemma 3 and Gemma 4 for MAX, every projection a theta bundle, in bf16 or NVFP4.

`max serve --custom-architectures attnquant` imports this module and registers `ARCHITECTURES`,
which is resolved on first access so that importing attnquant stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from max.pipelines.lib import Speculator, SupportedArchitecture

    ARCHITECTURES: list[SupportedArchitecture | Speculator]

__version__ = "0.1.0"
__all__ = ["ARCHITECTURES", "SERVED", "__version__"]

SERVED: tuple[str, ...] = (
    "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Qwen3ForCausalLM",
)
"""The names of the architectures, for who must not import MAX to know them."""


def __getattr__(name: str) -> Any:
    if name == "ARCHITECTURES":
        from attnquant.gemma3.arch import gemma3_arch
        from attnquant.gemma4.arch import gemma4_arch, gemma4_speculator, gemma4_unified_arch
        from attnquant.qwen3.arch import qwen3_arch

        return [gemma3_arch, gemma4_arch, gemma4_unified_arch, gemma4_speculator, qwen3_arch]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
