"""How NVFP4 weights lie in checkpoints: ModelOpt's layout, compressed-tensors' layout, and none.

Both store E2M1 codes two a byte, the even column in the low nibble, and one E4M3 scale per 16
columns; NVFP4Weight takes these bytes as they are. They differ in names and in the global scale g:

                          codes          block scales  g                    activations
    ModelOpt              weight         weight_scale  weight_scale_2       input_scale
    compressed-tensors    weight_packed  weight_scale  weight_global_scale  input_global_scale

    ModelOpt:            W = code · block_scale · g
    compressed-tensors:  W = code · block_scale / g

NVFP4Weight multiplies, so what it holds for compressed-tensors is fl(1/g), the float32 nearest to
the reciprocal: codes and block scales keep their bits, and the scale is exact wherever 1/g is a
float32, and otherwise within 2^-24, relatively. ModelOpt's weights are exact, there and back.

An activation scale is the global scale of a projection's input, for kernels that quantize it too;
compressed-tensors has its reciprocal. Scales of a quantized key-value cache are recognised, and
ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnquant.checkpoint.json_file import quote
from attnquant.checkpoint.safetensors import TensorSpec, where
from attnquant.errors import CheckpointError
from attnquant.nvfp4.coverage import IGNORED, Coverage, declared_ignore
from attnquant.nvfp4.format import BLOCK_SIZE, NVFP4Weight
from attnquant.projections import parse_projection, strip_prefix

Layout = Literal["dense", "modelopt", "compressed-tensors"]

LM_HEAD = "lm_head"
DENSE_DTYPES = ("BF16", "F16", "F32")

# Without calibration there is no better activation scale; E4M3 block scales span 2^-9 to 448.
INPUT_SCALE = 1.0

# Codes, block scales, global scale (all required), activation scale (W4A16 files have none).
_SUFFIXES: dict[Layout, tuple[str, str, str, str]] = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": (
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "input_global_scale",
    ),
}

_CACHE_SCALE = re.compile(
    r".*\.self_attn\.(?:(?:q_proj|k_proj|v_proj|attn)\.)?(?:q|k|v|kv|prob)_scale"
    r"|.*\.self_attn\.(?:k_proj|v_proj)\.output_scale"
)


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """How one linear weight lies in a checkpoint.

    Attributes:
        module: its path in the checkpoint, with the checkpoint's prefix.
        shape: logical `(out, in)`.
        layout: dense, or which of the NVFP4 layouts.
        names: its tensors: the dense weight; or codes, block scales, global scale and, where there
            is one, activation scale.
    """

    module: str
    shape: tuple[int, int]
    layout: Layout
    names: tuple[str, ...]

    @property
    def is_nvfp4(self) -> bool:
        """Whether the checkpoint holds it in NVFP4."""
        return self.layout != "dense"


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of a quantized key-value cache, which no weight needs."""
    return _CACHE_SCALE.fullmatch(name) is not None


def stored_weights(
    tensors: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any] | None = None,
) -> dict[str, StoredWeight]:
    """How every projection, and the output head if it is there, lies in a checkpoint.

    Args:
        tensors: what the checkpoint's tensors are, by name.
        config: config.json.
        hf_quant_config: hf_quant_config.json, if there is one.

    Returns:
        By path below the decoder: `layers.3.self_attn.q_proj`, `lm_head`.

    Raises:
        CheckpointError: a weight's tensors are incomplete, or of the wrong shape or dtype, or
            contradict the quantization that the configs declare; names the tensor.
        UnsupportedError: the configs declare a quantization other than NVFP4.
    """
    declarations = [
        ("config.json", config.get("quantization_config"), declared_ignore(config)),
        (
            "hf_quant_config.json",
            (hf_quant_config or {}).get("quantization"),
            declared_ignore({}, hf_quant_config),
        ),
    ]
    modules: dict[str, dict[str, str]] = {}
    paths: dict[str, str] = {}
    for name in tensors:
        path, _, suffix = strip_prefix(name).rpartition(".")
        if (path == LM_HEAD or parse_projection(path)) and not is_cache_scale(name):
            module = name.removesuffix(f".{suffix}")
            if paths.setdefault(path, module) != module:
                raise CheckpointError(
                    f"{where(name, tensors[name])}: found {quote(paths[path])} too, the same "
                    "weight under another prefix; remove one of the two"
                )
            modules.setdefault(path, {})[suffix] = name
    weights = {path: _stored(paths[path], found, tensors) for path, found in modules.items()}
    # Without any declaration the tensors speak for themselves, as they do in MAX.
    for file, declared, ignore in declarations:
        if ignore is not None:
            _check_declared(weights, tensors, ignore, declared or {}, file)
    return weights


