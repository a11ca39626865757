"""The pipeline model: loads the weights, compiles the graphs, executes steps.

Images are encoded before the step that needs them, by MAX's pipeline, which calls the three methods
on vision here and keeps the embeddings in its cache. A decoding step gets embeddings of no rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from max.driver import Buffer, Device
from max.engine import Model
from max.pipelines.architectures.gemma4.batch_vision_inputs import (
    VisionRawInputs,
    create_empty_embeddings,
    pack_uncached_images,
)
from max.pipelines.architectures.gemma4.context import Gemma4Context
from max.pipelines.context import ImageMetadata
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec
from max.pipelines.lib.vision_encoder_cache import VisionEncodeResult
from typing_extensions import override

from attnquant.errors import UnsupportedError
from attnquant.gemma4.batch_processor import Gemma4BatchProcessor
from attnquant.gemma4.gemma4 import VisionTower, build_gemma4
from attnquant.gemma4.model_config import Gemma4Config
from attnquant.gemma4.weight_adapters import VISION
from attnquant.log import log
from attnquant.nn.config import text_config
from attnquant.nn.decoder import EMBEDDINGS_DTYPE
from attnquant.nn.pipeline import DecoderModel

_CAUSAL_IMAGES = (
    "an image's tokens attend to those before them only, as in MAX's own Gemma 4; this checkpoint "
    "(use_bidirectional_attention: vision) was trained with each seeing its whole image"
)


class Gemma4Model(DecoderModel):
    """Gemma 4 on one device."""

    model_config_cls: ClassVar[type[Any]] = Gemma4Config
    batch_processor_cls: ClassVar[type[Gemma4BatchProcessor]] = Gemma4BatchProcessor
    graph_name: ClassVar[str] = "gemma4"
    build = staticmethod(build_gemma4)

    @override
    def _load_state_dict(self) -> dict[str, Any]:
        weights = super()._load_state_dict()
        self._vision_weights = {
            name.removeprefix(VISION): weight
            for name, weight in weights.items()
            if name.startswith(VISION)
        }
        for name in self._vision_weights:
            del weights[VISION + name]
        return weights

    @override
    def _create_model_config(self, state_dict: dict[str, Any]) -> Gemma4Config:
        self.config: Gemma4Config = super()._create_model_config(state_dict)
        return self.config

    @override
    def graph_specs(self, model_config: Gemma4Config) -> dict[str, GraphSpec]:
        """The decoder's graph, and the vision tower's if there is one."""
        specs: dict[str, GraphSpec] = super().graph_specs(model_config)
        if model_config.vision is not None:
            if text_config(self.huggingface_config).use_bidirectional_attention == "vision":
                log.warning(_CAUSAL_IMAGES)
            tower = VisionTower(model_config)
            # Tensors in a checkpoint file are aligned to their element size at most.
            tower.load_state_dict(self._vision_weights, weight_alignment=1)
            specs[GraphRole.VISION] = GraphSpec(
                tower, "gemma4_vision", tower.input_types(), weights=tower.state_dict()
            )
        self._vision_weights = {}
        return specs

    @property
    def vision_model(self) -> Model:
        """The compiled vision tower.

        Raises:
            UnsupportedError: the checkpoint is served as text.
        """
        if GraphRole.VISION not in self._models:
            raise UnsupportedError(
                "this checkpoint has no vision tower that attnquant serves: send text only"
            )
        return self._models[GraphRole.VISION]

    def pack_vision_inputs(
        self,
        selection: Sequence[tuple[Gemma4Context, Sequence[ImageMetadata]]],
        devices: list[Device],
    ) -> VisionRawInputs | None:
        """Brings the images' patches to the device."""
        if self.config.vision is None:
            return None
        return pack_uncached_images(
            selection, devices, self.config.vision.pooling_kernel_size, self.config.dtype
        )

    def vision_execute(
        self,
        selection: Sequence[tuple[Gemma4Context, Sequence[ImageMetadata]]],
        devices: list[Device],
        packed: VisionRawInputs | None,
    ) -> VisionEncodeResult:
        """Encodes the images: float32 `[soft tokens, hidden]`, image after image."""
        model = self.vision_model
        if packed is None:
            return VisionEncodeResult(embeddings=self.empty_vision_embeddings(devices))
        embeddings = model(
            *packed.patches_flat,
            *packed.pixel_position_ids,
            *packed.cu_seqlens,
            *packed.pool_gather_index,
            packed.max_seq_len,
        )
        if devices[0].is_host:
            self._encoded.append(embeddings)
        return VisionEncodeResult(embeddings=embeddings)

    def empty_vision_embeddings(self, devices: list[Device]) -> list[Buffer]:
        """Embeddings of no rows: always the same buffers, since every decoding step asks."""
        return self._no_embeddings

    @cached_property
    def _encoded(self) -> deque[list[Buffer]]:
        """What was encoded last, kept from being freed.

        MAX copies it into its cache, on a CPU at some later time, and holds it no longer than the
        call; the copy then has in it what the allocator wrote into freed memory. It is made before
        the step it belongs to, beside which MAX prepares one more, hence two.
        """
        return deque(maxlen=2)

    @cached_property
    def _no_embeddings(self) -> list[Buffer]:
        empty: list[Buffer] = create_empty_embeddings(
            self.devices, self.config.shapes.hidden, EMBEDDINGS_DTYPE
        )
        return empty
