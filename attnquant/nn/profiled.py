"""The profile of a checkpoint: from the cache, or made now from the tensors that are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any

import numpy as np
from max.driver import CPU, Accelerator, Device
from max.graph.weights import WeightData
from numpy.typing import NDArray
from platformdirs import user_cache_path

from attnquant.checkpoint.nvfp4_layouts import StoredWeight, load_nvfp4
from attnquant.errors import CheckpointError
from attnquant.kernels.codec import decode
from attnquant.nn.config import DecoderConfig
from attnquant.nn.profile import profile_decoder
from attnquant.nn.tensors import State, from_numpy, numpy_dtype, to_numpy
from attnquant.nvfp4.profile import SEED, SEQUENCE_TOKENS, Profile
from attnquant.projections import ProjectionKey, fused_groups, group_module
from attnquant.whole_file import write_whole

# Of what a profile is: another one, where the code that makes it changes.
_VERSION = 2

# Of each tensor so much is read to tell checkpoints apart: training leaves none of it as it was.
_SAMPLES, _SAMPLE_BYTES = 16, 4096


class LoadedDecoder:
    """A decoder's tensors, as its profile needs them.

    Args:
        config: the decoder's configuration.
        data: the checkpoint's tensors, by their names there.
        names: where the embedding and the norms are there, by their names below the decoder.
        stored: how each projection is stored, by module path.
    """

    def __init__(
        self,
        config: DecoderConfig,
        data: Mapping[str, WeightData],
        names: Mapping[str, str],
        stored: Mapping[str, StoredWeight],
    ) -> None:
        self._config = config
        self._data = data
        self._names = names
        self._stored = stored
        self._numpy_dtype = numpy_dtype(config.dtype)

    def profile(self, tokens: int, seed: int = SEED) -> Profile:
        """The profile of so many random tokens, which is made once for a checkpoint and a device.

        A cache that cannot be written is no reason to fail.

        Raises:
            CheckpointError: a packed weight's scale is NaN or infinite; names the tensor.
        """
        name = f"{self._digest(tokens, seed, _device(self._config))}.npz"
        path = user_cache_path("attnquant") / "profiles" / name
        if path.is_file():
            try:
                return Profile.load(path)
            except CheckpointError:
                path.unlink(missing_ok=True)
        profile = self.make_profile(tokens, seed)
        with suppress(OSError):
            write_whole(path, profile.save)
        return profile

    def make_profile(self, tokens: int, seed: int = SEED) -> Profile:
        """The same, made anew.

        Raises:
            CheckpointError: as `profile` does.
        """
        return profile_decoder(
            self._config,
            self._layer,
            self._embeddings,
            tokens=tokens,
            device=_device(self._config),
            seed=seed,
        )

    def _layer(self, index: int) -> State:
        """A layer's tensors, copied: a mapped file's memory is aligned for nobody."""
        layer = self._config.shapes.layers[index]
        arrays = {
            name: to_numpy(self._data[self._names[f"layers.{index}.{name}"]]).astype(
                self._numpy_dtype
            )
            for name in layer.vectors
        }
        for roles in fused_groups(tuple(layer.projections)):
            name = group_module(index, roles).removeprefix(f"layers.{index}.") + ".weight"
            keys = [ProjectionKey(layer=index, role=role) for role in roles]
            # Converted as they are stacked, so that no second copy of the layer is made.
            arrays[name] = np.concatenate(
                [self._weight(self._stored[key.module]) for key in keys],
                dtype=self._numpy_dtype,
                casting="unsafe",
            )
        return {name: from_numpy(array, self._config.dtype, name) for name, array in arrays.items()}

    def _weight(self, stored: StoredWeight) -> NDArray[Any]:
        def array(name: str) -> NDArray[Any]:
            return to_numpy(self._data[name])

        return decode(load_nvfp4(stored, array)) if stored.is_nvfp4 else array(stored.names[0])

    def _embeddings(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        """What `ScaledEmbedding` makes of token ids."""
        rows = to_numpy(self._data[self._names["embed_tokens.weight"]])[ids]
        scale = np.asarray(self._config.embedding_scale, self._numpy_dtype)
        product: NDArray[Any] = rows.astype(self._numpy_dtype) * scale
        return product

    def _digest(self, tokens: int, seed: int, device: Device) -> str:
        where = device.api if device.is_host else f"{device.api}:{device.architecture_name}"
        digest = sha256(
            repr((_VERSION, seed, SEQUENCE_TOKENS, tokens, self._numpy_dtype.str, where)).encode()
        )
        used = [*self._names.values(), *(n for one in self._stored.values() for n in one.names)]
        for name in sorted(set(used)):
            tensor = self._data[name]
            digest.update(repr((name, str(tensor.dtype), list(map(int, tensor.shape)))).encode())
            content = np.ravel(to_numpy(tensor)).view(np.uint8)
            step = max(1, content.size // _SAMPLES)
            for start in range(0, content.size, step):
                digest.update(content[start : start + _SAMPLE_BYTES].tobytes())
        return digest.hexdigest()[:32]


def _device(config: DecoderConfig) -> Device:
    (ref,) = config.devices
    return CPU() if ref.is_cpu() else Accelerator(ref.id)
