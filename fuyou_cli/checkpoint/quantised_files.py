"""Finds the tensors of a checkpoint that rest quantised in its files, and reads their parts as a store would hold them.

Such a tensor is several in a file. nf4: `W` (codes), `W.absmax`, `W.quant_map` and `W.quant_state.bitsandbytes__nf4` (JSON),
with double quantisation also `W.nested_absmax` and `W.nested_quant_map`. int8: `M.weight`, `M.SCB` and `M.weight_format`. Files
come from strangers: what does not fit together is refused before anything is read of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import from_json, parsed, shown
from fuyou_cli.spec.packed_tensors import DYNAMIC_BLOCK, FP8_BLOCK, MXFP4_BLOCK, NF4_BLOCK, PackedTensor, Quantised, part_sizes
from fuyou_cli.swap.kernels import dynamic_levels, nf4_levels

from .reader import Scales, TensorEntry, TensorReader

_STATE = "quant_state."
_NF4 = f"{_STATE}bitsandbytes__nf4"
_OF_NF4 = re.compile(r"(.+)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)")
_OF_INT8 = re.compile(r"(.+)\.(SCB|weight_format)")
_BLOCKS, _EXPONENTS, _SCALES = "_blocks", "_scales", "_scale_inv"  # of mxfp4, and of fp8
_E4M3 = "float8_e4m3fn"
_LARGEST_EXPONENT = 252  # with which all of mxfp4 is finite
_LARGEST_FP8 = 512.0  # no code is as large
_NO_NUMBERS = (b"\x7f", b"\xff")  # codes of fp8
_LARGEST_STATE = 4096  # bytes
_LARGEST_SHAPE = 1 << 40  # elements
_ROWS = b"\0"  # `weight_format` of whole rows

Read = Callable[[tuple[int, int], int, int], memoryview]  # as in `training/quantised_weights`


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """The JSON of `quant_state`."""

    quant_type: str
    blocksize: int
    dtype: str
    shape: tuple[int, ...]
    nested_blocksize: int = 0
    nested_dtype: str = ""
    nested_offset: float | None = None


def with_quantised(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns the entries of a checkpoint with one for each quantised tensor, of the shape and the format of its weights, in
    place of those of its parts. Raises UsageError naming the file and the tensor where parts do not fit together."""
    entries = _with_own_formats(entries)
    parts: dict[str, dict[str, TensorEntry]] = {}
    for key, entry in entries.items():
        match, base = _OF_NF4.fullmatch(key), ""
        if match is not None:
            base = match[1]
        elif (match := _OF_INT8.fullmatch(key)) is not None:
            base = f"{match[1]}.weight"
        if match is not None and base in entries:
            parts.setdefault(base, {})[match[2]] = entry
    if not parts:
        return dict(entries)
    used = {entry.name for of_base in parts.values() for entry in of_base.values()}
    with TensorReader() as reader:
        return {
            key: _quantised(entry, parts[key], reader) if key in parts else entry
            for key, entry in entries.items()
            if key not in used
        }


