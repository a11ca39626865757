"""A packed projection's graph on a GPU with NVFP4 units, traced where there is none.

A virtual device is global state of a process, so the graph is traced in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
import json

from max import driver

driver.set_virtual_device_api("cuda")
driver.set_virtual_device_count(1)
driver.set_virtual_device_target_arch("sm_100a")

from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from attnquant.kernels import extensions
from attnquant.nn import Projection, Storage

gpu = DeviceRef.GPU()
projection = Projection(
    roles=("q_proj", "k_proj"),
    rows=(96, 32),
    columns=64,
    dtype=DType.bfloat16,
    device=gpu,
    storage=Storage.NVFP4,
)
x = TensorType(DType.bfloat16, ("tokens", 64), gpu)
with Graph("projection", input_types=[x], custom_extensions=[extensions()]) as graph:
    (product,) = [projection(value.tensor) for value in graph.inputs]
    graph.output(product)
weights = projection.raw_state_dict()
print(json.dumps({
    "weights": {name: [str(w.dtype), list(map(int, w.shape))] for name, w in weights.items()},
    "product": [str(product.dtype), str(product.shape)],
    "graph": str(graph),
}))
"""


def test_activations_are_quantized_under_an_input_scale() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        # Kernels that ran in this process set variables, below Python, that mislead another one.
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    traced = json.loads(done.stdout.splitlines()[-1])
    assert traced["weights"] == {
        "codes": ["DType.uint8", [128, 32]],
        "block_scales": ["DType.float8_e4m3fn", [128, 4]],
        "global_scales": ["DType.float32", [2]],
        "input_scale": ["DType.float32", [1]],
    }
    assert traced["product"][0] == "DType.bfloat16"
    assert "mo.matmul.dynamic.block.scaled" in traced["graph"]
    assert "mo.quantize.dynamic.block.scaled" in traced["graph"]
    assert "attnquant_nvfp4_matmul" not in traced["graph"]
