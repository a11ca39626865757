"""A target and its drafter in one graph on the CPU, and steps driven by hand.

MAX's pipeline for speculative decoding takes no CPU, so this stands in for it: it claims cache,
brings the tokens that were drafted, and commits those that were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import CPU, Buffer
from max.engine import InferenceSession
from max.graph import Graph
from max.graph.weights import load_weights
from max.nn.transformer import ReturnHiddenStates, ReturnLogits
from max.pipelines import PipelineConfig
from max.pipelines.architectures.gemma4.context import Gemma4Context
from max.pipelines.context.tokens import TokenBuffer
from max.pipelines.kv_cache.registry import load_kv_manager
from max.pipelines.speculative.config import SpeculativeConfig
from numpy.typing import NDArray
from transformers import AutoConfig

from attnquant.gemma4.batch_processor import Gemma4Inputs
from attnquant.gemma4.drafted import DraftedGemma4, DraftedInputs
from attnquant.gemma4.drafter import DRAFT, DrafterConfig, drafter_weights
from attnquant.gemma4.model_config import Gemma4Config
from attnquant.gemma4.weight_adapters import VISION, convert_safetensors
from attnquant.kernels import extensions
from attnquant.nn.decoder import EMBEDDINGS_DTYPE
from attnquant.nn.loaded import pipeline_config
from tests.models import MAX_LENGTH

DRAFTED = 3
BATCH = 4
_CACHE_BYTES = 1 << 30


def tensors_of(directory: Path) -> dict[str, Any]:
    """A checkpoint's tensors, as MAX reads them."""
    return dict(load_weights(sorted(directory.glob("*.safetensors"))).items())


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and its drafter, their weights bound, for the CPU in float32.

    Attributes:
        graph: the module that holds both.
        config: the target's.
        pipeline: MAX's, of the target, and its speculative part.
    """

    graph: DraftedGemma4
    config: Gemma4Config
    pipeline: PipelineConfig

    @classmethod
    def load(cls, target: Path, drafter: Path) -> Pair:
        """Loads two checkpoints; attnquant's settings come from the environment."""
        pipeline = pipeline_config(target, max_length=MAX_LENGTH, max_batch_size=BATCH)
        speculative = SpeculativeConfig(speculative_method="mtp", num_speculative_tokens=DRAFTED)
        pipeline = pipeline.model_copy(update={"speculative": speculative})
        config = Gemma4Config.initialize(pipeline, max_seq_len=MAX_LENGTH)
        config.return_logits = ReturnLogits.VARIABLE
        config.return_hidden_states = ReturnHiddenStates.ALL_NORMALIZED
        huggingface = pipeline.model.huggingface_config
        own = DrafterConfig.from_huggingface(AutoConfig.from_pretrained(drafter), huggingface)
        weights = convert_safetensors(
            tensors_of(target), huggingface_config=huggingface, pipeline_config=pipeline
        )
        weights = {name: w for name, w in weights.items() if not name.startswith(VISION)}
        drafters = drafter_weights(tensors_of(drafter), own.shapes, config.dtype)
        weights |= {DRAFT + name: weight for name, weight in drafters.items()}
        graph = DraftedGemma4(config, own, weights, speculative=speculative)
        graph.bind(weights)
        return cls(graph=graph, config=config, pipeline=pipeline)

    def trace(self) -> Graph:
        """What is compiled."""
        kernels = [extensions()] if self.graph.calls_kernels else []
        return self.graph.trace(*self.graph.input_types(), custom_extensions=kernels)


