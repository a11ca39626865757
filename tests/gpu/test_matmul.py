"""The GPU's product of packed weights against the CPU's.

The CPU twin is tests/kernels/test_matmul.py; tests/kernels/test_gpu_compile.py compiles it for GPUs
that are elsewhere.
"""

from __future__ import annotations

import numpy as np
import pytest
from max.driver import CPU, Accelerator, accelerator_count
from max.dtype import DType
from max.graph import DeviceRef

from attnquant.kernels.ops import NVFP4Kernel
from attnquant.nvfp4 import reference
from tests.kernels.test_matmul import CASES, MARGIN, VECTORS, Multiply, multiplier, random_vectors

pytestmark = pytest.mark.skipif(not accelerator_count(), reason="needs a GPU that MAX supports")


@pytest.fixture(scope="module")
def on_gpu() -> Multiply:
    return multiplier(Accelerator())


@pytest.fixture(scope="module")
def on_cpu() -> Multiply:
    return multiplier(CPU())


@pytest.mark.parametrize("count", VECTORS)
def test_equals_the_cpu(on_gpu: Multiply, on_cpu: Multiply, count: int) -> None:
    xs = random_vectors(count)
    expected = on_cpu(xs)
    for name, product in on_gpu(xs).items():
        case = CASES[name]
        x = xs[name][:, MARGIN:-MARGIN] if case.sliced else xs[name]
        weight = np.abs(reference.decode(case.weight).astype(np.float64))
        kernel = NVFP4Kernel.of(DeviceRef.GPU(), case.dtype, *case.weight.shape)
        # float32 sums of a thousand products, on both sides; NVFP4 keeps 3 bits.
        step = 0.25 if kernel.quantizes_activations else 2.0**-13
        bound = step * np.abs(x).astype(np.float64) @ weight.T
        if case.dtype == DType.bfloat16:
            bound += 2.0**-7 * np.abs(expected[name])
        assert (np.abs(product - expected[name]) <= bound).all(), name
