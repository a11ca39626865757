"""Our logits against transformers': `python -m attnquant parity`."""

from attnquant.parity.measure import Parity, PromptParity, measure
from attnquant.parity.table import render_table, to_json

__all__ = ["Parity", "PromptParity", "measure", "render_table", "to_json"]
