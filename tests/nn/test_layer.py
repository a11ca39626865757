"""A layer in one operation against the same layer module by module, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from max import tree
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
from max.nn.kv_cache import KVCacheInputsPerDevice, MHAKVCacheParams
from max.nn.norm import RMSNorm

from attnquant.config_values import Activation
from attnquant.kernels import extensions
from attnquant.kernels.codec import encode
from attnquant.nn.attention import Attention
from attnquant.nn.layer import DecoderLayer
from attnquant.nn.mlp import GatedMLP
from attnquant.nn.projection import Projection, Storage
from attnquant.nn.rotary import rotary_table
from tests.kernels.cached import Array, CachedGraph

HOST = DeviceRef.CPU()
POSITIONS, EPS = 512, 1e-5
TOLERANCE = 1e-5

# New tokens of three sequences, step by step; 32 and more rows are multiplied another way.
STEPS = ((3, 70, 200), (1, 1, 1), (4, 1, 9), (1, 1, 1))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer; its sizes are no multiples of what a register holds."""

    hidden: int = 80
    inner: int = 208
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    window: int | None = None
    has_values: bool = True
    value_eps: float | None = None
    norms_after: bool = True
    scalar: bool = False
    activation: Activation = "gelu_pytorch_tanh"
    gain_offset: float = 0.0

    @property
    def kv_params(self) -> MHAKVCacheParams:
        return MHAKVCacheParams(
            dtype=DType.float32,
            n_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_layers=1,
            devices=[HOST],
        )

    @property
    def projections(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Rows of the parts, and columns."""
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        qkv = (q, k, k) if self.has_values else (q, k)
        return {
            "qkv_proj" if self.has_values else "qk_proj": (qkv, self.hidden),
            "o_proj": ((self.hidden,), q),
            "gate_up_proj": ((self.inner, self.inner), self.hidden),
            "down_proj": ((self.hidden,), self.inner),
        }

    @property
    def norms(self) -> dict[str, int]:
        names = ["input_layernorm", "post_attention_layernorm"]
        if self.norms_after:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        heads = {"q_norm": self.head_dim, "k_norm": self.head_dim}
        return heads | dict.fromkeys(names, self.hidden)

    def module(self) -> DecoderLayer:
        made = {
            name: Projection(
                roles=[f"part{index}" for index in range(len(rows))],
                rows=rows,
                columns=columns,
                dtype=DType.float32,
                device=HOST,
                storage=Storage.NVFP4,
            )
            for name, (rows, columns) in self.projections.items()
        }
        norms = {
            name: RMSNorm(width, DType.float32, EPS, weight_offset=self.gain_offset)
            for name, width in self.norms.items()
        }
        after = {
            name: norms.get(name)
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        }
        return DecoderLayer(
            self_attn=Attention(
                qkv_proj=made["qkv_proj" if self.has_values else "qk_proj"],
                o_proj=made["o_proj"],
                q_norm=norms["q_norm"],
                k_norm=norms["k_norm"],
                kv_params=self.kv_params,
                scale=self.head_dim**-0.5,
                window=self.window,
                value_eps=self.value_eps,
            ),
            mlp=GatedMLP(
                gate_up_proj=made["gate_up_proj"],
                down_proj=made["down_proj"],
                activation=self.activation,
            ),
            input_layernorm=norms["input_layernorm"],
            post_attention_layernorm=norms["post_attention_layernorm"],
            **after,
        )

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """By where they are in the module: unequal global scales, gains far from 1."""
        rng = np.random.default_rng(self.hidden)
        weights: dict[str, np.ndarray[Any, Any]] = {}
        for name, (rows, columns) in self.projections.items():
            parts = [
                encode(
                    (rng.standard_normal((count, columns)) * size).astype(np.float32),
                    scales="absmax",
                )
                for count, size in zip(rows, (0.05, 0.3, 0.02), strict=False)
            ]
            block = "mlp" if name in ("gate_up_proj", "down_proj") else "self_attn"
            weights[f"{block}.{name}.codes"] = np.concatenate([part.codes for part in parts])
            scales = [part.block_scales.view(np.uint8) for part in parts]
            weights[f"{block}.{name}.block_scales"] = np.concatenate(scales)
            weights[f"{block}.{name}.global_scales"] = np.concatenate(
                [part.global_scales for part in parts]
            )
        for name, width in self.norms.items():
            path = f"self_attn.{name}" if name in ("q_norm", "k_norm") else name
            gain = rng.uniform(0.3, 3.0, width).astype(np.float32)
            weights[f"{path}.weight"] = gain
        if self.scalar:
            weights["layer_scalar"] = np.array([0.07], np.float32)
        return weights

    def graph(self, *, in_one: bool) -> Graph:
        weights = self.weights()
        dtypes = {np.dtype(np.uint8): DType.uint8, np.dtype(np.float32): DType.float32}
        types = [
            TensorType(DType.float32, ("tokens", self.hidden), HOST),
            TensorType(DType.uint32, ("offsets",), HOST),
            TensorType(DType.float32, (POSITIONS, self.head_dim), HOST),
            *(TensorType(dtypes[value.dtype], value.shape, HOST) for value in weights.values()),
        ]
        kv_types = tree.leaves(self.kv_params.get_symbolic_inputs())
        with Graph(
            "layer", input_types=[*types, *kv_types], custom_extensions=[extensions()]
        ) as graph:
            x, offsets, table, *values = (value.tensor for value in graph.inputs[: len(types)])
            kv = self.kv_params.unflatten_kv_inputs(iter(graph.inputs[len(types) :]))
            module = self.module()
            for name, value in zip(weights, values, strict=True):
                *path, attribute = name.split(".")
                owner: Any = module
                for step in path:
                    owner = getattr(owner, step)
                setattr(owner, attribute, value)
            cache = (
                tree.leaves(kv, leaf=KVCacheInputsPerDevice)[0],
                offsets,
                table,
                ops.constant(0, DType.uint32, device=HOST),
            )
            graph.output(module(x, *cache) if in_one else module.in_parts(x, *cache))
        assert ("attnquant_layer" in str(graph)) == in_one
        return graph

    def run(self, *, in_one: bool) -> list[Array]:
        """The layer's results, step by step."""
        graph = self.graph(in_one=in_one)
        runner = CachedGraph(self.kv_params, graph, sequences=len(STEPS[0]), positions=POSITIONS)
        table = rotary_table(theta=1e4, head_dim=self.head_dim, positions=POSITIONS)
        rng = np.random.default_rng(1)
        found = []
        for index, counts in enumerate(STEPS):
            if index:
                runner.advance(counts)
            new = [
                (3 * rng.standard_normal((count, self.hidden))).astype(np.float32)
                for count in counts
            ]
            found.append(runner.step(new, table, *self.weights().values()))
        return found


CASES = {
    "gemma3": Case(window=100, gain_offset=1.0),
    "gemma4, shared values": Case(has_values=False, value_eps=EPS, scalar=True),
    "gemma4, own values": Case(window=16, value_eps=EPS, scalar=True, hidden=144, inner=48),
    "qwen3": Case(norms_after=False, activation="silu", heads=4, kv_heads=4),
}


@pytest.mark.parametrize("name", CASES)
def test_one_operation_equals_the_modules(name: str) -> None:
    case = CASES[name]
    for one, parts in zip(case.run(in_one=True), case.run(in_one=False), strict=True):
        assert np.abs(one - parts).max() < TOLERANCE * np.abs(parts).max()
