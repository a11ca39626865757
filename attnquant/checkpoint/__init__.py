"""Checkpoints on disk: safetensors in and out, and the layouts of NVFP4 and theta tensors."""

from attnquant.checkpoint.checkpoint import Checkpoint
from attnquant.checkpoint.safetensors import TensorInfo

__all__ = ["Checkpoint", "TensorInfo"]
