"""A graph of nothing but a decoder's projections: what a layer's matmuls compute and cost.

It compiles in seconds, where a decoder's graph takes minutes, and its results are the projections'
own, which a decoder's logits only hint at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue
from max.nn.layer import LayerList, Module
from numpy.typing import NDArray

from attnquant.decoder_shapes import DecoderShapes
from attnquant.kernels import extensions
from attnquant.nn import layer_projections
from attnquant.nn.tensors import State
from attnquant.nn.theta import theta_projections, use_blocks
from attnquant.projections import BLOCK_OF_ROLE, fused_groups, group_module

LAUNCHES = ("rmo.matmul", "mo.custom")
"""What runs as a kernel of its own. The compiler fuses elementwise operations into these."""


class _Layer(Module):
    """A place for projections."""

    def __call__(self) -> None:
        raise NotImplementedError


class Projections(Module):
    """All projections of some layers, each from an input of its own.

    Args:
        shapes: of the decoder.
        layers: which of its layers.
        tensors: the graph's weights, as `decoder_weights` gives them.
        groups: which fused groups, by their modules' names (`qkv_proj`); all if None.
    """

    def __init__(
        self,
        shapes: DecoderShapes,
        layers: range,
        tensors: State,
        groups: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        device = DeviceRef.CPU()
        self.layers = LayerList([_Layer() for _ in shapes.layers])
        self._groups: list[tuple[int, Any]] = []
        for index in layers:
            layer = self.layers[index]
            layer.self_attn, layer.mlp = _Layer(), _Layer()
            made = layer_projections(shapes, index, tensors, DType.float32, device)
            for roles in fused_groups(tuple(shapes.layers[index].projections)):
                name = group_module(index, roles).rpartition(".")[2]
                if groups is not None and name not in groups:
                    continue
                setattr(getattr(layer, BLOCK_OF_ROLE[roles[0]]), name, made[name])
                self._groups.append((shapes.layers[index].projections[roles[0]][1], made[name]))
        wanted = [weight for p in theta_projections(self) for weight in p.block]
        shared = {weight.name: weight for weight in wanted}
        self._blocks = [shared[weight.name] for weight in wanted]
        for name, weight in shared.items():
            setattr(self, name.replace(".", "_"), weight)
        names = self.raw_state_dict()
        self.load_state_dict({name: tensors[name] for name in names}, weight_alignment=1)

    def __call__(self, *inputs: Any) -> tuple[TensorValue, ...]:
        use_blocks(self, [TensorValue(weight) for weight in self._blocks])
        columns = {value.type.shape[1]: value.tensor for value in inputs}
        return tuple(group(columns[width]) for width, group in self._groups)

    @property
    def count(self) -> int:
        """How many outputs there are."""
        return len(self._groups)

    @property
    def widths(self) -> list[int]:
        """The inputs' widths, ascending."""
        return sorted({width for width, _ in self._groups})

    def graph(self) -> Graph:
        """The graph; its inputs are `[tokens, width]`, one for each of `widths`."""
        packed = any(name.endswith(".codes") for name in self.raw_state_dict())
        return _graph(self, self.widths, packed=packed)


def launches(graph: Graph) -> Counter[str]:
    """How many kernels a graph launches, by the names of their operations; subgraphs count once."""
    counts: Counter[str] = Counter()

    def visit(operation: Any) -> None:
        if operation.name in LAUNCHES:
            counts[operation.name] += 1
        for region in operation.regions:
            for block in region.blocks:
                for below in block.operations:
                    visit(below)

    visit(graph._mlir_op)
    return counts


class _Several(Module):
    """Modules side by side in one graph, from the same inputs."""

    def __init__(self, modules: Sequence[Projections]) -> None:
        super().__init__()
        self.members = LayerList(list(modules))

    def __call__(self, *inputs: Any) -> tuple[TensorValue, ...]:
        return tuple(output for member in self.members for output in member(*inputs))


def run(
    modules: Mapping[str, Projections], inputs: Mapping[int, NDArray[Any]]
) -> dict[str, list[NDArray[np.float32]]]:
    """Each module's projections of inputs `[tokens, width]`, given by width; compiles one graph."""
    tensors = {
        f"members.{index}.{name}": value
        for index, module in enumerate(modules.values())
        for name, value in module.state_dict(auto_initialize=False).items()
    }
    together = _Several(list(modules.values()))
    together.load_state_dict(tensors, weight_alignment=1)
    widths = next(iter(modules.values())).widths
    model = InferenceSession(devices=[CPU()]).load(
        _graph(together, widths, packed=any(name.endswith(".codes") for name in tensors)),
        weights_registry=together.state_dict(auto_initialize=False),
    )
    outputs = iter(model.execute(*(inputs[width] for width in widths)))
    return {
        name: [np.array(next(outputs).to_numpy()) for _ in range(module.count)]
        for name, module in modules.items()
    }


def _graph(module: Module, widths: Sequence[int], *, packed: bool) -> Graph:
    return Graph(
        "projections",
        module,
        input_types=[TensorType(DType.float32, ("tokens", n), DeviceRef.CPU()) for n in widths],
        custom_extensions=[extensions()] if packed else [],
    )
