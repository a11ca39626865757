"""MAX's memory planning, answered by `attnquant.memory`: one planner for every decoder.

MAX's `PagedMemoryPlanner` counts the bytes of the files as weights, and no activations; its Gemma 4
planner adds a flat 15 or 30 GiB. Neither is what happens here: the weights in memory depend on the
settings (in NVFP4 they are a third of a bfloat16 file), the activations on the chunk and the batch.
"""

from __future__ import annotations

from typing import Any

from max.driver import Device, is_virtual_device_mode
from max.pipelines.kv_cache import PagedMemoryPlanner
from max.pipelines.lib import PipelineConfig

from attnquant.checkpoint.nvfp4_layouts import LM_HEAD
from attnquant.checkpoint.safetensors import DTYPE_NAMES, read_header
from attnquant.checkpoint.theta_layout import held_bundles
from attnquant.checkpoint.verify import EMBEDDING, decoder_tensors
from attnquant.kernels.ops import NVFP4Kernel
from attnquant.memory import MOST_REQUESTS, MemoryPlan, Serving
from attnquant.nn.config import DecoderConfig
from attnquant.nn.embedding import table_dtype
from attnquant.nn.tensors import max_dtype, numpy_dtype
from attnquant.nvfp4.coverage import coverage_of
from attnquant.settings import Settings
from attnquant.theta import plan_of

# What requests take beside the cache may be this part of what is left after weights and a chunk:
# the more requests there are, the less cache is left for each.
_REQUESTS_DIVISOR = 4


class DecoderMemoryPlanner(PagedMemoryPlanner):
    """Plans a decoder's memory, and its vision tower's, from config.json, headers and settings.

    Args:
        config: the decoder's configuration.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self._decoder = config
        self._batch = 1
        self._corrections = 0
        self._known: MemoryPlan | None = None

    def estimate_weights_size(self, pipeline_config: PipelineConfig) -> int:
        """Bytes of the loaded weights: the decoder's, the tower's, the tables', the drafter's.

        Raises:
            SettingsError: a setting that does not fit this decoder.
            CheckpointError: the checkpoint is not what config.json describes.
        """
        plan = self.plan(pipeline_config)
        draft = pipeline_config.draft_model
        drafter: int = draft.weights_size() if draft is not None else 0
        return plan.weights(self._decoder.max_seq_len).total + self._corrections + drafter

    def infer_max_batch_size(
        self, pipeline_config: PipelineConfig, devices: list[Device], weights_size: int
    ) -> int | None:
        """The most requests at once, where the user did not say; None leaves it to MAX, on a CPU.

        MAX takes 512, whose logits and captured graphs are 20 GB for a vocabulary of 262,144.
        """
        if is_virtual_device_mode() or any(device.is_host for device in devices):
            return None
        plan = self.plan(pipeline_config)
        stats = [device.stats for device in devices]
        free = sum(stat["free_memory"] or stat.get("total_memory", 0) for stat in stats)
        chunk = plan.activations(0).total
        left = int(free * plan.serving.device_memory_utilization) - weights_size - chunk
        self._batch = max(
            (
                batch
                for batch in range(1, MOST_REQUESTS + 1)
                if plan.activations(batch).total - chunk <= left // _REQUESTS_DIVISOR
            ),
            default=1,
        )
        return self._batch

    def estimate_activation_memory(
        self, pipeline_config: PipelineConfig, huggingface_config: Any
    ) -> int:
        """Bytes that come and go with the steps."""
        batch = pipeline_config.runtime.max_batch_size or self._batch
        return self.plan(pipeline_config).activations(batch).total

    def plan(self, pipeline_config: PipelineConfig) -> MemoryPlan:
        """The plan, made once: it reads the weights' headers, which fetches them if need be."""
        if self._known is not None:
            return self._known
        model, runtime = pipeline_config.model, pipeline_config.runtime
        config = model.huggingface_config.to_dict()
        shapes, dtype = self._decoder.shapes, self._decoder.dtype
        settings = Settings.read(config.get("attnquant"))
        device = model.device_specs[0].device_type
        tensors = {
            name: info
            for path in model.resolved_weight_paths()
            for name, info in read_header(path).items()
        }
        names, stored = decoder_tensors(tensors, shapes, config)
        packed = {path for path, weight in stored.items() if weight.is_nvfp4}
        coverage = coverage_of(settings, shapes, packed)
        theta = plan_of(
            settings,
            shapes,
            coverage,
            packed=packed,
            held=held_bundles(config, stored),
            device=device,
        )
        graph_dtype = DTYPE_NAMES[numpy_dtype(dtype)]
        dense = (weight for path, weight in stored.items() if path not in packed)
        if theta.in_graph:
            # Shared blocks count as if each layer had its own: rebuilding one takes as much.
            self._corrections = dtype.size_in_bytes * sum(
                theta.rank * (rows + columns) for rows, columns in shapes.projections.values()
            )
        tables = [names[EMBEDDING]]
        if LM_HEAD in stored and LM_HEAD not in packed:
            tables.append(stored[LM_HEAD].names[0])
        stored_as = [max_dtype(tensors[name].numpy_dtype) for name in tables]
        kept = [table_dtype(found, dtype, shapes.hidden, device) for found in stored_as]
        speculative = pipeline_config.speculative
        self._known = MemoryPlan.from_config(
            config,
            coverage,
            # What was converted or rebuilt was also stacked before it was bound.
            parts_bound=theta.path == "weights"
            and all(tensors[weight.names[0]].dtype == graph_dtype for weight in dense),
            scales_copied=self._uses_max_kernel(),
            serving=Serving(
                # Without chunks, a prompt is one step.
                max_batch_input_tokens=max(
                    runtime.max_batch_input_tokens,
                    0 if runtime.enable_chunked_prefill else self._decoder.max_seq_len,
                ),
                device_memory_utilization=model.kv_cache.device_memory_utilization,
                vision_cache_utilization=runtime.vision_cache_utilization,
                kv_cache_page_size=model.kv_cache.kv_cache_page_size,
                num_speculative_tokens=(speculative and speculative.num_speculative_tokens) or 0,
                device_graph_capture=bool(runtime.device_graph_capture),
                enable_echo=model.enable_echo,
                element_bytes=dtype.size_in_bytes,
                table_bytes=max(one.size_in_bytes for one in kept),
            ),
        )
        return self._known

    def _uses_max_kernel(self) -> bool:
        """Whether packed weights go to MAX's kernel for SM100, which rearranges their scales."""
        shapes, dtype, (device,) = self._decoder.shapes, self._decoder.dtype, self._decoder.devices
        return any(
            NVFP4Kernel.of(device, dtype, rows, columns) is NVFP4Kernel.MAX_BLOCK_SCALED
            for rows, columns in shapes.projections.values()
        )
