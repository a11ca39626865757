"""Random arrays that are the same bits on every platform and with every NumPy.

NumPy promises the raw stream of a bit generator, not what `Generator.standard_normal` makes of it.
So each value here is exact arithmetic on raw bits: a uniform is 53 bits of one word, and a
"Gaussian" is the sum of a word's four 16-bit parts (Irwin-Hall, within 3.46 standard deviations),
with no transcendental function whose last bit could depend on the C library.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def _words(key: str, count: int) -> NDArray[np.uint64]:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
    return np.random.PCG64(seed).random_raw(count).astype("<u8")


def uniform(key: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Values in [0, 1), a different stream for every key."""
    words = _words(key, int(np.prod(shape)))
    return ((words >> np.uint64(11)) * 2.0**-53).reshape(shape)


def gaussian(key: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Values of mean 0 and variance 1, a different stream for every key."""
    parts = _words(key, int(np.prod(shape))).view("<u2").reshape(*shape, 4)
    total = parts.astype(np.int64).sum(axis=-1)
    # A uniform on 0..65535 has mean 65535/2 and variance (2^32 - 1)/12.
    return (total - 2 * 65535) / np.sqrt(4 * (2.0**32 - 1) / 12)


def integers(key: str, low: int, high: int, count: int) -> list[int]:
    """Whole numbers from low to high - 1."""
    return [low + int(word % np.uint64(high - low)) for word in _words(key, count)]
