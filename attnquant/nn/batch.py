"""Batches contexts into `DecoderInputs`, whose `buffers` are the graph's inputs in order."""

from __future__ import annotations

from dataclasses import dataclass

from max import tree
from max.driver import Buffer
from max.nn.kv_cache import KVCacheInputs
from max.pipelines.context import TextContext
from max.pipelines.lib.interfaces import ModelInputs
from max.pipelines.lib.interfaces.batch_processor import SingleReplicaRaggedBatchProcessor


@dataclass
class DecoderInputs(ModelInputs):
    """One step's inputs.

    Attributes:
        tokens: int64 `[total_seq_len]`, on the device.
        input_row_offsets: uint32 `[batch + 1]`, on the device.
        return_n_logits: int64 `[1]`, on the host.
    """

    tokens: Buffer
    input_row_offsets: Buffer
    return_n_logits: Buffer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffer ABI: `RaggedDecoder.input_tree`'s leaves, in order.

        Device graph capture records the graph against these buffers and refreshes them by position
        before each replay. MAX sets the two vision fields of a model that encodes images on every
        batch, to no rows where there is no image, and leaves them empty for every other model.
        """
        return (
            self.tokens,
            self.input_row_offsets,
            self.return_n_logits,
            *self.vision_embeddings,
            *self.vision_scatter_indices,
            *tree.leaves(self.kv_cache_inputs),
        )


class DecoderBatchProcessor(SingleReplicaRaggedBatchProcessor[TextContext, DecoderInputs]):
    """Ragged batches for one device."""

    def _make_inputs(
        self,
        *,
        tokens: Buffer,
        input_row_offsets: Buffer,
        return_n_logits: Buffer,
        kv_cache_inputs: KVCacheInputs[Buffer, Buffer] | None,
        signal_buffers: list[Buffer],
    ) -> DecoderInputs:
        del signal_buffers  # One device exchanges no signals.
        return DecoderInputs(
            tokens=tokens,
            input_row_offsets=input_row_offsets,
            return_n_logits=return_n_logits,
            kv_cache_inputs=kv_cache_inputs,
        )
