"""What every decoder's graph is built from, and how it is read from config.json and MAX's config.

A decoder's own configuration class adds the checks and the fields that are its alone; where two
decoders differ in a number, it is a field here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import MultiKVCacheParams
from max.nn.transformer import ReturnHiddenStates, ReturnLogits
from max.pipelines.architectures.gpt_oss.hybrid_kv_params_util import hybrid_swa_full_kv_params
from max.pipelines.kv_cache import cache_dtype_for_encoding
from max.pipelines.lib import KVCacheConfig, MAXModelConfig, PipelineConfig
from max.pipelines.lib.config.model_config import _select_quantization_encoding
from max.pipelines.lib.interfaces.arch_config import (
    ArchConfigWithKVCache,
    ArchConfigWithStoredKVParams,
)
from max.pipelines.modeling.config_enums import SupportedEncoding, supported_encoding_dtype
from transformers import PretrainedConfig
from typing_extensions import Self, override

from attnquant.config_values import Activation, check_values
from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import UnsupportedError
from attnquant.kernels.attention import HEAD_MULTIPLE
from attnquant.nn.cache import DecoderCacheParams

DEFAULT_ENCODING: SupportedEncoding = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The rotary embedding of one kind of layer; the arguments of `rotary_table`."""

    theta: float
    factor: float = 1.0
    rotated: float = 1.0


@dataclass(kw_only=True)
class DecoderConfig(ArchConfigWithStoredKVParams, ArchConfigWithKVCache):
    """What a decoder's graph is built from.

    Attributes:
        shapes: the projections, norms and embedding, by layer.
        dtype: of activations, unquantized weights and norms.
        devices: the one device that the model runs on.
        kv_params: the sliding and the full cache, by the kind of layer.
        max_seq_len: the longest sequence, in tokens.
        attention_scale: factor on the attention scores.
        window: the sliding window, in tokens; None if no layer has one.
        ropes: by the kind of layer.
        rms_norm_eps: added to the mean square.
        hidden_activation: as the Hugging Face config names it.
        softcap: soft limit of the logits, or None.
        return_logits: which positions' logits the graph returns.
        return_hidden_states: which positions' hidden states it returns.
        norm_offset: added to every norm's stored weight.
        normalizes_values: values have a norm per head, without a weight.
        scales_embeddings: embeddings are multiplied by the root of their width.
    """

    norm_offset: ClassVar[float] = 0.0
    normalizes_values: ClassVar[bool] = False
    scales_embeddings: ClassVar[bool] = True

    DEFAULT_ENCODING: ClassVar[SupportedEncoding] = DEFAULT_ENCODING
    SUPPORTED_ENCODINGS: ClassVar[set[SupportedEncoding]] = {
        "bfloat16",
        "float32",
        "float4_e2m1fnx2",
    }

    shapes: DecoderShapes
    dtype: DType
    devices: list[DeviceRef]
    kv_params: MultiKVCacheParams
    max_seq_len: int
    attention_scale: float
    window: int | None
    ropes: dict[str, Rope]
    rms_norm_eps: float
    hidden_activation: Activation
    softcap: float | None
    return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN
    return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE

    @override
    @classmethod
    def initialize(
        cls,
        pipeline_config: PipelineConfig,
        model_config: MAXModelConfig | None = None,
        *,
        max_seq_len: int,
    ) -> Self:
        """Builds the configuration.

        Raises:
            CheckpointError: a field of config.json is missing or impossible.
            UnsupportedError: config.json asks for what this graph does not compute.
        """
        model = model_config or pipeline_config.model
        hf, text = model.huggingface_config, text_config(model.huggingface_config)
        encoding = graph_encoding(model)
        devices = [DeviceRef(spec.device_type, spec.id) for spec in model.device_specs]
        config = hf.to_dict()
        shapes = DecoderShapes.from_config(config)
        check_values(config, shapes)
        cls.check(hf)
        window = text.sliding_window
        if all(layer.kind != "sliding_attention" for layer in shapes.layers):
            window = None
        heads = {layer.head_dim for layer in shapes.layers if layer.head_dim % HEAD_MULTIPLE}
        if devices[0].is_cpu() and heads:
            raise UnsupportedError(
                f"config.json: a head's size is {min(heads)}; attention on a CPU needs a multiple "
                f"of {HEAD_MULTIPLE}. Serve this model on a GPU"
            )
        return cls(
            shapes=shapes,
            dtype=supported_encoding_dtype(encoding),
            devices=devices,
            kv_params=cls.construct_kv_params(
                hf,
                pipeline_config,
                devices,
                model.kv_cache,
                cache_dtype_for_encoding(encoding, model.kv_cache.kv_cache_format),
            ),
            max_seq_len=max_seq_len,
            window=window,
            rms_norm_eps=text.rms_norm_eps,
            # What Gemma calls hidden_activation, others call hidden_act.
            hidden_activation=getattr(text, "hidden_activation", None) or text.hidden_act,
            softcap=getattr(text, "final_logit_softcapping", None),
            **cls.own_fields(hf),
        )

    @property
    def embedding_scale(self) -> float:
        """Factor on every embedding."""
        return float(self.shapes.hidden**0.5) if self.scales_embeddings else 1.0

    @classmethod
    def check(cls, huggingface_config: Any) -> None:
        """Refuses what this decoder's graph does not compute.

        Raises:
            UnsupportedError: names the field of config.json.
        """
        raise NotImplementedError

    @classmethod
    def own_fields(cls, huggingface_config: Any) -> dict[str, Any]:
        """The fields that every decoder reads in its own way."""
        raise NotImplementedError

    @override
    @classmethod
    def construct_kv_params(
        cls,
        huggingface_config: PretrainedConfig,
        pipeline_config: PipelineConfig,
        devices: list[DeviceRef],
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
        *,
        allow_kv_head_replication: bool = False,
    ) -> MultiKVCacheParams:
        """A cache for each kind of layer that there is: a sliding one keeps a window."""
        layers = DecoderShapes.from_config(huggingface_config.to_dict()).layers
        of_kind = {layer.kind: layer for layer in layers}
        sliding = of_kind.get("sliding_attention", layers[0])
        full = of_kind.get("full_attention", layers[0])
        both = hybrid_swa_full_kv_params(
            layer_types=[layer.kind for layer in layers],
            sliding_window=text_config(huggingface_config).sliding_window,
            pipeline_config=pipeline_config,
            devices=devices,
            kv_cache_config=kv_cache_config,
            cache_dtype=cache_dtype,
            n_kv_heads=sliding.kv_heads,
            head_dim=sliding.head_dim,
            full_n_kv_heads=full.kv_heads,
            full_head_dim=full.head_dim,
            allow_kv_head_replication=allow_kv_head_replication,
        )
        return DecoderCacheParams.from_params(
            {kind: params for kind, params in both.children.items() if kind in of_kind}
        )

    @override
    @classmethod
    def calculate_max_seq_len(
        cls, huggingface_config: PretrainedConfig, model_config: MAXModelConfig
    ) -> int:
        """`--max-length`, which `max_position_embeddings` bounds."""
        found: int = super().calculate_max_seq_len(text_config(huggingface_config), model_config)
        return found


