"""Quantizing a decoder's projections while its checkpoint loads, and saying what that did."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from max.driver import is_virtual_device_mode
from max.dtype import DType
from max.graph.weights import WeightData
from tqdm import tqdm

from attnquant.decoder_shapes import DecoderShapes
from attnquant.kernels.codec import encode, largest_magnitude, relative_error
from attnquant.nn.tensors import State, from_numpy, to_numpy
from attnquant.nvfp4.accounting import token_bytes
from attnquant.nvfp4.coverage import Coverage
from attnquant.nvfp4.format import NVFP4Weight, empty_parts
from attnquant.nvfp4.report import LoadReport, ProjectionRecord
from attnquant.projections import ProjectionKey
from attnquant.settings import QuantScales, Settings


def coverage_of(settings: Settings, shapes: DecoderShapes) -> Coverage:
    """What the settings ask to be quantized.

    Raises:
        SettingsError: a pattern of ATTNQUANT_QUANT_IGNORE matches nothing.
    """
    if settings.quant == "none":
        return Coverage.none(shapes.projections)
    return Coverage.of(
        shapes.projections,
        ignore=settings.quant_ignore,
        head=shapes.head if settings.quant_lm_head == "nvfp4" else None,
    )


class Quantizer:
    """Encodes fused groups, one after the other, behind a progress bar; reports at the end.

    A context manager: the report is printed, to stderr, when it is left without an error.
    """

    def __init__(self, coverage: Coverage, shapes: DecoderShapes, scales: QuantScales) -> None:
        self._coverage = coverage
        self._shapes = shapes
        self._scales = scales
        self._records: list[ProjectionRecord] = []
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
        if error is None and self._records:
            print(self._report().render(), file=sys.stderr)

    def group(self, module: str, parts: Mapping[ProjectionKey, WeightData]) -> State:
        """The packed tensors of one fused group, whose parts share a global scale.

        Raises:
            CheckpointError: a weight is NaN or infinite; names the tensor and the place.
        """
        arrays = {key: to_numpy(weight) for key, weight in parts.items()}
        # Compiling for a device that is elsewhere needs the shapes only.
        if is_virtual_device_mode():
            return _state(module, empty_parts([array.shape for array in arrays.values()]))
        amax = max(largest_magnitude(array, name=parts[key].name) for key, array in arrays.items())
        packed = []
        for key, array in arrays.items():
            start = time.monotonic()
            packed.append(encode(array, scales=self._scales, amax=amax, name=parts[key].name))
            self._records.append(
                ProjectionRecord(
                    key=key,
                    shape=packed[-1].shape,
                    relative_error=relative_error(array, packed[-1]),
                    seconds=time.monotonic() - start,
                )
            )
            self._bar.update()
        return _state(module, NVFP4Weight.stack(packed))

    def head(self, weight: WeightData) -> State:
        """The packed output head."""
        if is_virtual_device_mode():
            return _state("lm_head", empty_parts([self._shapes.head]))
        return _state("lm_head", encode(to_numpy(weight), scales=self._scales, name=weight.name))

    def _report(self) -> LoadReport:
        left = [
            ProjectionRecord(key=key, shape=self._shapes.projections[key], left=reason)
            for key, reason in self._coverage.reasons.items()
            if reason is not None
        ]
        return LoadReport(
            records=self._records + left,
            before=token_bytes(self._shapes).total,
            after=token_bytes(self._shapes, self._coverage).total,
            seconds=time.monotonic() - self._start,
        )


def _state(module: str, packed: NVFP4Weight) -> State:
    tensors = {
        "codes": (packed.codes, DType.uint8),
        "block_scales": (packed.block_scales.view("u1"), DType.uint8),
        "global_scales": (packed.global_scales, DType.float32),
    }
    return {
        f"{module}.{name}": from_numpy(array, dtype, f"{module}.{name}")
        for name, (array, dtype) in tensors.items()
    }
