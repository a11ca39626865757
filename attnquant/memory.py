"""What serving a model takes of a device's memory, from its config.json and the way it is served.

One plan serves `inspect --memory` and MAX's memory planning (`attnquant.nn.memory_planner`). MAX
gives the key-value cache what is left of `memory · device_memory_utilization` after weights and
activations, less the part of it that the vision encoder's cache takes. Every part comes from
shapes; what was taken from where:

- **Weights** are `attnquant.nvfp4.accounting`'s, the rotary tables that are bound beside them, and
  the vision tower. Where a checkpoint's own memory is bound (passthrough), the graph stacks q, k, v
  and gate, up when it is initialised. MAX's note on `fused_projection_weights` in its own Gemma 4
  says that such a concatenation is a second copy on the device, so it counts as one; the vision
  tower stacks in the same way. MAX's block-scaled kernel (SM100) rearranges block scales likewise.
- **The cache** is MAX's paged one ("Jenga"): one pool of huge blocks that holds the pages of both
  kinds of layers. A page is 128 tokens of keys and values of all layers of a kind. A full layer
  keeps all of a request's pages, a sliding layer those of its window and the one being written.
- **Activations** are the largest set of tensors that are alive together in one decoder layer, for
  the tokens of one step: a prefill chunk, and a token of every request that decodes meanwhile. Our
  kernels and MAX's attention add none that grow with the tokens. The vision tower's are counted in
  the same way, for a chunk that consists of images.
- **Logits** are `[rows, vocab]`, a megabyte a row in float32.
- **Captured graphs** each keep the working memory of their batch size, 1 to 128 at most, but share
  the memory of their outputs (`max.pipelines.lib.graph_capture`).

Then comes a margin of a quarter, because freed memory of one size does not always serve the next
tensor's, and tensors of a step and of the next one can overlap; and a fixed amount for what no
shape tells: compiled kernels, libraries' work spaces, attention's partial results. The vision tower
and the decoder take turns, yet both count, for the same reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from math import lcm
from typing import Any

from attnquant.decoder_shapes import (
    ConfigFields,
    DecoderShapes,
    LayerShapes,
    LayerType,
    text_config,
)
from attnquant.errors import SettingsError
from attnquant.nvfp4.accounting import BFLOAT16_BYTES, scale_bytes, stacked_bytes, weight_bytes
from attnquant.nvfp4.coverage import Coverage
from attnquant.projections import ProjectionKey
from attnquant.vision_shapes import VisionShapes

FIXED_BYTES = 512 * 2**20
MARGIN_DIVISOR = 4

# MAX captures graphs for batches up to this size, and admits as many requests where none is said.
MOST_CAPTURED = 128
MOST_REQUESTS = 512

# A step may look past the longest sequence, for drafted tokens, or since it overlaps the last one:
# rotary tables have so many rows more.
POSITIONS_BEYOND = 64

_FLOAT32_BYTES = 4
# transformers' defaults, where a config is silent.
_WINDOW_OF: dict[str, int] = {
    "Gemma3ForCausalLM": 4096,
    "Gemma4ForConditionalGeneration": 512,
    "Gemma4UnifiedForConditionalGeneration": 1024,
    "Qwen3ForCausalLM": 4096,
}
_DEFAULT_POSITIONS = 131_072

_SIZE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?([kmgt]i?)b", re.IGNORECASE)
_UNITS = {
    prefix + binary: base**power
    for power, prefix in enumerate("kmgt", 1)
    for binary, base in (("", 1000), ("i", 1024))
}


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a model is served; the fields are called as MAX's options are, where there is one.

    Attributes:
        max_batch_input_tokens: of one step: the prefill chunk.
        device_memory_utilization: the part of the memory that MAX may use.
        vision_cache_utilization: the part of the cache that keeps images' embeddings.
        kv_cache_page_size: tokens of a page.
        num_speculative_tokens: drafted at a time; 0 without a drafter.
        device_graph_capture: decoding is captured.
        enable_echo: logits of all tokens of a step are returned.
        element_bytes: of activations and unquantized weights.
        table_bytes: of an element of an unquantized embedding or head.
        cache_bytes: of one element of the cache.
    """

    max_batch_input_tokens: int = 8192
    device_memory_utilization: float = 0.9
    vision_cache_utilization: float = 0.05
    kv_cache_page_size: int = 128
    num_speculative_tokens: int = 0
    device_graph_capture: bool = True
    enable_echo: bool = False
    element_bytes: int = BFLOAT16_BYTES
    table_bytes: int = BFLOAT16_BYTES
    cache_bytes: int = BFLOAT16_BYTES