def text_config(huggingface_config: Any) -> Any:
    """The text model's config, which multimodal checkpoints nest."""
    return getattr(huggingface_config, "text_config", huggingface_config)


def graph_encoding(model: MAXModelConfig) -> SupportedEncoding:
    """The encoding, and so the dtype, that the graph is built in.

    MAX infers `float4_e2m1fnx2` from an NVFP4 checkpoint; its activations are bfloat16.
    """
    encoding = _select_quantization_encoding(model, DEFAULT_ENCODING)
    return "bfloat16" if encoding == "float4_e2m1fnx2" else encoding


def refuse_fields(config: Any, names: tuple[str, ...], decoder: str) -> None:
    """Refuses fields of a config that are set at all.

    Raises:
        UnsupportedError: names the first one.
    """
    for name in names:
        if value := getattr(config, name, None):
            raise UnsupportedError(
                f"config.json: {name} is {value!r}; {decoder} checkpoints have it unset, and this "
                "graph does not compute it"
            )


def refuse_rope_type(kind: str, rope: dict[str, Any], *allowed: str) -> None:
    """Refuses a rotary embedding that is none of the allowed types.

    Raises:
        UnsupportedError: names the kind of layer, the type, and the allowed ones.
    """
    if rope["rope_type"] not in allowed:
        raise UnsupportedError(
            f"config.json: rope_type of {kind} is {rope['rope_type']!r}, expected "
            f"{' or '.join(map(repr, allowed))}"
        )
