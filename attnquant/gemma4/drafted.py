"""Gemma 4 with its drafter in one graph: verify what was drafted, choose, and draft again.

MAX's `SequentialDriver` owns the loop, and its pipeline the drafted tokens between two steps. Here
is what a pair contributes: how the target and the drafter are called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from max import tree
from max.driver import Buffer
from max.graph import BufferType, Graph, TensorType, TensorValue, Type, Value, ops
from max.graph import Module as GraphModule
from max.graph.weights import load_weights
from max.nn.kv_cache import KVCacheInputs, KVCacheParamInterface, PagedCacheValues
from max.nn.transformer import ReturnHiddenStates, ReturnLogits
from max.pipelines.lib import UnifiedSpecDecodeInputs
from max.pipelines.lib.graph_specs import GraphRole
from max.pipelines.lib.interfaces.batch_processor import UnifiedSpecDecodeBatchProcessor
from max.pipelines.lib.pipeline_variants.unified_spec_decode_model import (
    _UnifiedSpecDecodeModelMixin,
)
from max.pipelines.modeling.config_enums import supported_encoding_dtype
from max.pipelines.speculative.config import SpeculativeConfig
from max.pipelines.speculative.driver import (
    CarryDimNames,
    DecodeKVSwap,
    DraftCache,
    DraftStepInput,
    Proposed,
    ReuseSpec,
    SequentialBatch,
    SequentialDriver,
)
from max.pipelines.speculative.spec_input_types import SpecDecodeInputTypeSpec
from max.pipelines.speculative.spec_target import Verified
from typing_extensions import override

from attnquant.gemma4.drafter import DRAFT, Drafter, DrafterConfig, drafter_weights
from attnquant.gemma4.gemma4 import build_gemma4
from attnquant.gemma4.model import Gemma4Model
from attnquant.gemma4.model_config import Gemma4Config
from attnquant.nn import RaggedDecoder
from attnquant.nn.config import graph_encoding
from attnquant.nn.decoder import EMBEDDINGS_DTYPE
from attnquant.nn.tensors import State

TARGET = "target."
"""What stands before the names of the target's weights."""

# The driver counts the tokens of one cache, and passes the others on.
_COUNTED, _PASSED = "full_attention", "sliding_attention"


def _caches(batch: SequentialBatch) -> dict[str, PagedCacheValues]:
    return {_COUNTED: batch.draft_kv_collections[0], _PASSED: batch.passthrough_kv[_PASSED][0]}


class Target:
    """How the driver calls the target."""

    def __init__(self, target: RaggedDecoder) -> None:
        self.target = target

    def verify(self, batch: SequentialBatch) -> Verified[TensorValue]:
        """Logits of the last tokens of each sequence, those drafted for it among them, and all
        tokens' hidden states."""
        outputs = self.target(
            batch.merged_tokens,
            batch.merged_offsets,
            batch.return_n_logits,
            {_COUNTED: batch.kv_collections, _PASSED: batch.passthrough_kv[_PASSED]},
            batch.vision_embeddings[0],
            batch.vision_scatter_indices[0],
        )
        return Verified(logits=outputs[1], hidden=outputs[3])

    def ep_input_types(self) -> Sequence[TensorType | BufferType]:
        """None: one device."""
        return ()


class Proposer:
    """How the driver calls the drafter: it writes no cache, and guesses on from where it stands."""

    decode_swaps: tuple[DecodeKVSwap, ...] = (
        DecodeKVSwap.MAX_PROMPT_LENGTH_ONE,
        DecodeKVSwap.DRAFT_ATTENTION_DISPATCH_METADATA,
    )
    passthrough_decode_swaps: tuple[str, ...] = (_PASSED,)
    draft_cache = DraftCache.TARGET
    reuse: ReuseSpec | None = None
    split_prefix = "mtp"
    carry_dim_names = CarryDimNames()
    step_hidden_mode = ReturnHiddenStates.ALL
    uses_thinking_phase = True
    supports_zero_draft_rows = False

    def __init__(self, draft: Drafter, hidden_dim: int) -> None:
        self.draft = draft
        self.hidden_dim = hidden_dim

    def prefill(
        self, batch: SequentialBatch, tokens: TensorValue, target_hidden: TensorValue
    ) -> Proposed:
        """The first guess, after every token that the target has just seen."""
        offsets = batch.merged_offsets
        x = self.draft(
            tokens,
            target_hidden.rebind([tokens.shape[0], self.hidden_dim]),
            _caches(batch),
            offsets,
        )
        return Proposed(
            logits=self.draft.last_logits(x, offsets, batch.return_n_logits),
            hidden=[self.draft.post_projection(x)],
        )

    def step(self, batch: SequentialBatch, draft_input: DraftStepInput, index: int) -> Proposed:
        """Each further guess. The last accepted token's key is the last one that all of them see:
        nothing was stored for guesses, and what was for rejected ones lies behind it."""
        (lengths,) = batch.draft_cache_lengths
        before = lengths - ops.constant(1, lengths.dtype, device=lengths.device)
        caches = {
            kind: replace(kv, cache_lengths=before.rebind(kv.cache_lengths.shape))
            for kind, kv in _caches(batch).items()
        }
        x = self.draft(
            draft_input.tokens, draft_input.hidden[0], caches, batch.query_offsets_per_dev[0]
        )
        return Proposed(logits=self.draft.logits(x), hidden=[self.draft.post_projection(x)])


