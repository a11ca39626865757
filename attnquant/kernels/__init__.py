"""Mojo kernels, and the Python functions that put them into a graph or run them on the host."""

from pathlib import Path

EXTENSIONS = Path(__file__).parent / "mojo"
"""The folder of Mojo sources: pass it as `custom_extensions` wherever a graph uses our ops."""