def load_nvfp4(stored: StoredWeight, array: Callable[[str], NDArray[Any]]) -> NVFP4Weight:
    """A weight that the checkpoint holds in NVFP4, of one part; its bits are kept.

    Args:
        stored: where it lies; not dense.
        array: gives a tensor's values by name; `Checkpoint.array` is one such function.

    Raises:
        CheckpointError: a scale is NaN, infinite, negative, or, of the whole weight, zero.
    """
    codes_name, blocks_name = stored.names[:2]
    scale = load_global_scale(stored, array)
    block_scales = array(blocks_name)
    try:
        return NVFP4Weight(
            codes=array(codes_name),
            block_scales=block_scales,
            global_scales=scale,
            part_rows=(stored.shape[0],),
        )
    except ValueError as error:
        raise CheckpointError(
            f"tensor {quote(blocks_name)}: {error}; quantize the checkpoint again"
        ) from None


def load_global_scale(
    stored: StoredWeight, array: Callable[[str], NDArray[Any]]
) -> NDArray[np.float32]:
    """What multiplies a whole weight: float32 `[1]`.

    Args:
        stored: where it lies; not dense.
        array: as for `load_nvfp4`.

    Raises:
        CheckpointError: it is NaN, infinite, negative or zero.
    """
    global_name = stored.names[2]
    stored_scale = array(global_name).reshape(1).astype(np.float32)
    with np.errstate(all="ignore"):
        scale = stored_scale if stored.layout == "modelopt" else np.float32(1) / stored_scale
    if not (np.isfinite(stored_scale) & np.isfinite(scale) & (scale.view(np.int32) > 0)).all():
        raise CheckpointError(
            f"tensor {quote(global_name)}: found {stored_scale[0]}, expected a finite scale above "
            "0; quantize the checkpoint again"
        )
    return scale


def load_input_scale(stored: StoredWeight, array: Callable[[str], NDArray[Any]]) -> float:
    """The activation scale of a weight in NVFP4; 1 where there is none, or none above 0.

    Args:
        stored: where it lies; not dense.
        array: as for `load_nvfp4`.
    """
    if len(stored.names) < 4:
        return INPUT_SCALE
    (scale,) = array(stored.names[3]).reshape(1).astype(np.float64)
    if stored.layout == "compressed-tensors" and scale > 0:
        scale = 1 / scale
    return float(scale) if 0 < scale < np.inf else INPUT_SCALE


