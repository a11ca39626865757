"""Tiny Gemma 4 checkpoints: the real file format, and weights that forgive no mistake.

As `tests.tiny.gemma3`, and besides: layer scalars from 0.01 to 0.9; sliding and full layers with
heads of 256 and 512 and their own numbers of key-value heads; values that are the keys before their
norm, or not; final norms that take logits beyond the softcap; a vision tower, or none. Queries and
keys are normalised per head and not scaled after it, so the gains of their norms are small, which
keeps attention uneven without being saturated.
"""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from tests.tiny import prompts, tokenizer
from tests.tiny.checkpoint import MAGNITUDE, TinyCheckpoint, write_json
from tests.tiny.stable_random import integers, uniform

IMAGE, BEGIN_IMAGE, END_IMAGE, VIDEO = "<|image|>", "<|image>", "<image|>", "<|video|>"
# What MAX's tokenizer for Gemma 4 asks for.
SPECIAL_TOKENS = (IMAGE, BEGIN_IMAGE, END_IMAGE, VIDEO, "<|channel>", "<channel|>", "<|turn>")

CHAT_TEMPLATE = """{{ bos_token }}
{%- for message in messages -%}
{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
{%- if message['content'] is string -%}
{{ message['content'] | trim -}}
{%- else -%}
{%- for item in message['content'] -%}
{{ item['text'] | trim if item['type'] == 'text' else '<|' + item['type'] + '|>' -}}
{%- endfor -%}
{%- endif -%}
{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn>model\\n' }}{%- endif -%}
"""

# Gains of the norms of queries and keys are this times the others.
_HEAD_GAIN = 0.2
# The final norm's, so that logits go beyond the softcap. That is lower than the 30 of real ones: an
# error of a log-probability is one of the logits, and float32 rounds larger ones more.
_FINAL_GAIN = 1.2

LANGUAGE = "model.language_model."
PATCH, POOLING, SOFT_TOKENS = 8, 3, 70


