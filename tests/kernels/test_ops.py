"""Which kernel runs packed weights, decided by the device alone."""

from __future__ import annotations

import logging

import pytest
from max.dtype import DType
from max.graph import DeviceRef

from attnquant.kernels import ops
from attnquant.kernels.ops import NVFP4Kernel
from attnquant.log import LOGGER


@pytest.mark.parametrize(
    ("api", "architecture", "expected"),
    [
        ("cuda", "sm_100a", NVFP4Kernel.MAX_BLOCK_SCALED),
        ("cuda", "sm_103a", NVFP4Kernel.MAX_BLOCK_SCALED),
        ("cuda", "sm_120a", NVFP4Kernel.WEIGHT_ONLY),
        ("cuda", "sm_90a", NVFP4Kernel.WEIGHT_ONLY),
        ("cuda", "sm_80", NVFP4Kernel.WEIGHT_ONLY),
        ("hip", "gfx942", NVFP4Kernel.WEIGHT_ONLY),
        ("metal", "5-metal4", NVFP4Kernel.MAX_APPLE),
        ("metal", "5", NVFP4Kernel.MAX_APPLE),
        ("metal", "4", NVFP4Kernel.WEIGHT_ONLY),
    ],
)
def test_the_device_decides(
    api: str, architecture: str, expected: NVFP4Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "accelerator_api", lambda: api)
    monkeypatch.setattr(ops, "accelerator_architecture_name", lambda: architecture)
    gpu = DeviceRef.GPU()
    assert NVFP4Kernel.of(gpu, DType.bfloat16, 640, 640) is expected
    # What MAX's kernels do not take, ours do.
    assert NVFP4Kernel.of(gpu, DType.float32, 640, 640) is NVFP4Kernel.WEIGHT_ONLY
    assert NVFP4Kernel.of(gpu, DType.bfloat16, 640, 656) is NVFP4Kernel.WEIGHT_ONLY
    assert NVFP4Kernel.of(gpu, DType.bfloat16, 636, 640) is NVFP4Kernel.WEIGHT_ONLY
    assert NVFP4Kernel.of(DeviceRef.CPU(), DType.bfloat16, 640, 640) is NVFP4Kernel.CPU


def test_the_log_says_once_which(caplog: pytest.LogCaptureFixture) -> None:
    ops.say_once.cache_clear()
    with caplog.at_level(logging.INFO, LOGGER):
        ops.say_once(NVFP4Kernel.CPU)
        ops.say_once(NVFP4Kernel.CPU)
    assert [record.getMessage() for record in caplog.records] == [
        "NVFP4 projections run on " + NVFP4Kernel.CPU.value
    ]