class DraftedGemma4(SequentialDriver[TensorValue]):
    """The graph of a target and its drafter.

    Args:
        config: the target's; returns variable logits and all hidden states.
        drafter: the drafter's.
        weights: the target's loaded tensors, as `build_gemma4` takes them.
        speculative: how many tokens are drafted, and how they are accepted.
        constrained: the graph takes a bitmask of the tokens that a grammar allows.
    """

    target: RaggedDecoder
    draft: Drafter

    def __init__(
        self,
        config: Gemma4Config,
        drafter: DrafterConfig,
        weights: State,
        *,
        speculative: SpeculativeConfig,
        constrained: bool = False,
    ) -> None:
        target = build_gemma4(config, weights)
        target.prefix = TARGET
        draft = Drafter(drafter, config, target)
        hidden = config.shapes.hidden
        super().__init__(
            Target(target),
            Proposer(draft, hidden),
            target_model=target,
            draft_model=draft,
            input_spec=SpecDecodeInputTypeSpec(
                devices=config.devices,
                distributed=False,
                enable_vision=True,
                vision_hidden_size=hidden,
            ),
            speculative_config=speculative,
            enable_structured_output=constrained,
            use_greedy_acceptance=speculative.use_greedy_acceptance,
            vocab_size=config.shapes.vocab,
        )
        self._kv_params = config.kv_params

    @property
    @override
    def signature_kv_params(self) -> KVCacheParamInterface:
        """The target's caches, which the drafter reads too."""
        return self._kv_params

    @override
    def input_types(
        self, kv_params: KVCacheParamInterface | None = None
    ) -> tuple[TensorType | BufferType, ...]:
        """MAX's, with images' embeddings of the dtype that every Gemma 4 graph here takes."""
        tokens, embeddings, *others = super().input_types(kv_params)
        assert isinstance(embeddings, TensorType)
        embeddings = TensorType(EMBEDDINGS_DTYPE, embeddings.shape, embeddings.device)
        return (tokens, embeddings, *others)

    def input_tree(self) -> OrderedDict[str, object]:
        """The graph's inputs: its leaves, in order, are the buffer ABI."""
        return OrderedDict(inputs=list(self.input_types()))

    @property
    def calls_kernels(self) -> bool:
        """As the target's."""
        return self.target.calls_kernels

    def bind(self, weights: State) -> None:
        """Binds the target's weights and, with `draft.` before their names, the drafter's."""
        own = {name: weight for name, weight in weights.items() if not name.startswith(DRAFT)}
        bound = {TARGET + name: weight for name, weight in self.target.bound(own).items()}
        drafters = {name: weight for name, weight in weights.items() if name.startswith(DRAFT)}
        # Tensors in a checkpoint file are aligned to their element size at most.
        self.load_state_dict(bound | drafters, weight_alignment=1)

    @override
    def trace(
        self,
        *input_types: Type[Any],
        name: str | None = None,
        module: GraphModule | None = None,
        custom_extensions: Iterable[Path] = (),
        is_device_graph: bool = False,
    ) -> Graph:
        """Traces one step, whose inputs are `input_types`."""

        def forward(*values: Value[Any]) -> tuple[TensorValue, ...]:
            inputs = self.decode_inputs(values)
            outputs: tuple[TensorValue, ...] = self(
                inputs.tokens,
                inputs.input_row_offsets,
                inputs.draft_tokens,
                kv_collections=inputs.kv(_COUNTED),
                draft_kv_collections=inputs.kv(_COUNTED),
                passthrough_kv={_PASSED: inputs.kv(_PASSED)},
                return_n_logits=inputs.return_n_logits,
                vision_embeddings=inputs.vision_embeddings,
                vision_scatter_indices=inputs.vision_scatter_indices,
                draft_probs_full=inputs.draft_probs_full,
                seed=inputs.seed,
                temperature=inputs.temperature,
                top_k=inputs.top_k,
                max_k=inputs.max_k,
                top_p=inputs.top_p,
                min_top_p=inputs.min_top_p,
                in_thinking_phase=inputs.in_thinking_phase,
                pinned_bitmask=inputs.pinned_bitmask,
                wait_payload=inputs.wait_payload,
                device_bitmask_scratch=inputs.device_bitmask_scratch,
            )
            return outputs

        return Graph(
            name or type(self).__qualname__,
            forward,
            input_types=input_types,
            custom_extensions=list(custom_extensions),
            module=module,
            is_device_graph=is_device_graph,
        )