@dataclass(frozen=True, kw_only=True)
class TinyGemma4(TinyCheckpoint):
    """One tiny Gemma 4."""

    global_kv_heads: int | None = None
    keys_are_values: bool = True
    scalars: tuple[float, ...]
    global_head_dim: int = 512
    partial_rotary_factor: float = 0.25
    final_logit_softcapping: float | None = 12.0
    vision: bool = True
    unified: bool = False

    @property
    def chat_template(self) -> str:
        """One that places images and videos."""
        return CHAT_TEMPLATE

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Those of images, video, reasoning and turns."""
        return SPECIAL_TOKENS

    @property
    def placeholders(self) -> set[int]:
        """The tokens that stand for images and videos."""
        return {self.token(IMAGE), self.token(VIDEO)}

    def token(self, text: str) -> int:
        """The id of one of `special_tokens`."""
        return self.ordinary_vocab + SPECIAL_TOKENS.index(text)

    def config(self) -> dict[str, Any]:
        """config.json, as transformers 5 writes it."""
        kind = "gemma4_unified" if self.unified else "gemma4"
        text: dict[str, Any] = {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attention_k_eq_v": self.keys_are_values,
            "bos_token_id": tokenizer.BOS,
            "dtype": self.dtype,
            "enable_moe_block": False,
            "eos_token_id": tokenizer.EOS,
            "final_logit_softcapping": self.final_logit_softcapping,
            "global_head_dim": self.global_head_dim,
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.hidden,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": self.intermediate,
            "layer_types": self.layer_types,
            "max_position_embeddings": 2048,
            "model_type": f"{kind}_text",
            "num_attention_heads": self.heads,
            "num_global_key_value_heads": self.global_kv_heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "num_kv_shared_layers": 0,
            "pad_token_id": tokenizer.PAD,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": self.partial_rotary_factor,
                    "rope_theta": self.rope_theta,
                    "rope_type": "proportional",
                },
                "sliding_attention": {
                    "rope_theta": self.rope_local_theta,
                    "rope_type": "default",
                },
            },
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": self.tied,
            "use_bidirectional_attention": None,
            "vocab_size": self.vocab,
        }
        architecture = "Gemma4Unified" if self.unified else "Gemma4"
        return {
            "architectures": [f"{architecture}ForConditionalGeneration"],
            "audio_config": None,
            "boi_token_id": self.token(BEGIN_IMAGE),
            "dtype": self.dtype,
            "eoi_token_id": self.token(END_IMAGE),
            "eos_token_id": [tokenizer.EOS, tokenizer.END_OF_TURN],
            "image_token_id": self.token(IMAGE),
            "model_type": kind,
            "text_config": text,
            "tie_word_embeddings": self.tied,
            "transformers_version": "5.12.1",
            "video_token_id": self.token(VIDEO),
            "vision_config": self._vision_config() if self.vision else None,
        }

    def write(self, directory: Path) -> Path:
        """As every tiny checkpoint, with the settings of images' and videos' processors."""
        processor = {
            "patch_size": PATCH,
            "pooling_kernel_size": POOLING,
            "max_soft_tokens": SOFT_TOKENS,
        }
        written = super().write(directory)
        processors = {"image_processor": processor, "video_processor": processor}
        write_json(directory / "processor_config.json", processors)
        return written

    def values(self) -> dict[str, NDArray[np.float64]]:
        """Every tensor of the checkpoint by name."""
        values = {f"{LANGUAGE}embed_tokens.weight": self.table("embed_tokens", self.hidden)}
        for layer, kind in enumerate(self.layer_types):
            values |= self._layer(f"{LANGUAGE}layers.{layer}.", kind == "full_attention")
            values[f"{LANGUAGE}layers.{layer}.layer_scalar"] = np.array([self.scalars[layer]])
        values[f"{LANGUAGE}norm.weight"] = _FINAL_GAIN * self.gain("norm.weight", self.hidden)
        if not self.tied:
            values["lm_head.weight"] = self.table("lm_head", self.hidden)
        return values | (self._tower() if self.vision else {})

    def _layer(self, prefix: str, full: bool) -> dict[str, NDArray[np.float64]]:
        head_dim = self.global_head_dim if full else self.head_dim
        kv_heads, has_values = self.kv_heads, True
        if full and self.keys_are_values:
            kv_heads, has_values = self.global_kv_heads or kv_heads, False
        shapes = {
            "self_attn.q_proj": (self.heads * head_dim, self.hidden),
            "self_attn.k_proj": (kv_heads * head_dim, self.hidden),
            "self_attn.v_proj": (kv_heads * head_dim, self.hidden),
            "self_attn.o_proj": (self.hidden, self.heads * head_dim),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        if not has_values:
            del shapes["self_attn.v_proj"]
        return {
            f"{prefix}{module}.weight": self.projection(
                prefix + module, shape, MAGNITUDE[module.split(".")[1]]
            )
            for module, shape in shapes.items()
        } | self._norms(prefix, self.hidden, head_dim)

    def _norms(self, prefix: str, hidden: int, head_dim: int) -> dict[str, NDArray[np.float64]]:
        blocks = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        names = {f"{prefix}{block}.weight": hidden for block in blocks}
        heads = {f"{prefix}self_attn.{which}_norm.weight": head_dim for which in "qk"}
        return {name: self.gain(name, size) for name, size in names.items()} | {
            name: _HEAD_GAIN * self.gain(name, size) for name, size in heads.items()
        }

    def _vision_config(self) -> dict[str, Any]:
        return {
            "head_dim": 16,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 64,
            "intermediate_size": 96,
            "model_type": "gemma4_vision",
            "num_attention_heads": 4,
            "num_hidden_layers": 1,
            "num_key_value_heads": 4,
            "patch_size": PATCH,
            "pooling_kernel_size": POOLING,
            "position_embedding_size": 256,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
            "standardize": True,
            "use_clipped_linears": False,
        }

    def _tower(self) -> dict[str, NDArray[np.float64]]:
        config = self._vision_config()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        tower = "model.vision_tower."

        def linear(name: str, rows: int, columns: int) -> NDArray[np.float64]:
            return self.projection(name, (rows, columns), 0.7)

        table = np.stack([self.table(f"{tower}positions.{axis}", hidden) for axis in "xy"])
        values = {
            f"{tower}patch_embedder.position_embedding_table": 5 * table[:, :256],
            f"{tower}patch_embedder.input_proj.weight": linear("patches", hidden, 3 * PATCH**2),
            f"{tower}std_bias": uniform(self._key("std_bias"), (hidden,)),
            f"{tower}std_scale": 0.5 + uniform(self._key("std_scale"), (hidden,)),
            "model.embed_vision.embedding_projection.weight": linear(
                "embed_vision", self.hidden, hidden
            ),
        }
        for layer in range(config["num_hidden_layers"]):
            prefix = f"{tower}encoder.layers.{layer}."
            values |= self._norms(prefix, hidden, config["head_dim"])
            for role in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o"):
                name = f"{prefix}{role}_proj.linear.weight"
                values[name] = linear(name, hidden, hidden)
            for role, shape in {
                "mlp.gate": (inner, hidden),
                "mlp.up": (inner, hidden),
                "mlp.down": (hidden, inner),
            }.items():
                name = f"{prefix}{role}_proj.linear.weight"
                values[name] = linear(name, *shape)
        return values


def image(height: int, width: int, key: str = "image") -> NDArray[np.uint8]:
    """`[height, width, 3]` random pixels."""
    pixels = integers(f"{key}/{height}x{width}", 0, 256, height * width * 3)
    return np.array(pixels, np.uint8).reshape(height, width, 3)


def patches(pixels: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """What an image processor makes of an image that needs no resizing.

    Returns:
        `[patches, 3 * PATCH^2]` values in 0..1, row after row of patches, a patch's colours
        innermost; and `[patches, 2]`, each patch's column and row.
    """
    rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    values = pixels.astype(np.float32).reshape(rows, PATCH, columns, PATCH, 3) / np.float32(255)
    positions = [(column, row) for row in range(rows) for column in range(columns)]
    flat = values.transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)
    return flat, np.array(positions, np.int64)


IMAGES = (image(168, 240), image(240, 168))
"""Two images of 70 soft tokens each, the most there may be, so that neither is resized."""

FRAMES = (IMAGES[0], image(168, 240, "frame"))
"""Two frames of a video, of 70 soft tokens each."""


def video() -> bytes:
    """A file of `FRAMES`, a second each, that loses nothing of them."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream = container.add_stream("png", rate=1)
        stream.height, stream.width = FRAMES[0].shape[:2]
        stream.pix_fmt = "rgb24"
        for frame in FRAMES:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def image_prompt(case: TinyGemma4) -> list[int]:
    """A prompt with both images: text, an image, text, an image, text."""
    begin, end = case.token(BEGIN_IMAGE), case.token(END_IMAGE)
    words = prompts.prompt(case.ordinary_vocab, 40)
    tokens = words[:6]
    for number in range(len(IMAGES)):
        text = words[6 + 9 * number : 15 + 9 * number]
        tokens += [begin, *[case.token(IMAGE)] * SOFT_TOKENS, end, *text]
    return tokens


_SHARED_VALUES = TinyGemma4(
    name="gemma4-shared-values",
    seed=3,
    layers=4,
    hidden=128,
    intermediate=256,
    heads=4,
    kv_heads=2,
    global_kv_heads=1,
    pattern=2,
    scalars=(0.9, 0.05, 0.3, 0.01),
    vocab=640,
    dtype="float32",
)

CASES = {
    case.name: case
    for case in (
        _SHARED_VALUES,
        TinyGemma4(
            name="gemma4-own-values",
            seed=2,
            layers=3,
            hidden=144,
            intermediate=320,
            heads=2,
            kv_heads=2,
            keys_are_values=False,
            pattern=3,
            scalars=(0.01, 0.6, 0.2),
            rope_theta=500_000.0,
            rope_local_theta=20_000.0,
            partial_rotary_factor=0.5,
            vocab=768,
            tied=False,
            shards=3,
            final_logit_softcapping=10.0,
            vision=False,
        ),
        # The first one's graph, in the text-only line's clothes.
        dataclasses.replace(
            _SHARED_VALUES,
            name="gemma4-unified",
            scalars=(0.5, 0.9, 0.02, 0.7),
            vision=False,
            unified=True,
        ),
    )
}
