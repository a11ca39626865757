"""What every decoder's buffer ABI must be."""

from __future__ import annotations

from typing import Any

from max import tree


def assert_is_declared(model: Any, inputs: Any) -> None:
    """A step's buffers are the graph's inputs, one by one, and begin as every decoder's do."""
    declared = model.model.input_metadata
    assert len(inputs.buffers) == len(declared)
    for buffer, spec in zip(inputs.buffers, declared, strict=True):
        assert buffer.dtype == spec.dtype, spec.name
        assert len(buffer.shape) == len(spec.shape), spec.name
    named = tree.leaves(model.batch_processor.input_tree)
    assert len(named) == len(declared)
    # Positions matter: replay refreshes captured buffers by index.
    assert inputs.buffers[0] is inputs.tokens
    assert inputs.buffers[1] is inputs.input_row_offsets
    assert inputs.buffers[2] is inputs.return_n_logits