def _with_own_formats(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns the entries with one for each tensor in mxfp4 or fp8, in the place of its codes."""
    decoded, used = dict[str, TensorEntry](), set[str]()
    for key, entry in entries.items():
        base = key.removesuffix(_BLOCKS)
        if base != key and entry.dtype == "uint8":
            if base in entries:
                raise _refusal(entry, f"has {shown(base)} beside it, which it stands for")
            decoded[base] = _mxfp4(base, entry, entries.get(base + _EXPONENTS))
            used.add(base + _EXPONENTS)
        elif key.endswith(_EXPONENTS) and entry.dtype == "uint8" and key.removesuffix(_EXPONENTS) + _BLOCKS not in entries:
            raise _refusal(entry, f"has no {key.removesuffix(_EXPONENTS).rpartition('.')[2]}{_BLOCKS} beside it")
        elif entry.dtype == _E4M3:
            decoded[key] = _fp8(entry, entries.get(key + _SCALES))
            used.add(key + _SCALES)
        elif key.endswith(_SCALES) and (codes := entries.get(key.removesuffix(_SCALES))) is not None and codes.dtype != _E4M3:
            raise _refusal(codes, f"has scales of fp8 beside it, but is {codes.dtype}")
        else:
            decoded[key] = entry
    return {key: entry for key, entry in decoded.items() if key not in used}


def _mxfp4(name: str, codes: TensorEntry, exponents: TensorEntry | None) -> TensorEntry:
    """Returns the tensor as the model has it: its last two dimensions exchanged."""
    if len(codes.shape) != 4 or codes.shape[-1] != MXFP4_BLOCK // 2 or 0 in codes.shape:
        raise _refusal(
            codes, f"is of shape {list(codes.shape)}: blocks of mxfp4 have 4 dimensions, the last of {MXFP4_BLOCK // 2}"
        )
    if exponents is None:
        raise _refusal(codes, f"has no {name.rpartition('.')[2]}{_EXPONENTS} beside it")
    if (exponents.dtype, exponents.shape) != ("uint8", codes.shape[:-1]):
        raise _other_shape(exponents, "uint8", codes.shape[:-1])
    matrices, rows, blocks, _ = codes.shape
    shape = (matrices, blocks * MXFP4_BLOCK, rows)
    return replace(codes, name=name, dtype="mxfp4", shape=shape, scales=Scales(kind="mxfp4", maxima=exponents))


def _fp8(codes: TensorEntry, scales: TensorEntry | None) -> TensorEntry:
    if scales is None:
        raise _refusal(codes, f"has no {codes.name.rpartition('.')[2]}{_SCALES} beside it")
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise _refusal(codes, f"is of shape {list(codes.shape)}: of fp8, fuyou reads matrices")
    squares = tuple(-(-side // FP8_BLOCK) for side in codes.shape)
    if scales.dtype not in ("float32", "bfloat16") or scales.shape != squares:
        raise _other_shape(scales, "float32", squares)
    return replace(codes, dtype="fp8", scales=Scales(kind="fp8", maxima=scales))


def _other_shape(entry: TensorEntry, dtype: str, shape: tuple[int, ...]) -> UsageError:
    return _refusal(entry, f"is {entry.dtype} of shape {list(entry.shape)}, but {dtype} of {list(shape)} is needed")


def _quantised(codes: TensorEntry, parts: Mapping[str, TensorEntry], reader: TensorReader) -> TensorEntry:
    if "SCB" in parts or "weight_format" in parts:
        return _int8(codes, parts, reader)
    states = [name for name in parts if name.startswith(_STATE)]
    if states and states != [_NF4]:
        other = ", ".join(shown(name.removeprefix(_STATE)) for name in states)
        raise _refusal(codes, f"is quantised as {other}: of four bits, fuyou reads nf4 alone")
    return _nf4(codes, parts, reader)


def _int8(codes: TensorEntry, parts: Mapping[str, TensorEntry], reader: TensorReader) -> TensorEntry:
    if codes.dtype != "int8" or len(codes.shape) != 2 or 0 in codes.shape:
        raise _refusal(codes, f"has scales of int8 beside it, but is {codes.dtype} of shape {list(codes.shape)}")
    order = parts.get("weight_format")
    if order is not None and (order.nbytes != 1 or reader.read_some(order, 0, 1) != _ROWS):
        raise _refusal(order, "is not 0: the codes of its matrix are not in the order of rows")
    scales = Scales(kind="int8", maxima=_part(codes, parts, "SCB", "float32", codes.shape[0]))
    return replace(codes, scales=scales)


def _nf4(codes: TensorEntry, parts: Mapping[str, TensorEntry], reader: TensorReader) -> TensorEntry:
    state = _state(codes, parts, reader)
    kind: Quantised = "nf4_double" if state.nested_blocksize else "nf4"
    _same_levels(codes, parts, "quant_map", nf4_levels(), reader)
    _, outer_size, maxima_size, codes_size = part_sizes(kind, state.shape)
    if codes.nbytes != codes_size:
        wanted = f"{list(state.shape)} in nf4 has {codes_size:,}"
        raise _refusal(codes, f"has {codes.nbytes:,} bytes, but {wanted}")
    of_maxima = ("uint8", maxima_size) if kind == "nf4_double" else ("float32", maxima_size // 4)
    scales = Scales(kind=kind, maxima=_part(codes, parts, "absmax", *of_maxima))
    if kind == "nf4_double":
        _same_levels(codes, parts, "nested_quant_map", dynamic_levels(), reader)
        outer = _part(codes, parts, "nested_absmax", "float32", outer_size // 4)
        scales = replace(scales, outer=outer, mean=state.nested_offset or 0.0)
    return replace(codes, dtype=kind, shape=state.shape, scales=scales)


def _state(codes: TensorEntry, parts: Mapping[str, TensorEntry], reader: TensorReader) -> _State:
    """Reads the quant_state of a tensor."""
    entry = parts.get(_NF4)
    if entry is None:
        raise _refusal(codes, f"has no {_NF4} beside it")
    if entry.nbytes > _LARGEST_STATE:
        raise _refusal(entry, f"has {entry.nbytes:,} bytes; a quant_state has at most {_LARGEST_STATE:,}")
    try:
        state = from_json(_State, parsed(reader.read_some(entry, 0, _LARGEST_STATE).decode()), defaults=True)
    except UnicodeDecodeError:
        raise _refusal(entry, "is not valid JSON: not UTF-8") from None
    except UsageError as error:
        raise _refusal(entry, f"cannot be read: {error.message}") from None
    if state.quant_type != "nf4":
        raise _refusal(entry, f"says quant_type {shown(state.quant_type)}: of four bits, fuyou reads nf4 alone")
    if state.blocksize != NF4_BLOCK:
        raise _refusal(entry, f"says blocksize {state.blocksize}: fuyou reads blocks of {NF4_BLOCK}")
    if state.nested_blocksize not in (0, DYNAMIC_BLOCK) or (state.nested_blocksize and state.nested_dtype != "float32"):
        sizes = f"nested_blocksize {state.nested_blocksize}, nested_dtype {shown(state.nested_dtype)}"
        raise _refusal(entry, f"says {sizes}: fuyou reads blocks of {DYNAMIC_BLOCK} in float32")
    if state.nested_blocksize and state.nested_offset is None:
        raise _refusal(entry, "has no nested_offset, which is the mean of the scales")
    if state.nested_offset is not None and state.nested_offset > float(np.finfo(np.float32).max):
        raise _refusal(entry, f"says nested_offset {state.nested_offset}, which float32 does not hold")
    if len(state.shape) != 2 or not 0 < prod(state.shape) <= _LARGEST_SHAPE:
        raise _refusal(entry, f"says shape {list(state.shape)[:8]}, which is of no matrix")
    return state


def _part(codes: TensorEntry, parts: Mapping[str, TensorEntry], name: str, dtype: str, count: int) -> TensorEntry:
    """Returns a part that must be there, of this dtype and so many elements."""
    entry = parts.get(name)
    if entry is None:
        raise _refusal(codes, f"has no {name} beside it")
    if entry.dtype != dtype or entry.numel != count:
        stored = f"{entry.numel:,} of {entry.dtype}"
        raise _refusal(entry, f"has {stored}, but {count:,} of {dtype} are needed")
    return entry


def _same_levels(codes: TensorEntry, parts: Mapping[str, TensorEntry], name: str, levels: Any, reader: TensorReader) -> None:
    """Raises UsageError unless codes of the file stand for the same values as ours."""
    entry = _part(codes, parts, name, "float32", levels.size)
    if reader.read_some(entry, 0, entry.nbytes) != levels.tobytes():
        raise _refusal(entry, "has other levels than bitsandbytes' own table, so that its codes mean other values")


def reads_parts(entry: TensorEntry, at: PackedTensor, reader: TensorReader, *, first: int = 0) -> Read:
    """Returns what reads the parts of a quantised tensor out of its files, where a store has them at `at`. `first`: elements of
    whole matrices of mxfp4 that the file's tensor has before it. It raises UsageError for what is not finite."""
    scales = entry.scales
    assert scales is not None and (scales.kind == "mxfp4" or not first)
    skipped = {at.codes: first // 2, at.maxima: first // MXFP4_BLOCK}
    sources = {at.codes: entry, at.maxima: scales.maxima} | ({} if scales.outer is None else {at.outer: scales.outer})

    def read(part: tuple[int, int], begin: int, end: int) -> memoryview:
        if part not in sources:
            return memoryview(np.array([scales.mean], np.float32).tobytes())[begin:end]
        source, before = sources[part], skipped.get(part, 0)
        if scales.kind == "fp8":
            return _of_fp8(source, begin, end, reader)
        content = reader.read_some(source, before + begin, end - begin)
        if source.dtype == "float32" and not np.isfinite(np.frombuffer(content, np.float32)).all():
            raise _refusal(source, "has scales that are not finite")
        if scales.kind == "mxfp4" and part == at.maxima and np.frombuffer(content, np.uint8).max() > _LARGEST_EXPONENT:
            raise _refusal(source, f"has scales above {_LARGEST_EXPONENT}, with which values are not finite")
        return memoryview(content)

    return read


def _of_fp8(source: TensorEntry, begin: int, end: int, reader: TensorReader) -> memoryview:
    """Reads bytes of codes, or of float32 scales; a file may have these in bfloat16."""
    narrow = source.dtype == "bfloat16"
    content = reader.read_some(source, begin // 2 if narrow else begin, (end - begin) // 2 if narrow else end - begin)
    if source.dtype == "fp8":
        if any(code in content for code in _NO_NUMBERS):
            raise _refusal(source, "has values that are NaN")
        return memoryview(content)
    wide: Any = np.frombuffer(content, np.uint16).astype(np.uint32) << 16 if narrow else np.frombuffer(content, np.uint32)
    with np.errstate(over="ignore"):
        if not np.isfinite(wide.view(np.float32) * np.float32(_LARGEST_FP8)).all():
            raise _refusal(source, "has scales with which values are not finite")
    return memoryview(wide.tobytes())


def _refusal(entry: TensorEntry, what: str) -> UsageError:
    return UsageError(
        f"{entry.file}: tensor {shown(entry.name)} {what}",
        hint="download the checkpoint again: fuyou reads nf4 in blocks of 64 and int8 of bitsandbytes, mxfp4, and fp8 in "
        "squares of 128; or use the model that was quantised: fuyou quantises it itself (model.quantize)",
    )
