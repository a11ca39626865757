"""Rotary position embedding tables, for the half-split ("rotate half") layout.

`freqs_cis[p] = (cos(p·f_0), sin(p·f_0), cos(p·f_1), ...)` with `f_i = theta^(-2i/d) / factor`
(Su et al., arXiv 2104.09864; the factor is linear position scaling).
"""

from __future__ import annotations

from max.graph import TensorValue
from max.nn.rotary_embedding import RotaryEmbedding


class RotaryTable(RotaryEmbedding):
    """MAX's rotary table with linear scaling, tabulated for `max_seq_len` positions and more.

    Args:
        theta: the base period.
        head_dim: elements of one head, all of them rotated.
        max_seq_len: the longest sequence the graph serves.
        factor: linear scaling: position p is rotated like position p / factor.
    """

    def __init__(
        self, *, theta: float, head_dim: int, max_seq_len: int, factor: float = 1.0
    ) -> None:
        super().__init__(
            dim=head_dim,
            n_heads=1,
            theta=theta,
            max_seq_len=max_seq_len,
            head_dim=head_dim,
            interleaved=False,
        )
        self.factor = factor

    def _compute_inv_freqs(self) -> TensorValue:
        return super()._compute_inv_freqs() / self.factor
