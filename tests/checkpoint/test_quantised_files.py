"""Goal: files of bitsandbytes, and those in mxfp4 and fp8, are taken whole or refused with one error that names the file and
the tensor. Method: files written by a reference, and then damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fuyou_cli.checkpoint.files import open_checkpoint
from fuyou_cli.checkpoint.quantised_files import reads_parts
from fuyou_cli.checkpoint.reader import TensorReader
from fuyou_cli.core.errors import UsageError
from fuyou_cli.spec.model import Dtype
from fuyou_cli.spec.packed_tensors import packed_bank
from fuyou_cli.training.quantised_weights import DecodingReader
from tests.quantised_checkpoint import as_bytes, of_fp8, quantised

_NAME, _STATE = "a.weight", "a.weight.quant_state.bitsandbytes__nf4"
_WEIGHT = torch.linspace(-1, 1, 40 * 52).view(40, 52).sin()
Tensors = dict[str, torch.Tensor]


def _written(folder: Path, tensors: Tensors) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["nf4", "nf4_double", "int8"])
def test_a_quantised_tensor_is_one_entry_with_its_bytes(kind: str, tmp_path: Path) -> None:
    tensors = quantised(_NAME, _WEIGHT, kind) | {"norm.weight": torch.ones(4)}
    checkpoint = open_checkpoint(_written(tmp_path, tensors))
    assert sorted(checkpoint.entries) == [_NAME, "norm.weight"]
    entry = checkpoint.entries[_NAME]
    assert entry.scales is not None and (entry.dtype, entry.scales.kind, entry.shape) == (kind, kind, (40, 52))
    at = packed_bank(entry.scales.kind, [(_NAME, entry.shape)])[0][_NAME]
    with TensorReader() as reader:
        read = reads_parts(entry, at, reader)
        found = {part: bytes(read(part, 0, part[1])) for part in (at.mean, at.outer, at.maxima, at.codes) if part[1]}
    maxima = tensors["a.SCB" if kind == "int8" else "a.weight.absmax"]
    assert found[at.codes] == tensors[_NAME].numpy().tobytes() and found[at.maxima] == maxima.numpy().tobytes()
    if kind == "nf4_double":
        assert found[at.outer] == tensors["a.weight.nested_absmax"].numpy().tobytes()
        said = json.loads(bytes(tensors[_STATE].numpy()))
        assert np.frombuffer(found[at.mean], np.float32)[0] == np.float32(said["nested_offset"])


_EXPERTS = torch.linspace(-1, 1, 2 * 64 * 6).view(2, 64, 6).sin()  # as transformers has them: (experts, inputs, outputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_is_the_tensor_that_transformers_has(dtype: Dtype, tmp_path: Path) -> None:
    """One entry under the name without `_blocks`, in the model's orientation. Any range of its elements is decoded."""
    tensors = quantised("mlp.experts.down_proj", _EXPERTS, "mxfp4") | {"odd_scales": torch.ones(3)}
    checkpoint = open_checkpoint(_written(tmp_path, tensors))
    assert sorted(checkpoint.entries) == ["mlp.experts.down_proj", "odd_scales"]
    entry = checkpoint.entries["mlp.experts.down_proj"]
    assert (entry.name, entry.dtype, entry.shape) == ("mlp.experts.down_proj", "mxfp4", (2, 64, 6))
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    parts = (tensors[f"mlp.experts.down_proj_{part}"] for part in ("blocks", "scales"))
    wanted = convert_moe_packed_tensors(*parts, dtype=getattr(torch, dtype)).reshape(-1)
    assert (wanted.float() - _EXPERTS.reshape(-1)).abs().max() < 0.2
    with TensorReader() as reader:
        decoding = DecodingReader(reader, dtype)
        for first, count in ((0, 768), (1, 700), (383, 2), (384, 384), (767, 1)):
            got = torch.empty(count, dtype=wanted.dtype)
            decoding.read_into(entry, got, first=first)
            assert torch.equal(got, wanted[first : first + count]), (first, count)


