"""Gemma 3's configuration, from the Hugging Face config and MAX's pipeline config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import MultiKVCacheParams
from max.nn.transformer import ReturnLogits
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

from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import UnsupportedError

# MAX 26.7's CPU attention compiles for windows of 128 and 512 tokens; for 16 and 64 it does not.
SMALLEST_CPU_WINDOW = 128


@dataclass(kw_only=True)
class Gemma3Config(ArchConfigWithStoredKVParams, ArchConfigWithKVCache):
    """What the Gemma 3 graph is built from.

    Attributes:
        shapes: the projections, norms and embedding, by layer.
        dtype: of activations, unquantized weights and norms.
        devices: the one device that the model runs on.
        kv_params: the sliding and the full cache, by layer type.
        layer_types: `sliding_attention` or `full_attention`, a layer each.
        max_seq_len: the longest sequence, in tokens.
        attention_scale: factor on the attention scores, `query_pre_attn_scalar^-0.5`.
        window: the sliding window, in tokens.
        rope_theta: base period by layer type.
        rope_factor: linear position scaling by layer type; 1 is none.
        rms_norm_eps: added to the mean square.
        hidden_activation: as the Hugging Face config names it.
        softcap: soft limit of the logits, or None.
        return_logits: which positions' logits the graph returns.
    """

    DEFAULT_ENCODING: ClassVar[SupportedEncoding] = "bfloat16"
    SUPPORTED_ENCODINGS: ClassVar[set[SupportedEncoding]] = {
        "bfloat16",
        "float32",
        "float4_e2m1fnx2",
    }

    shapes: DecoderShapes
    dtype: DType
    devices: list[DeviceRef]
    kv_params: MultiKVCacheParams
    layer_types: tuple[str, ...]
    max_seq_len: int
    attention_scale: float
    window: int
    rope_theta: dict[str, float]
    rope_factor: dict[str, float]
    rms_norm_eps: float
    hidden_activation: str
    softcap: float | None
    return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN

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
        hf = text_config(model.huggingface_config)
        encoding = graph_encoding(model)
        devices = [DeviceRef(spec.device_type, spec.id) for spec in model.device_specs]
        _refuse_unsupported(hf, devices[0])
        return cls(
            shapes=DecoderShapes.from_config(hf.to_dict()),
            dtype=supported_encoding_dtype(encoding),
            devices=devices,
            kv_params=cls.construct_kv_params(
                hf,
                pipeline_config,
                devices,
                model.kv_cache,
                cache_dtype_for_encoding(encoding, model.kv_cache.kv_cache_format),
            ),
            layer_types=tuple(hf.layer_types),
            max_seq_len=max_seq_len,
            attention_scale=hf.query_pre_attn_scalar**-0.5,
            window=hf.sliding_window,
            rope_theta={kind: rope["rope_theta"] for kind, rope in hf.rope_parameters.items()},
            rope_factor={
                kind: rope.get("factor", 1.0) for kind, rope in hf.rope_parameters.items()
            },
            rms_norm_eps=hf.rms_norm_eps,
            hidden_activation=hf.hidden_activation,
            softcap=hf.final_logit_softcapping,
        )

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
        """One cache for the sliding layers, which keeps a window, and one for the full layers."""
        hf = text_config(huggingface_config)
        return hybrid_swa_full_kv_params(
            layer_types=hf.layer_types,
            sliding_window=hf.sliding_window,
            pipeline_config=pipeline_config,
            devices=devices,
            kv_cache_config=kv_cache_config,
            cache_dtype=cache_dtype,
            n_kv_heads=hf.num_key_value_heads,
            head_dim=hf.head_dim,
            allow_kv_head_replication=allow_kv_head_replication,
        )


def text_config(huggingface_config: Any) -> Any:
    """The text model's config, which multimodal checkpoints nest."""
    return getattr(huggingface_config, "text_config", huggingface_config)


def graph_encoding(model: MAXModelConfig) -> SupportedEncoding:
    """The encoding, and so the dtype, that the graph is built in.

    MAX infers `float4_e2m1fnx2` from an NVFP4 checkpoint; its activations are bfloat16.
    """
    encoding = _select_quantization_encoding(model, Gemma3Config.DEFAULT_ENCODING)
    return "bfloat16" if encoding == "float4_e2m1fnx2" else encoding


def _refuse_unsupported(hf: Any, device: DeviceRef) -> None:
    for name in ("attention_bias", "attn_logit_softcapping", "use_bidirectional_attention"):
        if value := getattr(hf, name, None):
            raise UnsupportedError(
                f"config.json: {name} is {value}; Gemma 3 checkpoints have it unset, and this "
                "graph does not compute it"
            )
    for kind, rope in hf.rope_parameters.items():
        if rope["rope_type"] not in ("default", "linear"):
            raise UnsupportedError(
                f"config.json: rope_type of {kind} is {rope['rope_type']!r}, expected 'default' "
                "or 'linear'"
            )
    if device.is_cpu() and hf.sliding_window < SMALLEST_CPU_WINDOW:
        raise UnsupportedError(
            f"config.json: sliding_window is {hf.sliding_window}; MAX's CPU attention needs "
            f"{SMALLEST_CPU_WINDOW} or more. Serve this model on a GPU"
        )
