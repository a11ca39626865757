"""Quantizing a decoder's projections while its checkpoint loads, and saying what that did."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
from max.driver import is_virtual_device_mode
from max.dtype import DType
from max.graph.weights import WeightData
from numpy.typing import NDArray
from tqdm import tqdm

from attnquant.checkpoint.nvfp4_layouts import (
    INPUT_SCALE,
    StoredWeight,
    load_input_scale,
    load_nvfp4,
)
from attnquant.decoder_shapes import DecoderShapes
from attnquant.kernels.codec import encode, largest_magnitude, relative_error
from attnquant.nn.packed_cache import PackedCache
from attnquant.nn.tensors import State, from_numpy, to_numpy
from attnquant.nvfp4.accounting import BFLOAT16_BYTES, token_bytes
from attnquant.nvfp4.coverage import LM_HEAD, Coverage
from attnquant.nvfp4.format import NVFP4Weight, empty_parts
from attnquant.nvfp4.profile import Profile, search_of
from attnquant.nvfp4.report import LoadReport, ProjectionRecord
from attnquant.projections import ProjectionKey
from attnquant.settings import QuantScales


class Quantizer:
    """Packs fused groups, one after the other, behind a progress bar; reports at the end.

    A context manager: the report is printed, to stderr, when it is left without an error.

    Args:
        coverage: what runs from NVFP4.
        shapes: of the decoder.
        scales: how block scales are chosen.
        data: the checkpoint's tensors, by name.
        profile: what `profile` scales are searched with.
        cache: where packed weights are kept, and taken from if they are there.
    """

    def __init__(
        self,
        coverage: Coverage,
        shapes: DecoderShapes,
        scales: QuantScales,
        data: Mapping[str, WeightData],
        profile: Profile | None = None,
        cache: PackedCache | None = None,
    ) -> None:
        self._coverage = coverage
        self._shapes = shapes
        self._scales = scales
        self._data = data
        self._profile = profile
        self._cache = cache
        self._filled = cache if cache is not None and cache.is_filled else None
        self._kept: State = {}
        self._errors: dict[str, list[float | None]] = {}
        self._encodes = False
        self._records: list[ProjectionRecord] = []
        self._beside = 0
        self._start = time.monotonic()
        self._bar = tqdm(
            total=len(coverage.quantized),
            desc="NVFP4",
            unit="projection",
            disable=None if coverage.quantized else True,
        )

    def __enter__(self) -> Quantizer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
        if error is not None:
            return
        if self._cache is not None and self._encodes:
            self._cache.keep(self._kept, self._errors)
        if self._records:
            print(self._report().render(), file=sys.stderr)

    def group(
        self,
        module: str,
        parts: Mapping[ProjectionKey, StoredWeight],
        layers: Sequence[int] | None = None,
    ) -> State:
        """The packed tensors of one fused group.

        Dense parts share one global scale; a part that the checkpoint holds in NVFP4 keeps its own.

        Args:
            module: the path that the tensors get.
            parts: how each part is stored.
            layers: those that share the group, if it is a block of theta bundles.

        Raises:
            CheckpointError: a weight or a scale is NaN or infinite; names the tensor.
        """
        # Compiling for a device that is elsewhere needs the shapes only.
        if is_virtual_device_mode():
            return _state(module, empty_parts([part.shape for part in parts.values()]))
        if self._filled is not None:
            state, errors = self._filled.group(module)
        else:
            state, errors = self._packed(module, parts)
            self._keep(module, state, errors)
        for (key, part), error in zip(parts.items(), errors, strict=True):
            for layer in (key.layer,) if layers is None else layers:
                self._records.append(
                    ProjectionRecord(
                        key=replace(key, layer=layer), shape=part.shape, relative_error=error
                    )
                )
                self._bar.update()
        return state

    def _packed(
        self, module: str, parts: Mapping[ProjectionKey, StoredWeight]
    ) -> tuple[State, list[float | None]]:
        """The packed tensors, and each part's relative error; None if the file has it packed."""
        dense = [part.names[0] for part in parts.values() if not part.is_nvfp4]
        amax = max((self._largest(name) for name in dense), default=0.0)
        importance = None if self._profile is None else self._profile.importance(module)
        packed: list[NVFP4Weight] = []
        errors: list[float | None] = []
        for part in parts.values():
            if part.is_nvfp4:
                packed.append(load_nvfp4(part, self._array))
                errors.append(None)
            else:
                packed.append(self._encoded(part.names[0], amax, importance))
                errors.append(relative_error(self._array(part.names[0]), packed[-1]))
        scale = self._input_scale(module, parts.values())
        return _state(module, NVFP4Weight.stack(packed), scale), errors

    def _input_scale(self, module: str, parts: Collection[StoredWeight]) -> float:
        """The global scale of a group's input: the largest of its members', which clips nothing."""
        stored = [load_input_scale(part, self._array) for part in parts if part.is_nvfp4]
        if self._profile is not None:
            stored.append(self._profile.input_scale(module))
        return max(stored, default=INPUT_SCALE)

    def beside(self, numbers: int) -> None:
        """Counts numbers that a token reads beside the packed weights: theta corrections."""
        self._beside += BFLOAT16_BYTES * numbers

    def head(self, weight: StoredWeight) -> State:
        """The packed output head."""
        if is_virtual_device_mode():
            return _state(LM_HEAD, empty_parts([weight.shape]))
        if self._filled is not None:
            return self._filled.group(LM_HEAD)[0]
        packed = (
            load_nvfp4(weight, self._array) if weight.is_nvfp4 else self._encoded(weight.names[0])
        )
        state = _state(LM_HEAD, packed)
        self._keep(LM_HEAD, state, [None])
        return state

    def _keep(self, module: str, state: State, errors: list[float | None]) -> None:
        if self._cache is not None:
            self._kept |= state
            self._errors[module] = errors

    def _array(self, name: str) -> NDArray[Any]:
        return to_numpy(self._data[name])

    def _largest(self, name: str) -> float:
        return float(largest_magnitude(self._array(name), name=name))

    def _encoded(
        self,
        name: str,
        amax: float | None = None,
        importance: NDArray[np.float32] | None = None,
    ) -> NVFP4Weight:
        self._encodes = True
        return encode(
            self._array(name),
            scales=search_of(self._scales),
            amax=amax,
            importance=importance,
            name=name,
        )

    def _report(self) -> LoadReport:
        left = [
            ProjectionRecord(key=key, shape=self._shapes.projections[key], left=reason)
            for key, reason in self._coverage.reasons.items()
            if reason is not None
        ]
        return LoadReport(
            records=self._records + left,
            before=token_bytes(self._shapes).total,
            after=token_bytes(self._shapes, self._coverage).total + self._beside,
            scales=self._scales,
            kept=self._filled is not None,
            seconds=time.monotonic() - self._start,
        )


def _state(module: str, packed: NVFP4Weight, input_scale: float = INPUT_SCALE) -> State:
    tensors = {
        "codes": (packed.codes, DType.uint8),
        "block_scales": (packed.block_scales.view("u1"), DType.uint8),
        "global_scales": (packed.global_scales, DType.float32),
        "input_scale": (np.array([input_scale], np.float32), DType.float32),
    }
    return {
        f"{module}.{name}": from_numpy(array, dtype, f"{module}.{name}")
        for name, (array, dtype) in tensors.items()
    }