def test_one_expert_of_mxfp4_is_read_alone(tmp_path: Path) -> None:
    tensors = quantised("a", _EXPERTS, "mxfp4")
    entry = open_checkpoint(_written(tmp_path, tensors)).entries["a"]
    at = packed_bank("mxfp4", [("a", (64, 6))])[0]["a"]
    with TensorReader() as reader:
        read = reads_parts(entry, at, reader, first=64 * 6)
        assert bytes(read(at.codes, 0, at.codes[1])) == tensors["a_blocks"][1].numpy().tobytes()
        assert bytes(read(at.maxima, 0, at.maxima[1])) == tensors["a_scales"][1].numpy().tobytes()


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_fp8_is_one_float32_product(scales: torch.dtype, tmp_path: Path) -> None:
    """Scales may be in bfloat16, and squares are cut at the ends."""
    tensors = quantised(_NAME, torch.linspace(-1, 1, 140 * 300).view(140, 300).sin(), "fp8")
    tensors["a.weight_scale_inv"] = tensors["a.weight_scale_inv"].to(scales)
    entry = open_checkpoint(_written(tmp_path, tensors)).entries[_NAME]
    assert (entry.name, entry.dtype, entry.shape) == (_NAME, "fp8", (140, 300))
    wanted = of_fp8(tensors[_NAME], tensors["a.weight_scale_inv"]).bfloat16().reshape(-1)
    with TensorReader() as reader:
        decoding = DecodingReader(reader, "bfloat16")
        for first, count in ((0, 42_000), (299, 2), (128 * 300 - 1, 2), (41_999, 1)):
            got = torch.empty(count, dtype=torch.bfloat16)
            decoding.read_into(entry, got, first=first)
            assert torch.equal(got, wanted[first : first + count]), (first, count)


def _said(**changes: Any) -> Callable[[Tensors], Tensors]:
    """Changes the quant_state."""

    def change(tensors: Tensors) -> Tensors:
        said = json.loads(bytes(tensors[_STATE].numpy())) | changes
        return {_STATE: as_bytes(json.dumps({key: value for key, value in said.items() if value is not None}))}

    return change


def _shorter(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensors[name][:-1].clone()}


def _moved(name: str, by: float) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensors[name] + by}


_DAMAGED: list[tuple[str, str, Any, str]] = [  # format, case, what is changed (None: left out), what is said
    ("nf4", "no state", {_STATE: None}, r"'a\.weight' has no quant_state\.bitsandbytes__nf4 beside it"),
    ("nf4", "no absmax", {"a.weight.absmax": None}, r"'a\.weight' has no absmax beside it"),
    ("nf4", "no levels", {"a.weight.quant_map": None}, r"'a\.weight' has no quant_map beside it"),
    ("nf4_double", "no outer", {"a.weight.nested_absmax": None}, r"'a\.weight' has no nested_absmax beside it"),
    ("int8", "no scales", {"a.SCB": None}, r"'a\.weight' has no SCB beside it"),
    ("nf4", "cut absmax", _shorter("a.weight.absmax"), r"'a\.weight\.absmax' has 32 of float32, but 33 of float32 are needed"),
    ("nf4_double", "cut outer", {"a.weight.nested_absmax": torch.ones(0)}, r"'a\.weight\.nested_absmax' has 0 of float32"),
    ("nf4", "cut codes", _shorter(_NAME), r"'a\.weight' has 1,039 bytes, but \[40, 52\] in nf4 has 1,040"),
    ("int8", "cut scales", _shorter("a.SCB"), r"'a\.SCB' has 39 of float32, but 40 of float32 are needed"),
    ("int8", "other type", {"a.SCB": torch.ones(40, dtype=torch.float16)}, r"'a\.SCB' has 40 of float16, but 40 of float32"),
    ("int8", "tiles", {"a.weight_format": torch.ones((), dtype=torch.uint8)}, r"'a\.weight_format' is not 0"),
    ("nf4", "no JSON", {_STATE: as_bytes("{")}, r"quant_state\.bitsandbytes__nf4' cannot be read: not valid JSON"),
    ("nf4", "no UTF-8", {_STATE: torch.full((9,), 255, dtype=torch.uint8)}, r"__nf4' is not valid JSON: not UTF-8"),
    ("nf4", "no object", {_STATE: as_bytes("[1]")}, r"__nf4' cannot be read: "),
    ("nf4", "vast", {_STATE: torch.full((5000,), 32, dtype=torch.uint8)}, r"__nf4' has 5,000 bytes; a quant_state has at most"),
    ("nf4", "no shape", _said(shape=None), r"__nf4' cannot be read: shape: missing"),
    ("nf4", "odd key", _said(tile=3), r"__nf4' cannot be read: tile: unknown key"),
    ("nf4", "vast shape", _said(shape=[1 << 40, 1 << 40]), r"__nf4' says shape \[.*\], which is of no matrix"),
    ("nf4", "flat", _said(shape=[2080]), r"__nf4' says shape \[2080\], which is of no matrix"),
    ("nf4", "blocks", _said(blocksize=128), r"__nf4' says blocksize 128: fuyou reads blocks of 64"),
    ("nf4", "type", _said(quant_type="fp4"), r"__nf4' says quant_type 'fp4': of four bits, fuyou reads nf4 alone"),
    ("nf4_double", "outer blocks", _said(nested_blocksize=512), r"__nf4' says nested_blocksize 512, .* blocks of 256"),
    ("nf4_double", "mean", _said(nested_offset=1e39), r"__nf4' says nested_offset 1e\+39, which float32 does not hold"),
    ("nf4", "other levels", _moved("a.weight.quant_map", 0.01), r"'a\.weight\.quant_map' has other levels"),
    ("nf4_double", "levels", _moved("a.weight.nested_quant_map", 1e-7), r"'a\.weight\.nested_quant_map' has other levels"),
    ("mxfp4", "no scales", {"a.weight_scales": None}, r"'a\.weight_blocks' has no weight_scales beside it"),
    ("mxfp4", "no blocks", {"a.weight_blocks": None}, r"'a\.weight_scales' has no weight_blocks beside it"),
    ("mxfp4", "cut", _shorter("a.weight_scales"), r"_scales' is uint8 of shape \[1, 6, 2\], but uint8 of \[2, 6, 2\]"),
    ("mxfp4", "flat", {"a.weight_blocks": torch.zeros(6, 16, dtype=torch.uint8)}, r"_blocks' is of shape \[6, 16\]: blocks of"),
    ("mxfp4", "wide", {"a.weight_blocks": torch.zeros(1, 6, 2, 8, dtype=torch.uint8)}, r"have 4 dimensions, the last of 16"),
    ("mxfp4", "twice", {"a.weight": torch.ones(2, 64, 6)}, r"'a\.weight_blocks' has 'a\.weight' beside it"),
    ("fp8", "no scales", {"a.weight_scale_inv": None}, r"'a\.weight' has no weight_scale_inv beside it"),
    ("fp8", "per tensor", {"a.weight_scale_inv": torch.ones(())}, r"_scale_inv' is float32 of shape \[\], but float32 of"),
    ("fp8", "other type", {"a.weight_scale_inv": torch.ones(1, 1, dtype=torch.uint8)}, r"is uint8 of shape \[1, 1\], but"),
    ("fp8", "plain", {_NAME: torch.ones(40, 52)}, r"'a\.weight' has scales of fp8 beside it, but is float32"),
    ("fp8", "stack", {_NAME: torch.zeros(2, 4, 4).to(torch.float8_e4m3fn)}, r"'a\.weight' is of shape \[2, 4, 4\]: of fp8"),
    ("nf4", "fp4", {_STATE: None, "a.weight.quant_state.bitsandbytes__fp4": as_bytes("{}")}, r"'a\.weight' is quantised as '"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "case", "change", "message"), _DAMAGED, ids=[f"{row[0]}-{row[1]}" for row in _DAMAGED])
