"""A tiny Gemma 3 in a GGUF file: every tensor, key and kind of token that the real file has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

LAYERS = 7
HIDDEN = 32
INTERMEDIATE = 64
HEADS = 2
HEAD_DIM = 32

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
USER_DEFINED = ["\n", "\n\n", "  ", "   ", "<b>", "<start_of_image>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
# Best first. "▁the" has three splits of which two are merges; "\n" is no normal token.
NORMAL = ["he", "▁t", "th", "▁the", "the", "el", "lo", "hel", "ello", "hello"]
LETTERS = ["▁", *"abehlotxy", "é"]
TOKENS = CONTROL + USER_DEFINED + BYTES + NORMAL + LETTERS
KINDS = [3] * len(CONTROL) + [4] * len(USER_DEFINED) + [6] * len(BYTES)
KINDS += [1] * (len(TOKENS) - len(KINDS))
SCORES = [-1000.0] * (len(CONTROL) + len(USER_DEFINED)) + [0.0] * len(BYTES)
SCORES += [-float(rank) for rank in range(len(TOKENS) - len(SCORES))]

SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (HEAD_DIM, HIDDEN),
    "attn_v": (HEAD_DIM, HIDDEN),
    "attn_q_norm": (HEAD_DIM,),
    "attn_k_norm": (HEAD_DIM,),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "post_attention_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (INTERMEDIATE, HIDDEN),
    "ffn_up": (INTERMEDIATE, HIDDEN),
    "ffn_down": (HIDDEN, INTERMEDIATE),
    "post_ffw_norm": (HIDDEN,),
}


def tensors() -> dict[str, NDArray[np.float32]]:
    """The weights by GGUF name, norms as w; multiples of 1/256, the same everywhere."""
    shapes = {"output_norm.weight": (HIDDEN,), "token_embd.weight": (len(TOKENS), HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in SHAPES.items()}
    return {
        name: ((np.arange(np.prod(shape)) * (7 + 2 * index)) % 509 - 254)
        .astype(np.float32)
        .reshape(shape)
        / np.float32(256)
        for index, (name, shape) in enumerate(shapes.items())
    }


def write(path: Path, leave_out: str = "", extra: str = "") -> None:
    """Writes the file: matrices as Q8_0, norms as float32 with 1 added.

    Args:
        path: the file.
        leave_out: a metadata key to leave out.
        extra: the name of a tensor to add.
    """
    writer = GGUFWriter(path, "gemma3")
    prefix = "gemma3."
    integers = {
        "context_length": 256,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INTERMEDIATE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.sliding_window": 128,
    }
    floats = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1000000.0}
    for key, integer in integers.items():
        if prefix + key != leave_out:
            writer.add_uint32(prefix + key, integer)
    for key, real in floats.items():
        if prefix + key != leave_out:
            writer.add_float32(prefix + key, real)
    writer.add_token_list(TOKENS)
    writer.add_token_scores(SCORES)
    writer.add_token_types(KINDS)
    for name, values in tensors().items():
        if name.endswith("_norm.weight"):
            writer.add_tensor(name, values + np.float32(1))
        else:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    if extra:
        writer.add_tensor(extra, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
