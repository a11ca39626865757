"""Gemma 3 from a GGUF file: the content of `config.json`, and a bfloat16 `model.safetensors`.

GGUF renames the tensors, stores norm weights as 1 + w, and block-quantizes the matrices; the rows
of q and k keep Hugging Face's order (llama.cpp permutes them for Llama, not for Gemma). Dequantized
values are rounded to the nearest bfloat16, ties to even. A few thousand rows at a time are in
memory: the embedding alone would be 671 MB in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attnquant.checkpoint.safetensors import TensorSpec, build_header
from attnquant.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import ReaderTensor

_ROWS_AT_ONCE = 8192

_OUTER = {"token_embd": "embed_tokens", "output_norm": "norm"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}

# Not in GGUF's metadata, but the same for every Gemma 3 (Gemma 3 Technical Report, section 2:
# five local layers to each global one, and a base frequency of 10k on the local ones).
_PATTERN = 6
_LOCAL_THETA = 10000.0


def tensor_name(name: str) -> str:
    """Hugging Face's name: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        CheckpointError: no Gemma 3 has a tensor of this name.
    """
    stem = name.removesuffix(".weight")
    if stem in _OUTER:
        return f"model.{_OUTER[stem]}.weight"
    match stem.split("."):
        case ["blk", layer, part] if layer.isdecimal() and part in _INNER:
            return f"model.layers.{layer}.{_INNER[part]}.weight"
    raise CheckpointError(f"found the GGUF tensor {name!r}, expected only Gemma 3's")


def config(metadata: Callable[[str], Any], vocab_size: int) -> dict[str, Any]:
    """The content of `config.json`.

    Rope parameters and the dtype stand there twice: as transformers 5 writes them, and as its
    predecessors did.

    Args:
        metadata: the value of a key below GGUF's `gemma3.`.
        vocab_size: the number of tokens.
    """
    layers = metadata("block_count")
    head_dim = metadata("attention.key_length")
    theta = metadata("rope.freq_base")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        # The first release with Gemma 3. transformers 5 takes a local checkpoint without a
        # version for one of Mistral's, and warns of a wrong tokenizer.
        "transformers_version": "4.50.0",
        "vocab_size": vocab_size,
        "hidden_size": metadata("embedding_length"),
        "intermediate_size": metadata("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": metadata("attention.head_count"),
        "num_key_value_heads": metadata("attention.head_count_kv"),
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,  # of every Gemma 3 but the 27B
        "hidden_activation": "gelu_pytorch_tanh",
        # GGUF holds a float32; str() gives the shortest decimal that it is nearest to, 1e-06.
        "rms_norm_eps": float(str(np.float32(metadata("attention.layer_norm_rms_epsilon")))),
        "max_position_embeddings": metadata("context_length"),
        "sliding_window": metadata("attention.sliding_window"),
        "sliding_window_pattern": _PATTERN,
        "_sliding_window_pattern": _PATTERN,
        "layer_types": [
            "sliding_attention" if layer % _PATTERN else "full_attention"
            for layer in range(1, layers + 1)
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": _LOCAL_THETA},
        },
        "rope_theta": theta,
        "rope_local_base_freq": _LOCAL_THETA,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def write_safetensors(
    path: Path, tensors: Sequence[ReaderTensor], progress: Callable[[int], object]
) -> None:
    """Writes the tensors of a `gguf.GGUFReader` as bfloat16.

    Args:
        path: the file to create.
        tensors: the weights; GGUF gives their shapes in reverse.
        progress: called with the number of bytes that each write added.
    """
    specs = {
        tensor_name(tensor.name): TensorSpec(
            dtype="BF16", shape=tuple(int(size) for size in reversed(tensor.shape))
        )
        for tensor in tensors
    }
    with path.open("wb") as file:
        file.write(build_header(specs))
        for tensor in tensors:
            for start in range(0, len(tensor.data), _ROWS_AT_ONCE):
                progress(file.write(_values(tensor, start).tobytes()))


def _values(tensor: ReaderTensor, start: int) -> NDArray[ml_dtypes.bfloat16]:
    from gguf.quants import dequantize

    rows = tensor.data[start : start + _ROWS_AT_ONCE]
    values = dequantize(rows, tensor.tensor_type)
    if tensor.name.endswith("_norm.weight"):
        values = values - np.float32(1)
    return values.astype(ml_dtypes.bfloat16)
