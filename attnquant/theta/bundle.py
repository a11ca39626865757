"""The theta bundle: a shared block, a scale per row, and a low-rank correction.

A bundle stands for the weight `W_eff = s·W0 + U·Vᵀ`, where s scales rows. The layers of a block
group hold the same array as their `W0`, so that sharing is a matter of identity: what counts or
writes bundles asks `a.w0 is b.w0`, and no second table can disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class ThetaBundle:
    """One projection. Shapes and dtypes are checked on construction.

    Attributes:
        w0: the shared block, `[out, in]`, of any float dtype; at passthrough the checkpoint's own
            array.
        s: the scale of each row, float32 `[out]`; None at passthrough, where it would be all ones.
        u: the correction's left factor, `[out, rank]`, of w0's dtype; rank 0 is no correction.
        v: its right factor, `[in, rank]`, of w0's dtype.

    Raises:
        ValueError: the parts do not fit together; names the part, what it is and what fits.
    """

    w0: NDArray[Any]
    s: NDArray[np.float32] | None
    u: NDArray[Any]
    v: NDArray[Any]

    def __post_init__(self) -> None:
        if self.w0.ndim != 2:
            raise ValueError(f"theta bundle: w0 has shape {self.w0.shape}, expected [out, in]")
        rows, columns = self.w0.shape
        rank = self.u.shape[-1] if self.u.ndim == 2 else 0
        expected: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            "u": ((rows, rank), self.w0.dtype),
            "v": ((columns, rank), self.w0.dtype),
        }
        if self.s is None and rank:
            raise ValueError(f"theta bundle: s is missing, expected [{rows}] beside rank {rank}")
        if self.s is not None:
            expected["s"] = ((rows,), np.dtype(np.float32))
        for name, (shape, dtype) in expected.items():
            part: NDArray[Any] = getattr(self, name)
            if part.shape != shape or part.dtype != dtype:
                raise ValueError(
                    f"theta bundle: {name} is {part.dtype} {list(part.shape)}, "
                    f"expected {dtype} {list(shape)} beside w0 {self.w0.dtype} {[rows, columns]}"
                )

    @classmethod
    def passthrough(cls, weight: NDArray[Any]) -> ThetaBundle:
        """The bundle that is the weight itself: holds this very array, neither copied nor read."""
        rows, columns = weight.shape
        return cls(
            w0=weight,
            s=None,
            u=np.empty((rows, 0), weight.dtype),
            v=np.empty((columns, 0), weight.dtype),
        )

    @property
    def is_passthrough(self) -> bool:
        """Whether the effective weight is `w0`, bit for bit."""
        return self.s is None

    @property
    def rank(self) -> int:
        """Columns of `u` and of `v`."""
        return int(self.u.shape[1])


def stored_bytes(bundles: Iterable[ThetaBundle]) -> int:
    """Bytes that the bundles hold together, a shared block counted once."""
    sizes: dict[int, int] = {}
    for bundle in bundles:
        own = () if bundle.s is None else (bundle.s, bundle.u, bundle.v)
        sizes |= {id(part): part.nbytes for part in (bundle.w0, *own)}
    return sum(sizes.values())
