"""Which input channels of a projection are loud: what its scale search is weighted by.

The error that a quantized weight makes in its output is `sum_k x_k (W - Q)_k`; where the channels
of x are uncorrelated, its square is on average `sum_k E[x_k^2] (W - Q)_k^2`. So the squares of a
scale search are counted by each channel's mean square, as llama.cpp counts them with its importance
matrix. That one takes text; here it is a forward pass over uniformly random token ids, which nobody
has to collect, and which tells nearly as much: what makes a channel loud is mostly the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from attnquant.errors import CheckpointError, SettingsError
from attnquant.nvfp4.format import E2M1_MAX, E4M3_MAX
from attnquant.settings import QuantScales

SEQUENCE_TOKENS = 512
"""Tokens of a sequence. Its first is left out: attention makes it unlike all others."""

SEED = 20261129
"""Of the random token ids."""

# A channel that random tokens leave silent may speak in text.
_FLOOR = 1e-4

_HEADROOM = 4

# Where a profile was seen to halve what quantizing costs: `bench.quality` prints it.
_MEASURED = ("Gemma3ForCausalLM",)

_SQUARES, _LARGEST = "mean_squares/", "largest/"


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """What went into each fused group of a decoder.

    Attributes:
        mean_squares: float32 `[in]`, of each input channel, by the group's module path
            (`layers.3.self_attn.qkv_proj`).
        largest: the largest magnitude of any input, by the group's module path.
    """

    mean_squares: Mapping[str, NDArray[np.float32]]
    largest: Mapping[str, float]

    def importance(self, module: str) -> NDArray[np.float32]:
        """What a search counts each column's squares by: float32 `[in]`, 1 on average.

        All of them 1 where nothing at all came in. A member of a group that the coverage splits
        (`layers.3.self_attn.qkv_proj.q_proj`) has its group's.
        """
        squares = self.mean_squares[self._group(module)].astype(np.float64)
        mean = squares.mean()
        if not mean > 0:
            return np.ones(squares.shape, np.float32)
        counts: NDArray[np.float32] = np.maximum(squares / mean, _FLOOR).astype(np.float32)
        return counts

    def input_scale(self, module: str) -> float:
        """The global scale of a group's input, for kernels that quantize it to NVFP4 too.

        What random tokens reach takes a quarter of the range of block scales, which leaves text two
        binades above it, and twelve below before E4M3 loses its precision.
        """
        largest = self.largest[self._group(module)]
        return _HEADROOM * largest / (E2M1_MAX * E4M3_MAX) if largest > 0 else 1.0

    def save(self, path: Path) -> None:
        """Writes an npz file."""
        arrays: dict[str, Any] = {
            _SQUARES + name: array for name, array in self.mean_squares.items()
        }
        arrays |= {_LARGEST + name: np.float32(value) for name, value in self.largest.items()}
        with path.open("wb") as file:
            np.savez(file, **arrays)

    def _group(self, module: str) -> str:
        return module if module in self.mean_squares else module.rpartition(".")[0]

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Reads an npz file.

        Raises:
            CheckpointError: it is not one that `save` wrote.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        except (OSError, ValueError, EOFError, KeyError, BadZipFile) as error:
            raise CheckpointError(f"{path}: {error}; remove it, and it is made anew") from error
        return cls(
            mean_squares=_below(_SQUARES, found),
            largest={name: float(value) for name, value in _below(_LARGEST, found).items()},
        )


def chosen_scales(
    asked: QuantScales | None, architecture: str, conflict: str | None = None
) -> QuantScales:
    """How block scales are chosen, where nobody says too: with a profile, if its gain was measured.

    Args:
        asked: what somebody says, if anybody does.
        architecture: of the decoder.
        conflict: why there is no profile, to who asks for one: blocks that layers share have none.

    Raises:
        SettingsError: a profile is asked for, and there is none.
    """
    if conflict is None:
        return asked or ("profile" if architecture in _MEASURED else "mse")
    if asked == "profile":
        raise SettingsError(conflict)
    return asked or "mse"


def search_of(scales: QuantScales) -> Literal["absmax", "mse"]:
    """What an encoder is told: a profile only says how the search for the least error counts."""
    return "absmax" if scales == "absmax" else "mse"


def random_tokens(count: int, vocab: int, seed: int = SEED) -> list[NDArray[np.int64]]:
    """Uniformly random token ids, in sequences of `SEQUENCE_TOKENS` and a rest.

    NumPy promises that `RandomState` never changes what it makes of a seed.
    """
    ids = np.random.RandomState(seed).randint(0, vocab, count, np.int64)
    return np.split(ids, range(SEQUENCE_TOKENS, count, SEQUENCE_TOKENS))


def _below(
    prefix: str, arrays: Mapping[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