@dataclass
class DraftedInputs(UnifiedSpecDecodeInputs):
    """One step's inputs; MAX's pipeline adds the drafted tokens and what sampling takes.

    Attributes:
        tokens: int64 `[total_seq_len]`, on the device, without drafted ones.
        input_row_offsets: uint32 `[batch + 1]`, on the device.
        return_n_logits: int64 `[1]`, on the host: one more than are drafted.
    """

    tokens: Buffer
    input_row_offsets: Buffer
    return_n_logits: Buffer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffer ABI: `DraftedGemma4.input_types`, in order."""
        return (
            self.tokens,
            *self.vision_embeddings,
            *self.vision_scatter_indices,
            self.input_row_offsets,
            self.return_n_logits,
            *tree.leaves(self.kv_cache_inputs),
            *self._spec_decode_tail_buffers(include_in_thinking_phase=True),
        )


class DraftedGemma4BatchProcessor(UnifiedSpecDecodeBatchProcessor[DraftedInputs, Gemma4Config]):
    """Ragged batches for one device."""

    def _make_inputs(
        self,
        *,
        tokens: Buffer,
        input_row_offsets: Buffer,
        return_n_logits: Buffer,
        kv_cache_inputs: KVCacheInputs[Buffer, Buffer] | None,
        seed: Buffer,
        structured_output: bool,
    ) -> DraftedInputs:
        return DraftedInputs(
            tokens=tokens,
            input_row_offsets=input_row_offsets,
            return_n_logits=return_n_logits,
            kv_cache_inputs=kv_cache_inputs,
            seed=seed,
            structured_output=structured_output,
        )


class DraftedGemma4Model(_UnifiedSpecDecodeModelMixin, Gemma4Model):
    """Gemma 4 and its drafter on one device."""

    batch_processor_cls: ClassVar[type[Any]] = DraftedGemma4BatchProcessor
    graph_name: ClassVar[str] = "gemma4_with_drafter"
    graph_role: ClassVar[GraphRole] = GraphRole.SPEC_DECODER

    @override
    def _load_state_dict(self) -> dict[str, Any]:
        weights = super()._load_state_dict()
        self._drafter = DrafterConfig.initialize(self.pipeline_config)
        draft, target = self.pipeline_config.draft_model, self.pipeline_config.model
        assert draft is not None
        tensors: Mapping[str, Any] = dict(load_weights(draft.resolved_weight_paths()).items())
        dtype = supported_encoding_dtype(graph_encoding(target))
        drafters = drafter_weights(tensors, self._drafter.shapes, dtype)
        weights |= {DRAFT + name: weight for name, weight in drafters.items()}
        return weights

    @override
    def _create_model_config(self, state_dict: dict[str, Any]) -> Gemma4Config:
        config = super()._create_model_config(state_dict)
        config.return_logits = ReturnLogits.VARIABLE
        config.return_hidden_states = ReturnHiddenStates.ALL_NORMALIZED
        return config

    def build(self, config: Gemma4Config, weights: State) -> DraftedGemma4:
        """Builds the graph; see `DraftedGemma4`."""
        speculative = self.pipeline_config.speculative
        assert speculative is not None
        return DraftedGemma4(
            config,
            self._drafter,
            weights,
            speculative=speculative,
            constrained=self.pipeline_config.needs_bitmask_constraints,
        )

    @property
    @override
    def sampled_draft_vocab_size(self) -> int | None:
        """The vocabulary that drafts are drawn from; None if the likeliest token is taken.

        MAX reads it off the compiled graph, which tells nothing where it was compiled for a device
        that is elsewhere (`max warm-cache --target`).
        """
        speculative = self.pipeline_config.speculative
        assert speculative is not None
        return self.config.shapes.vocab if speculative.draft_proposal == "sampled" else None