class Drafting:
    """The graph, compiled.

    Args:
        target: the target's checkpoint.
        drafter: the drafter's.
    """

    def __init__(self, target: Path, drafter: Path) -> None:
        pair = Pair.load(target, drafter)
        config, pipeline = pair.config, pair.pipeline
        session = InferenceSession(devices=[CPU()])
        self.model = session.load(
            pair.trace(), weights_registry=pair.graph.state_dict(auto_initialize=False)
        )
        self.hidden = config.shapes.hidden
        self._kv = load_kv_manager(
            params=config.kv_params,
            max_batch_size=BATCH,
            max_seq_len=MAX_LENGTH,
            session=session,
            available_cache_memory=_CACHE_BYTES,
            is_di_enabled=False,
            model_name=pipeline.model.model_name,
            max_num_input_tokens=None,
        )

    def context(self, tokens: Sequence[int]) -> Gemma4Context:
        """A request of text, or with places for images that `step` brings."""
        prompt = np.array(tokens, np.int64)
        context = Gemma4Context(
            max_length=MAX_LENGTH,
            tokens=TokenBuffer(prompt),
            mm_token_type_ids=np.zeros_like(prompt),
            pixel_position_ids=[],
            images=[],
            vision_token_ids=[],
        )
        self._kv.claim(context, replica_idx=0)
        return context

    def inputs(
        self, contexts: Sequence[Gemma4Context], images: Gemma4Inputs | None = None
    ) -> DraftedInputs:
        """What the next step of these requests is executed with; all verify as many tokens.

        `images` are the inputs of the same requests for the target alone.
        """
        for context in contexts:
            self._kv.alloc(context).synchronize()
        drafts = [context.spec_decoding_state.draft_tokens_to_verify for context in contexts]
        rows, width = len(contexts), len(drafts[0])
        lengths = [0, *(context.tokens.active_length for context in contexts)]
        return DraftedInputs(
            tokens=Buffer.from_numpy(np.concatenate([c.tokens.active for c in contexts])),
            input_row_offsets=Buffer.from_numpy(np.cumsum(lengths, dtype=np.uint32)),
            return_n_logits=Buffer.from_numpy(np.array([width + 1], np.int64)),
            kv_cache_inputs=self._kv.runtime_inputs([list(contexts)]),
            vision_embeddings=images.vision_embeddings
            if images
            else [Buffer.zeros((0, self.hidden), EMBEDDINGS_DTYPE)],
            vision_scatter_indices=images.vision_scatter_indices
            if images
            else [Buffer.from_numpy(np.zeros(0, np.int32))],
            draft_tokens=Buffer.from_numpy(np.array(drafts, np.int64).reshape(rows, width)),
            seed=Buffer.from_numpy(np.arange(rows, dtype=np.uint64)),
            temperature=Buffer.from_numpy(np.zeros(rows, np.float32)),
            top_k=Buffer.from_numpy(np.ones(rows, np.int64)),
            max_k=Buffer.from_numpy(np.array(1, np.int64)),
            top_p=Buffer.from_numpy(np.ones(rows, np.float32)),
            min_top_p=Buffer.from_numpy(np.array(1, np.float32)),
            in_thinking_phase=Buffer.from_numpy(np.zeros(rows, np.bool_)),
        )

    def step(
        self, contexts: Sequence[Gemma4Context], images: Gemma4Inputs | None = None
    ) -> tuple[list[list[int]], NDArray[np.int64]]:
        """Executes the next step and commits its tokens; drafts are left to be verified next.

        Returns:
            The tokens committed to each request, and the new drafts, `[requests, DRAFTED]`.
        """
        outputs = self.model.execute(*self.inputs(contexts, images).buffers)
        accepted, chosen, drafts = (output.to_numpy().copy() for output in outputs)
        committed = []
        for context, count, token, draft in zip(contexts, accepted, chosen, drafts, strict=True):
            state = context.spec_decoding_state
            new = [*state.draft_tokens_to_verify[:count], int(token)]
            for one in new:
                context.update(one)
            state.draft_tokens_to_verify = draft.tolist()
            self._kv.step(context)
            committed.append(new)
        return committed, drafts

    def release(self, contexts: Sequence[Gemma4Context]) -> None:
        """Ends requests."""
        for context in contexts:
            self._kv.release(context)
