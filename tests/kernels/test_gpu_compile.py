"""`nvfp4_matmul` compiles for every GPU we name, on a machine without one.

A virtual device is global state of a process, so each target compiles in its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
import sys

from max import driver

api, architecture, dtype, columns = sys.argv[1:]
driver.set_virtual_device_api(api)
driver.set_virtual_device_count(1)
driver.set_virtual_device_target_arch(architecture)

from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

from attnquant.kernels import extensions
from attnquant.kernels.ops import NVFP4Kernel, nvfp4_matmul

gpu, dtype, columns = DeviceRef.GPU(), DType[dtype], int(columns)
kernel = NVFP4Kernel.of(gpu, dtype, 640, columns)
types = [
    TensorType(dtype, ("vectors", columns), gpu),
    TensorType(DType.uint8, (640, columns // 2), gpu),
    TensorType(kernel.scale_dtype, (640, columns // 16), gpu),
    TensorType(DType.float32, (2,), gpu),
]
with Graph("projection", input_types=types, custom_extensions=[extensions()]) as graph:
    graph.output(nvfp4_matmul(*(value.tensor for value in graph.inputs), part_rows=(600, 40)))
InferenceSession(devices=[driver.Accelerator()]).load(graph)
print("compiled for", architecture, kernel.name, flush=True)
# MAX 26.7 now and then aborts while such a process takes itself apart.
os._exit(0)
"""


@pytest.mark.parametrize(
    ("api", "architecture", "dtype", "columns"),
    [
        pytest.param("cuda", "sm_90a", "bfloat16", 640, id="sm_90a"),
        pytest.param("hip", "gfx942", "bfloat16", 640, id="gfx942", marks=pytest.mark.slow),
        pytest.param("cuda", "sm_80", "bfloat16", 640, id="sm_80", marks=pytest.mark.slow),
        pytest.param("cuda", "sm_100a", "bfloat16", 640, id="sm_100a", marks=pytest.mark.slow),
        pytest.param("cuda", "sm_120a", "bfloat16", 640, id="sm_120a", marks=pytest.mark.slow),
        # Float32 activations, and rows that do not start at multiples of 16 bytes.
        pytest.param("cuda", "sm_80", "float32", 656, id="odd-float32", marks=pytest.mark.slow),
        pytest.param("hip", "gfx942", "bfloat16", 656, id="odd-amd", marks=pytest.mark.slow),
    ],
)
def test_compiles(api: str, architecture: str, dtype: str, columns: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, api, architecture, dtype, str(columns)],
        # Kernels that ran in this process set variables, below Python, that mislead another one.
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kernel = "MAX_BLOCK_SCALED" if "sm_100" in architecture else "WEIGHT_ONLY"
    assert f"compiled for {architecture} {kernel}" in done.stdout