@dataclass(frozen=True, kw_only=True)
class ResidentBytes:
    """Bytes that lie on the device as long as the model is loaded.

    Attributes:
        decoder: its weights.
        copies: second copies, of q+k+v and gate+up, or of block scales.
        rotary: the rotary tables.
        vision: the vision tower, with its own second copies.
    """

    decoder: int
    copies: int
    rotary: int
    vision: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.decoder + self.copies + self.rotary + self.vision


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Bytes that come and go with the steps, at their most.

    Attributes:
        layers: of a decoder layer, for the tokens of a step.
        vision: of a layer of the vision tower, for the images of a step.
        logits: of a step, and of sampling from them.
        captured: working memory of captured graphs.
    """

    layers: int
    vision: int
    logits: int
    captured: int

    @property
    def margin(self) -> int:
        """What is added because shapes do not tell all."""
        parts = self.layers + self.vision + self.logits + self.captured
        return parts // MARGIN_DIVISOR + FIXED_BYTES

    @property
    def total(self) -> int:
        """Bytes of all parts and the margin."""
        return self.layers + self.vision + self.logits + self.captured + self.margin


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """The cache of all layers of one kind.

    Attributes:
        token_bytes: keys and values of one token.
        window: tokens that are kept, the current one included; None keeps all.
    """

    token_bytes: int
    window: int | None

    def kept(self, page_size: int) -> int | None:
        """The most tokens of a request that are kept, in whole pages; None if all are."""
        if self.window is None:
            return None
        return (-(-(self.window - 1) // page_size) + 1) * page_size

    def pages(self, tokens: int, page_size: int) -> int:
        """Pages that a request of so many tokens holds at once."""
        kept = self.kept(page_size)
        return -(-(tokens if kept is None else min(tokens, kept)) // page_size)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A model, what of it is in NVFP4, and how it is served: everything in bytes follows.

    Attributes:
        shapes: of the decoder.
        coverage: what is in NVFP4.
        vision: the vision tower, if it is loaded.
        window: of sliding layers, in tokens.
        positions: the longest sequence that the model is made for.
        parts_bound: unquantized fused groups are bound as the checkpoint has them, and stacked on
            the device.
        serving: how it is served.
        scales_copied: block scales of packed weights are rearranged on the device.
    """

    shapes: DecoderShapes
    coverage: Coverage
    vision: VisionShapes | None
    window: int
    positions: int
    parts_bound: bool
    serving: Serving
    scales_copied: bool = False

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        coverage: Coverage,
        *,
        parts_bound: bool,
        serving: Serving,
        scales_copied: bool = False,
    ) -> MemoryPlan:
        """Reads config.json's fields; for the arguments, see the attributes.

        Raises:
            CheckpointError: a field is missing or impossible; names it.
            UnsupportedError: an architecture or a feature that attnquant does not serve.
        """
        shapes = DecoderShapes.from_config(config)
        text = ConfigFields(text_config(config))
        return cls(
            shapes=shapes,
            coverage=coverage,
            vision=VisionShapes.from_config(config),
            window=text.positive("sliding_window", _WINDOW_OF[shapes.architecture]),
            positions=text.positive("max_position_embeddings", _DEFAULT_POSITIONS),
            parts_bound=parts_bound,
            serving=serving,
            scales_copied=scales_copied,
        )

    @cached_property
    def caches(self) -> dict[LayerType, LayerCache]:
        """The caches, by kind of layer."""
        kinds: dict[LayerType, list[LayerShapes]] = {}
        for layer in self.shapes.layers:
            kinds.setdefault(layer.kind, []).append(layer)
        return {
            kind: LayerCache(
                token_bytes=sum(2 * layer.kv_heads * layer.head_dim for layer in layers)
                * self.serving.cache_bytes,
                window=self.window if kind == "sliding_attention" else None,
            )
            for kind, layers in kinds.items()
        }

    def weights(self, max_length: int) -> ResidentBytes:
        """What loading takes, for sequences of up to `max_length` tokens."""
        element, vision = self.serving.element_bytes, self.vision
        heads = {layer.kind: layer.head_dim for layer in self.shapes.layers}
        return ResidentBytes(
            decoder=self._decoder_bytes,
            copies=self._copied_bytes,
            rotary=element * (max_length + POSITIONS_BEYOND) * sum(heads.values()),
            vision=element * (vision.weights + vision.fused_weights) if vision else 0,
        )

    def activations(self, batch: int) -> ActivationBytes:
        """What steps take that decode up to `batch` requests at once."""
        serving, vision = self.serving, self.vision
        chunk, element = serving.max_batch_input_tokens, serving.element_bytes
        # A request has its next token and the drafted ones verified, and drafts in the same step.
        verified = 1 + serving.num_speculative_tokens
        rows = batch * (verified + (serving.num_speculative_tokens > 0))
        if serving.enable_echo:
            rows += chunk
        token = element * self._token_values
        images = 0
        if vision is not None:
            images = element * vision.patches(chunk) * vision.patch_values
            # What the decoder gets of them is float32.
            images += _FLOAT32_BYTES * chunk * self.shapes.hidden
        captured = min(batch, MOST_CAPTURED) if serving.device_graph_capture else 0
        captured_rows = captured * (captured + 1) // 2 * verified
        return ActivationBytes(
            layers=(chunk + batch * verified) * token,
            vision=images,
            # As the head gives them; in float32; after the soft cap; and what sampling makes.
            logits=rows * self.shapes.vocab * (element + 3 * _FLOAT32_BYTES),
            # Of the logits, what the head gives and the soft cap's input: its result is an output.
            captured=captured_rows * (token + self.shapes.vocab * (element + _FLOAT32_BYTES)),
        )

    def cache(self, tokens: int, batch: int) -> int:
        """What the cache of `batch` requests takes, all of `tokens` tokens."""
        size = self.serving.kv_cache_page_size
        if ahead := self.serving.num_speculative_tokens:
            # Drafted tokens are written past the end; so many are what MAX reserves for them.
            tokens += 3 * ahead + 1 + (ahead == 1)
        caches = self.caches.values()
        huge = lcm(*(size * cache.token_bytes for cache in caches))
        # One huge block more is what all unused entries of the page tables point to.
        blocks = 1 + sum(
            -(-batch * cache.pages(tokens, size) * size * cache.token_bytes // huge)
            for cache in caches
        )
        return blocks * huge

    def cache_budget(self, memory: int, max_length: int, batch: int) -> int:
        """What is left for the cache of a device with so much memory; below 0 if nothing is."""
        left = int(memory * self.serving.device_memory_utilization)
        left -= self.weights(max_length).total + self.activations(batch).total
        images = self.serving.vision_cache_utilization if self.vision and left > 0 else 0
        return left - int(left * images)

    def fits(self, memory: int, max_length: int, batch: int) -> bool:
        """Whether `batch` requests of `max_length` tokens are served at once."""
        return self.cache(max_length, batch) <= self.cache_budget(memory, max_length, batch)

    def longest_context(self, memory: int, batch: int) -> int:
        """The most tokens of each of `batch` requests, up to `positions`; 0 if none fits."""
        return _largest(self.positions, lambda tokens: self.fits(memory, tokens, batch))

    def largest_batch(self, memory: int, max_length: int) -> int:
        """The most requests of `max_length` tokens at once, up to 512; 0 if none fits."""
        return _largest(MOST_REQUESTS, lambda batch: self.fits(memory, max_length, batch))

    @cached_property
    def _decoder_bytes(self) -> int:
        serving = self.serving
        return weight_bytes(
            self.shapes, self.coverage, serving.element_bytes, serving.table_bytes
        ).total

    @cached_property
    def _copied_bytes(self) -> int:
        copies = 0
        if self.parts_bound:
            copies += stacked_bytes(self.shapes, self.coverage, self.serving.element_bytes)
        if self.scales_copied:
            copies += scale_bytes(self.shapes, self.coverage)
        return copies

    @cached_property
    def _token_values(self) -> int:
        """The most values that are alive at once for one token, over all layers.

        Attention: the residual, q+k+v, all three after their norms, and the copy of them that the
        cache takes. Feed-forward: the residual, gate and up, and their product. Where the coverage
        splits that group, gate and up are there alone and stacked; where it is packed, MAX's kernel
        gives them without their global scales first.
        """
        most = 0
        for index, layer in enumerate(self.shapes.layers):
            rows = {role: out for role, (out, _) in layer.projections.items()}
            queries, keys = rows["q_proj"], rows["k_proj"]
            stacked = queries + keys + rows.get("v_proj", 0)
            attention = stacked + 2 * (queries + 2 * keys)
            gate = ProjectionKey(layer=index, role="gate_proj")
            up = ProjectionKey(layer=index, role="up_proj")
            plain = not (self.coverage.is_quantized(gate) or self.coverage.is_quantized(up))
            feed_forward = (3 if plain else 4) * rows["gate_proj"]
            most = max(most, attention, feed_forward)
        return self.shapes.hidden + most


def parse_size(text: str) -> int:
    """Bytes of a size such as `32GiB` (2^30 each), `32GB` or `24gb` (10^9 each).

    Raises:
        SettingsError: it is not a size above 0 with its unit.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(Decimal(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size == 0:
        raise SettingsError(
            f"{text!r} is not a size above 0 with its unit, such as 32GiB, 32GB or 24gb"
        )
    return size


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `limit` that fits, where less always fits too; 0 if none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