def test_damaged_files_are_one_error(kind: str, case: str, change: Any, message: str, tmp_path: Path) -> None:
    tensors = quantised(_NAME, _EXPERTS if kind == "mxfp4" else _WEIGHT, kind)
    changed = tensors | (change(tensors) if callable(change) else change)
    folder = _written(tmp_path, {name: value for name, value in changed.items() if value is not None})
    with pytest.raises(UsageError, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder / "model.safetensors") in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("mxfp4", "a.weight_scales", 253, r"'a\.weight_scales' has scales above 252, with which values are not finite"),
        ("fp8", "a.weight_scale_inv", 1e36, r"'a\.weight_scale_inv' has scales with which values are not finite"),
        ("fp8", "a.weight_scale_inv", torch.nan, r"'a\.weight_scale_inv' has scales with which values are not finite"),
        ("fp8", _NAME, torch.nan, r"'a\.weight' has values that are NaN"),
    ],
)
def test_values_that_are_not_finite_are_refused(kind: str, name: str, value: float, message: str, tmp_path: Path) -> None:
    tensors = quantised(_NAME, _EXPERTS if kind == "mxfp4" else _WEIGHT, kind)
    tensors[name].reshape(-1)[0] = value
    entry = open_checkpoint(_written(tmp_path, tensors)).entries[_NAME]
    with TensorReader() as reader, pytest.raises(UsageError, match=message):
        DecodingReader(reader, "float32").read_into(entry, torch.empty(entry.numel), first=0)


@pytest.mark.parametrize("kind", ["nf4", "nf4_double", "int8"])
def test_scales_that_are_not_finite_are_refused(kind: str, tmp_path: Path) -> None:
    tensors = quantised(_NAME, _WEIGHT, kind)
    scales = {"nf4": "a.weight.absmax", "nf4_double": "a.weight.nested_absmax", "int8": "a.SCB"}[kind]
    tensors[scales][0] = torch.nan
    entry = open_checkpoint(_written(tmp_path, tensors)).entries[_NAME]
    assert entry.scales is not None
    at = packed_bank(entry.scales.kind, [(_NAME, entry.shape)])[0][_NAME]
    part = at.outer if kind == "nf4_double" else at.maxima
    with TensorReader() as reader, pytest.raises(UsageError, match=rf"tensor '{scales}' has scales that are not finite"):
        reads_parts(entry, at, reader)(part, 0, part[1])