def modelopt_specs(module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    """The tensors of one NVFP4 weight `[out, in]` in ModelOpt's layout, by name."""
    out, columns = shape
    names = _names(module, "modelopt")
    scalar = TensorSpec(dtype="F32", shape=())
    return {
        names[0]: TensorSpec(dtype="U8", shape=(out, columns // 2)),
        names[1]: TensorSpec(dtype="F8_E4M3", shape=(out, columns // BLOCK_SIZE)),
        names[2]: scalar,
        names[3]: scalar,
    }


def modelopt_tensors(
    module: str, weight: NVFP4Weight, input_scale: float = INPUT_SCALE
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The values of those tensors, in their order; the weight has one part."""
    (scale,) = weight.global_scales
    names = _names(module, "modelopt")
    yield names[0], weight.codes
    yield names[1], weight.block_scales
    yield names[2], np.full((), scale, np.float32)
    yield names[3], np.full((), input_scale, np.float32)


def _names(module: str, layout: Layout) -> tuple[str, str, str, str]:
    codes, blocks, scale, activations = _SUFFIXES[layout]
    return f"{module}.{codes}", f"{module}.{blocks}", f"{module}.{scale}", f"{module}.{activations}"


def _stored(
    module: str, found: Mapping[str, str], tensors: Mapping[str, TensorSpec]
) -> StoredWeight:
    """Reads the layout off one module's tensors (name by suffix), all of which must fit it."""
    if set(found) == {"weight"} and tensors[found["weight"]].dtype in DENSE_DTYPES:
        spec = tensors[found["weight"]]
        if len(spec.shape) != 2:
            raise _misfit(found["weight"], spec, "a matrix [out, in]")
        out, columns = spec.shape
        names: tuple[str, ...] = (found["weight"],)
        return StoredWeight(module=module, shape=(out, columns), layout="dense", names=names)
    layout: Layout = "compressed-tensors" if "weight_packed" in found else "modelopt"
    if set(found) == {"weight"}:
        expected = f"{', '.join(DENSE_DTYPES)}, or uint8 codes with their scales"
        raise _misfit(found["weight"], tensors[found["weight"]], expected)
    suffixes = _SUFFIXES[layout]
    names = tuple(name for name in _names(module, layout) if name in found.values())
    for suffix, name in found.items():
        if suffix not in suffixes:
            raise CheckpointError(
                f"{where(name, tensors[name])}: found this in {quote(module)}, expected a dense "
                f"weight alone, or {', '.join(suffixes)}; convert the checkpoint"
            )
    for suffix, name in zip(suffixes[:3], _names(module, layout)[:3], strict=True):
        if suffix not in found:
            raise CheckpointError(
                f"{where(name, tensors[names[0]])}: absent, but {quote(names[0])} is there; "
                f"{layout} NVFP4 has {', '.join(suffixes[:3])}: quantize the checkpoint again"
            )
    return StoredWeight(
        module=module, shape=_nvfp4_shape(names, tensors), layout=layout, names=names
    )


def _nvfp4_shape(names: tuple[str, ...], tensors: Mapping[str, TensorSpec]) -> tuple[int, int]:
    codes, blocks, *scalars = (tensors[name] for name in names)
    if codes.dtype != "U8" or len(codes.shape) != 2 or 2 * codes.shape[1] % BLOCK_SIZE:
        raise _misfit(names[0], codes, f"U8 [out, in / 2], in a multiple of {BLOCK_SIZE}")
    out, columns = codes.shape[0], codes.shape[1] * 2
    if (blocks.dtype, blocks.shape) != ("F8_E4M3", (out, columns // BLOCK_SIZE)):
        raise _misfit(names[1], blocks, f"F8_E4M3 {[out, columns // BLOCK_SIZE]}")
    for name, scalar in zip(names[2:], scalars, strict=True):
        if scalar.dtype != "F32" or scalar.shape not in ((), (1,)):
            raise _misfit(name, scalar, "F32 [] or [1]")
    return out, columns


def _check_declared(
    weights: Mapping[str, StoredWeight],
    tensors: Mapping[str, TensorSpec],
    ignore: Collection[str],
    declared: Mapping[str, Any],
    file: str,
) -> None:
    """What a config declares must be what the tensors are."""
    method = str(declared.get("quant_method", "modelopt")).removesuffix("_fp4")
    targets = _check_scheme(declared, file)
    keys = {path: parse_projection(path) for path in weights}
    shapes = {key: weights[path].shape for path, key in keys.items() if key is not None}
    head = weights[LM_HEAD].shape if LM_HEAD in weights else None
    coverage = Coverage.of(shapes, ignore=ignore, head=head, source=None)
    targeted = Coverage.of(shapes, ignore=targets, source=None)
    for path, weight in weights.items():
        key, place = keys[path], where(weight.names[0], tensors[weight.names[0]])
        wanted = coverage.lm_head if key is None else coverage.is_quantized(key)
        if targets and wanted:
            wanted = key is not None and targeted.reasons[key] == IGNORED
        if weight.is_nvfp4 != wanted:
            raise CheckpointError(
                f"{place}: found {weight.layout} {list(weight.shape)}, but "
                f"{file} says it is {'in NVFP4' if wanted else 'not quantized'}; "
                "correct its list of ignored modules, or download the checkpoint again"
            )
        if weight.is_nvfp4 and weight.layout != method:
            raise CheckpointError(
                f"{place}: found {weight.layout} NVFP4, but "
                f"{file} says {quote(method)}; download the checkpoint again"
            )


def _check_scheme(declared: Mapping[str, Any], file: str) -> tuple[str, ...]:
    """Checks the declared block size and width; the modules they apply to, or () for all."""
    groups = declared.get("config_groups")
    groups = groups if isinstance(groups, Mapping) else {}
    schemes: list[Mapping[str, Any]] = [declared]
    targets: list[str] = []
    for group in groups.values():
        if isinstance(group, Mapping):
            schemes += [part for part in (group.get("weights"),) if isinstance(part, Mapping)]
            named = group.get("targets")
            targets += map(str, named if isinstance(named, list) else ())
    for field, wanted in (("group_size", BLOCK_SIZE), ("num_bits", 4)):
        for scheme in schemes:
            if scheme.get(field, wanted) not in (wanted, None):
                raise CheckpointError(
                    f"{file}: {field} is {quote(scheme[field])}, expected {wanted}, "
                    "as NVFP4 has; download or quantize the checkpoint again"
                )
    # A class's name (`Linear`) targets all modules of that class.
    plain = [target for target in targets if not target.startswith("re:") and "." not in target]
    return () if plain else tuple(targets)


def _misfit(name: str, spec: TensorSpec, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{where(name, spec)}: found {spec.dtype} {list(spec.shape)}, expected {expected}; "
        "download or convert the checkpoint again"
    )
