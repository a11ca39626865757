"""What the tiny checkpoints share: random weights by name, and the real file format.

Weights depend on the case's name and seed and on the tensor's name and shape only:
`dataclasses.replace` makes the same weights under another config. Nothing here imports torch,
transformers or attnquant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.tiny import tokenizer
from tests.tiny.stable_random import gaussian, uniform

# Standard deviation of a projection's output for an input of variance 1.
MAGNITUDE = {
    "q_proj": 1.0,
    "k_proj": 0.1,
    "v_proj": 0.3,
    "o_proj": 0.5,
    "gate_proj": 1.0,
    "up_proj": 0.3,
    "down_proj": 0.5,
}
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, kw_only=True)
class TinyCheckpoint:
    """A checkpoint made from a seed; a decoder adds its own sizes, its config and its tensors.

    Every `pattern`-th layer attends to all positions, the others to a window.
    """

    name: str
    seed: int = 0
    vocab: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    pattern: int
    head_dim: int = 256
    sliding_window: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    rope_local_theta: float = 10_000.0
    tied: bool = True
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    shards: int = 1

    def config(self) -> dict[str, Any]:
        """config.json."""
        raise NotImplementedError

    def values(self) -> dict[str, NDArray[np.float64]]:
        """Every tensor of the checkpoint by name."""
        raise NotImplementedError

    @property
    def layer_types(self) -> list[str]:
        """`sliding_attention` or `full_attention`, one for each layer."""
        return [
            "sliding_attention" if (index + 1) % self.pattern else "full_attention"
            for index in range(self.layers)
        ]

    @property
    def chat_template(self) -> str:
        """What makes a prompt of messages."""
        return tokenizer.CHAT_TEMPLATE

    @property
    def special_tokens(self) -> Sequence[str]:
        """The tokenizer's special tokens beyond those of every Gemma; the last ids are theirs."""
        return ()

    @property
    def placeholders(self) -> set[int]:
        """The tokens that stand for images and videos."""
        return set()

    @property
    def ordinary_vocab(self) -> int:
        """The ids below are no special tokens of this decoder's own."""
        return self.vocab - len(self.special_tokens)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Every tensor of the checkpoint by name, in its stored dtype."""
        stored = np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.float32)
        return {
            name: value.astype(np.float32).astype(stored) for name, value in self.values().items()
        }

    def write(self, directory: Path) -> Path:
        """Writes the checkpoint and its tokenizer into a directory, and returns the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.write_tokenizer(directory, self.vocab, self.special_tokens, self.chat_template)
        write_json(directory / "config.json", self.config())
        generation = {
            "bos_token_id": tokenizer.BOS,
            "eos_token_id": [tokenizer.EOS, tokenizer.END_OF_TURN],
            "pad_token_id": tokenizer.PAD,
        }
        write_json(directory / "generation_config.json", generation)
        self._write_weights(directory)
        return directory

    def _write_weights(self, directory: Path) -> None:
        tensors = self.tensors()
        metadata = {"format": "pt"}
        if self.shards == 1:
            save_file(tensors, directory / "model.safetensors", metadata)
            return
        # Name by name in turn: the parts of a layer, and of a fused group, lie in several shards.
        files = [
            f"model-{index + 1:05d}-of-{self.shards:05d}.safetensors"
            for index in range(self.shards)
        ]
        weight_map = {name: files[index % self.shards] for index, name in enumerate(tensors)}
        for file in files:
            part = {name: tensors[name] for name in tensors if weight_map[name] == file}
            save_file(part, directory / file, metadata)
        total = sum(value.nbytes for value in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / "model.safetensors.index.json", index)

    def text_values(
        self, norms: Mapping[str, int] | None = None, offset: float = 0.0
    ) -> dict[str, NDArray[np.float64]]:
        """The tensors of a decoder whose layers are alike.

        Args:
            norms: sizes of a layer's norms beside those of its inputs, queries and keys, and the
                one after attention.
            offset: what a norm adds to its weight.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        sizes = {
            "input_layernorm": self.hidden,
            "self_attn.q_norm": self.head_dim,
            "self_attn.k_norm": self.head_dim,
            "post_attention_layernorm": self.hidden,
            **(norms or {}),
        }
        values = {"model.embed_tokens.weight": self.table("model.embed_tokens.weight", self.hidden)}
        for layer in range(self.layers):
            for module, shape in shapes.items():
                name = f"model.layers.{layer}.{module}.weight"
                values[name] = self.projection(name, shape, MAGNITUDE[module.split(".")[1]])
            for module, size in sizes.items():
                name = f"model.layers.{layer}.{module}.weight"
                values[name] = self.gain(name, size) - offset
        values["model.norm.weight"] = self.gain("model.norm.weight", self.hidden) - offset
        if not self.tied:
            values["lm_head.weight"] = self.table("lm_head.weight", self.hidden)
        return values

    def projection(
        self, name: str, shape: tuple[int, int], magnitude: float
    ) -> NDArray[np.float64]:
        """A weight whose rows differ by up to 4."""
        rows = 0.5 + 1.5 * uniform(self._key(name + "/rows"), (shape[0], 1)) ** 2
        return gaussian(self._key(name), shape) * rows * (magnitude / np.sqrt(shape[1]))

    def gain(self, name: str, size: int) -> NDArray[np.float64]:
        """What a norm multiplies by, far from 1; the norms after a block let it be heard."""
        gain = 0.3 + 2.7 * uniform(self._key(name), (size,)) ** 2
        return gain * 3.5 if name.split(".")[-2] in _POST_NORMS else gain

    def table(self, name: str, columns: int) -> NDArray[np.float64]:
        """An embedding."""
        return 0.2 * gaussian(self._key(name), (self.vocab, columns))

    def _key(self, name: str) -> str:
        return f"{self.name}/{self.seed}/{name}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file as the Hugging Face libraries do."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
