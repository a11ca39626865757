"""What every decoder's pipeline model does: loads weights, compiles the graph, executes steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from max.driver import Device
from max.engine import InferenceSession, Model
from max.graph.weights import Weights, WeightsAdapter
from max.nn.transformer import ReturnLogits
from max.pipelines.context import TextContext
from max.pipelines.lib import (
    KVCacheConfig,
    ModelInputs,
    ModelOutputs,
    PipelineConfig,
    PipelineModelWithKVCache,
)
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec
from max.pipelines.lib.log_probabilities import LogProbabilitiesMixin
from max.pipelines.lib.memory_estimation import MemoryPlan

from attnquant.kernels import extensions
from attnquant.nn.config import DecoderConfig
from attnquant.nn.tensors import State
from attnquant.nn.workers import let_workers_give_way


class DecoderModel(
    LogProbabilitiesMixin, PipelineModelWithKVCache[TextContext, DecoderConfig, Model]
):
    """A decoder on one device.

    A subclass names its `model_config_cls` and `batch_processor_cls`, as MAX wants it.

    Attributes:
        graph_name: what the graph is called.
        graph_role: what it is to MAX's pipeline.
        build: makes the decoder, or a module with its `bind`, `input_tree` and `calls_kernels`,
            from its configuration and its weights, by name.
    """

    graph_name: ClassVar[str]
    graph_role: ClassVar[GraphRole] = GraphRole.DECODER
    build: Callable[[Any, State], Any]

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        session: InferenceSession,
        devices: list[Device],
        kv_cache_config: KVCacheConfig,
        weights: Weights,
        *,
        memory_plan: MemoryPlan,
        adapter: WeightsAdapter | None = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        max_batch_size: int = 1,
    ) -> None:
        super().__init__(
            pipeline_config,
            session,
            devices,
            kv_cache_config,
            weights,
            adapter=adapter,
            return_logits=return_logits,
            memory_plan=memory_plan,
            max_batch_size=max_batch_size,
        )
        self._weights_dict: dict[str, Any] = {}
        self._models = self.load_graphs(session)
        if self.devices[0].is_host:
            let_workers_give_way()

    @property
    def model(self) -> Model:
        """The compiled decoder, ready to execute: what device graph capture records."""
        return self._models[self.graph_role]

    def _load_state_dict(self) -> dict[str, Any]:
        self._weights_dict = super()._load_state_dict()
        return self._weights_dict

    def _create_model_config(self, state_dict: dict[str, Any]) -> DecoderConfig:
        config: DecoderConfig = self.model_config_cls.initialize(
            self.pipeline_config, max_seq_len=self.max_seq_len
        )
        config.return_logits = self.return_logits
        return config

    def graph_specs(self, model_config: DecoderConfig) -> dict[str, GraphSpec]:
        """The decoder's graph and the weights that it binds."""
        decoder = self.build(model_config, self._weights_dict)
        decoder.bind(self._weights_dict)
        self._weights_dict = {}
        return {
            self.graph_role: GraphSpec(
                decoder,
                self.graph_name,
                self._bind_graph_inputs(decoder.input_tree()),
                weights=decoder.state_dict(auto_initialize=False),
                custom_extensions=[extensions()] if decoder.calls_kernels else [],
            )
        }

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Runs one step; see `RaggedDecoder` for the outputs' shapes."""
        assert self.batch_processor is not None
        return self.batch_processor.process_outputs(self.model.execute(*model_inputs.buffers))
