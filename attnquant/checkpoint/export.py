"""Writes a dense checkpoint again with its projections in NVFP4, in ModelOpt's layout.

Every quantized fused group is encoded with the scale that its members share at load, so that
loading the export gives the very bits that quantizing at load gives. A group's tensors stay in one
shard and are made one group at a time; everything that is not quantized is copied from the mapped
file. The encoder is given, since it is a kernel and this package knows none.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import attnquant
from attnquant.checkpoint.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    QUANT_CONFIG_FILE,
    WEIGHT_SUFFIXES,
    Checkpoint,
    contained,
)
from attnquant.checkpoint.nvfp4_layouts import (
    INPUT_SCALE,
    StoredWeight,
    modelopt_specs,
    modelopt_tensors,
)
from attnquant.checkpoint.safetensors import where
from attnquant.checkpoint.theta_layout import StoredBundle
from attnquant.checkpoint.verify import verify_decoder
from attnquant.checkpoint.writer import SHARD_BYTES, Content, TensorGroup, write_checkpoint
from attnquant.decoder_shapes import DecoderShapes
from attnquant.errors import CheckpointError
from attnquant.nvfp4.coverage import Coverage
from attnquant.nvfp4.format import BLOCK_SIZE, NVFP4Weight
from attnquant.nvfp4.reference import largest_magnitude
from attnquant.projections import BLOCK_OF_ROLE, PREFIXES, ProjectionKey, strip_prefix


class Encode(Protocol):
    """An encoder of one projection, such as `attnquant.nvfp4.reference.encode`."""

    def __call__(self, weight: NDArray[Any], *, amax: float, name: str) -> NVFP4Weight:
        """Quantizes `[out, in]`; `amax` is the fused group's largest magnitude."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export did.

    Attributes:
        coverage: what was quantized.
        before: bytes of the source's tensors.
        after: bytes of the export's tensors.
    """

    coverage: Coverage
    before: int
    after: int


def export_nvfp4(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    encode: Encode,
    largest_magnitude: Callable[..., float | np.float32] = largest_magnitude,
    recipe: Mapping[str, Any],
    ignore: Collection[str] = (),
    input_scale: Callable[[str], float] = lambda _: INPUT_SCALE,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], object] = lambda _: None,
) -> ExportReport:
    """Quantizes a checkpoint of a supported decoder into a new directory.

    Args:
        source: a dense checkpoint's directory; it is only read.
        target: the new directory.
        encode: the encoder, of `attnquant.kernels.codec` for speed.
        largest_magnitude: likewise, `attnquant.nvfp4.reference.largest_magnitude` or its equal.
        recipe: what else decides the encoder's output (how scales are chosen), so that a killed
            export is resumed only by an equal one.
        ignore: patterns of projections that stay as they are.
        input_scale: the global scale of a projection's input, by the name of its weight.
        shard_bytes: the largest shard.
        progress: told the bytes of every tensor that is in place.

    Raises:
        CheckpointError: the source cannot be used, or is quantized already; the target exists or
            cannot be written; a weight is NaN or infinite.
        SettingsError: a pattern matches nothing.
        UnsupportedError: attnquant does not serve this architecture.
    """
    checkpoint = Checkpoint.open(source)
    shapes = DecoderShapes.from_config(checkpoint.config)
    stored = dense_weights(checkpoint, shapes)
    coverage = Coverage.of(shapes.projections, ignore=ignore, source="--ignore")
    groups = list(
        _groups(
            checkpoint,
            stored,
            coverage,
            partial(_encoded, checkpoint, encode, largest_magnitude, input_scale),
        )
    )
    ignored = _ignored_modules(checkpoint.tensors, stored, coverage)
    return write_export(
        checkpoint,
        target,
        groups,
        coverage=coverage,
        files=_configs(checkpoint.config, ignored),
        recipe=recipe,
        shard_bytes=shard_bytes,
        progress=progress,
    )


def write_export(
    checkpoint: Checkpoint,
    target: str | os.PathLike[str],
    groups: Sequence[TensorGroup],
    *,
    coverage: Coverage,
    files: Mapping[str, Content],
    recipe: Mapping[str, Any],
    shard_bytes: int,
    progress: Callable[[int], object],
) -> ExportReport:
    """Writes an export's tensors, with the source's other files.

    Args:
        checkpoint: the source.
        target: the new directory.
        groups: the export's tensors.
        coverage: what is quantized.
        files: the export's own configs, by name.
        recipe: as in `export_nvfp4`.
        shard_bytes: likewise.
        progress: likewise.

    Raises:
        CheckpointError: the target exists or cannot be written.
    """
    write_checkpoint(
        Path(target),
        groups,
        files={**other_files(checkpoint.directory), **files},
        recipe={**recipe, "version": attnquant.__version__, "source": identity(checkpoint)},
        shard_bytes=shard_bytes,
        progress=progress,
    )
    return ExportReport(
        coverage=coverage,
        before=sum(info.nbytes for info in checkpoint.tensors.values()),
        after=sum(group.nbytes for group in groups),
    )


def dense_weights(checkpoint: Checkpoint, shapes: DecoderShapes) -> dict[str, StoredWeight]:
    """How the linear weights of a checkpoint that is to be exported are stored: all of them dense.

    Raises:
        CheckpointError: the checkpoint is not the decoder that its config.json describes, or is
            one that attnquant or another tool exported.
    """
    stored = verify_decoder(checkpoint, shapes)
    for weight in stored.values():
        bundle = isinstance(weight, StoredBundle)
        if bundle or weight.is_nvfp4:
            raise CheckpointError(
                f"{where(weight.names[0], checkpoint.info(weight.names[0]))}: found "
                f"{'a theta bundle' if bundle else 'NVFP4'}, expected a dense weight; this "
                "checkpoint can be served as it is"
            )
    return stored


def _groups(
    checkpoint: Checkpoint,
    stored: Mapping[str, StoredWeight],
    coverage: Coverage,
    encoded: Callable[[tuple[StoredWeight, ...]], Iterator[tuple[str, NDArray[Any]]]],
) -> Iterator[TensorGroup]:
    """The export's tensors in the order of the source's, each group where its first member lay."""
    group_of: dict[str, tuple[StoredWeight, ...]] = {}
    for layer in sorted({key.layer for key in coverage.reasons}):
        for group in coverage.groups(layer):
            if group.quantized:
                keys = [ProjectionKey(layer=layer, role=role) for role in group.roles]
                members = tuple(stored[key.module] for key in keys)
                group_of |= {member.names[0]: members for member in members}
    done: set[str] = set()
    for name, info in checkpoint.tensors.items():
        if name in group_of:
            members = group_of[name]
            if members[0].module not in done:
                done.add(members[0].module)
                yield TensorGroup(
                    specs={
                        tensor: spec
                        for member in members
                        for tensor, spec in modelopt_specs(member.module, member.shape).items()
                    },
                    make=partial(encoded, members),
                )
        else:
            yield TensorGroup(specs={name: info}, make=partial(copied, checkpoint, name))


def _encoded(
    checkpoint: Checkpoint,
    encode: Encode,
    largest_magnitude: Callable[..., float | np.float32],
    input_scale: Callable[[str], float],
    members: tuple[StoredWeight, ...],
) -> Iterator[tuple[str, NDArray[Any]]]:
    names = [member.names[0] for member in members]
    amax = max(float(largest_magnitude(checkpoint.array(name), name=name)) for name in names)
    for member, name in zip(members, names, strict=True):
        quantized = encode(checkpoint.array(name), amax=amax, name=name)
        checkpoint.release(name)
        yield from modelopt_tensors(member.module, quantized, input_scale(name))


def copied(checkpoint: Checkpoint, name: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """A tensor of the source, as it is."""
    yield name, checkpoint.array(name)
    checkpoint.release(name)


def _ignored_modules(
    tensors: Iterable[str], stored: Mapping[str, StoredWeight], coverage: Coverage
) -> list[str]:
    """What stays dense, as ModelOpt lists it: blocks as globs, single projections by name.

    MAX takes a whole attention or MLP as unquantized only if one pattern matches all of it.
    """
    blocks: dict[tuple[int, str], list[ProjectionKey]] = {}
    for key in coverage.reasons:
        blocks.setdefault((key.layer, BLOCK_OF_ROLE[key.role]), []).append(key)
    ignored = ["lm_head"]
    for keys in blocks.values():
        left = [key for key in keys if not coverage.is_quantized(key)]
        modules = [stored[key.module].module for key in left]
        whole = len(left) == len(keys)
        ignored += [f"{modules[0].rpartition('.')[0]}*"] if whole else modules
    return ignored + sorted({f"{_tower(name)}*" for name in tensors if _is_outside(name)})


def _is_outside(name: str) -> bool:
    """Whether a tensor belongs to a tower beside the decoder (vision, audio)."""
    return strip_prefix(name).split(".")[0] not in ("layers", "embed_tokens", "norm", "lm_head")


def _tower(name: str) -> str:
    """`model.vision_tower` of `model.vision_tower.encoder.layers.0.mlp.fc1.weight`."""
    prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    return prefix + name.removeprefix(prefix).split(".")[0]


def _configs(config: Mapping[str, Any], ignored: list[str]) -> dict[str, bytes]:
    """config.json and hf_quant_config.json of the export, as ModelOpt writes them.

    `input_activations` is for servers whose kernels quantize activations too.
    """
    producer = {"name": "attnquant", "version": attnquant.__version__}
    scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": BLOCK_SIZE,
        "ignore": ignored,
        "config_groups": {
            "group_0": {"input_activations": scheme, "weights": scheme, "targets": ["Linear"]}
        },
        "producer": producer,
    }
    older = {
        "producer": producer,
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": BLOCK_SIZE,
            "exclude_modules": ignored,
        },
    }
    merged = {**copy.deepcopy(dict(config)), "quantization_config": quantization}
    return {CONFIG_FILE: to_json(merged), QUANT_CONFIG_FILE: to_json(older)}


def to_json(value: Mapping[str, Any]) -> bytes:
    """A JSON file's bytes."""
    return json.dumps(value, indent=2).encode() + b"\n"


def other_files(directory: Path) -> dict[str, Content]:
    """Tokenizer, templates, licence and the like: every file but weights and hidden ones."""
    files: dict[str, Content] = {}
    for root, folders, names in os.walk(directory):
        folders[:] = [folder for folder in sorted(folders) if not folder.startswith(".")]
        for path in (Path(root) / name for name in sorted(names)):
            name = path.relative_to(directory).as_posix()
            weights = path.suffix in WEIGHT_SUFFIXES or name == INDEX_FILE
            if not weights and not path.name.startswith(".") and path.is_file():
                files[name] = contained(directory, name)
    return files


def identity(checkpoint: Checkpoint) -> list[list[Any]]:
    """Size and time of every weight file: a resumed export must read what the first one read."""
    files = sorted({info.file for info in checkpoint.tensors.values()})
    return [
        [str(file.resolve()), (status := file.stat()).st_size, status.st_mtime_ns] for file in files
    ]
