"""Tests quantised weights decoded on the host, on a device and by an export: the same bits, whatever the sizes of pieces."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fuyou_cli.checkpoint.files import open_checkpoint
from fuyou_cli.checkpoint.reader import TensorReader
from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine import compute_weights
from fuyou_cli.engine.compute_weights import DeviceDecoder, HostDecoder, part
from fuyou_cli.engine.devices import open_device
from fuyou_cli.engine.skeleton import TORCH_DTYPE
from fuyou_cli.spec.model import BankSpec, Dtype, StageSpec, TensorSpec, banks_of
from fuyou_cli.spec.packed_tensors import QUANTISED, READ_ONLY, TRANSPOSED, Quantised, packed_bank
from fuyou_cli.swap.kernels import Workers
from fuyou_cli.training import quantised_weights
from fuyou_cli.training.quantised_weights import PackedReader
from fuyou_cli.training.state.storage import FirstWeights
from tests.quantised_checkpoint import mxfp4

SHAPES: dict[str, tuple[int, ...]] = {"short": (20, 40), "odd": (3, 5), "large": (300, 128), "zeros": (2, 96)}
OF_MXFP4: dict[str, tuple[int, ...]] = {"experts": (3, 64, 40), "one": (96, 5)}


def packed(kind: Quantised, dtype: Dtype) -> tuple[StageSpec, torch.Tensor]:
    """Makes a stage with these matrices and nothing else, and its bank."""
    draws, values = torch.Generator().manual_seed(7), dict[str, torch.Tensor]()
    shapes = OF_MXFP4 if kind == "mxfp4" else SHAPES
    for name, shape in shapes.items():
        values[name] = (torch.randn(shape, generator=draws) * 0.05 * (name != "zeros")).to(TORCH_DTYPE[dtype]).reshape(-1)
    size = packed_bank(kind, shapes.items())[1]
    tensors = tuple(
        TensorSpec(
            name=name,
            shape=shape,
            offset=0,
            numel=values[name].numel(),
            decay=True,
            frozen=True,
            quantised=True,
            transposed=kind in TRANSPOSED,
        )
        for name, shape in shapes.items()
    )
    stage = StageSpec(
        index=0, kind="block", name="block", tensors=tensors, forward_flops=1.0, forward_peak=0, backward_peak=0,
        banks=(BankSpec(name="quantised", storage=kind, elements=2048, layout=None, packed=size),),
    )  # fmt: skip
    bank = torch.empty(size, dtype=torch.uint8)
    if kind in READ_ONLY:
        return stage, drawn(kind, stage, bank)
    with Workers(2) as workers:
        quantised_weights.quantise(stage, bank, lambda name, most: iter(values[name].split(most)), dtype=dtype, workers=workers)
    return stage, bank


def drawn(kind: Quantised, stage: StageSpec, bank: torch.Tensor) -> torch.Tensor:
    """Fills the bank with codes and scales as the files of such models have them."""
    draws = torch.Generator().manual_seed(9)
    for at in stage.packed().values():
        codes = torch.randint(0, 256 if kind == "mxfp4" else 127, (at.codes[1],), generator=draws, dtype=torch.uint8)
        part(bank, at.codes, torch.uint8).copy_(codes)
        if kind == "mxfp4":
            part(bank, at.maxima, torch.uint8).random_(0, 253, generator=draws)
        else:
            part(bank, at.maxima, torch.float32).uniform_(0.01, 2, generator=draws)
    return bank


@pytest.mark.parametrize("on", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_every_side_decodes_the_same_bits(kind: Quantised, dtype: Dtype, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_weights, "PIECE", 64 * 100)
    monkeypatch.setattr(compute_weights, "_AT_ONCE", 64 * 256)
    stage, bank = packed(kind, dtype)
    host, device = HostDecoder(dtype, threads=2), open_device(on)
    there, bank_there = DeviceDecoder(device, 64 * 256), device.upload_now(bank)
    for name, at in stage.packed().items():
        ours, theirs = (torch.full((at.numel,), float("nan"), dtype=TORCH_DTYPE[dtype]) for _ in range(2))
        host.decode(kind, bank, at, ours)
        decoded = device.upload_now(theirs)
        there.decode(kind, bank_there, at, decoded)
        assert torch.equal(ours, decoded.cpu()), name
        if kind in TRANSPOSED:  # an export writes it as the model has it
            *outer, inputs, outputs = at.shape
            ours = ours.view(*outer, outputs, inputs).transpose(-1, -2).reshape(-1)

        def read(place: tuple[int, int], begin: int, end: int) -> memoryview:
            return cast(memoryview, bank.numpy().data[place[0] + begin : place[0] + end])

        reader = PackedReader(kind, at, read, dtype)
        for first, count in ((0, at.numel), (1, at.numel - 2), (at.numel // 2, 3), (at.numel - 1, 1)):
            whole = np.frombuffer(reader.elements(first, count), np.uint8)
            assert whole.tobytes() == ours[first : first + count].view(torch.uint8).numpy().tobytes(), (name, first)
    host.close()
    device.close()


@examples(60)
@given(
    kind=st.sampled_from(READ_ONLY), sides=st.tuples(st.integers(1, 3), st.integers(1, 300), st.integers(1, 300)),
    drawn_places=st.tuples(st.floats(0, 1), st.floats(0, 1)), dtype=st.sampled_from(["float32", "bfloat16"]),
)  # fmt: skip
def test_any_elements_of_any_shape(
    kind: Quantised, sides: tuple[int, int, int], drawn_places: tuple[float, float], dtype: Dtype
) -> None:
    """Of matrices in the formats of files: the host, a device in several pieces, and a reader of some elements."""
    matrices, rows, columns = sides
    shape = (matrices, -(-rows // 32) * 32, columns) if kind == "mxfp4" else (rows, columns)
    places, size = packed_bank(kind, [("one", shape)])
    tensor = TensorSpec(name="one", shape=shape, offset=0, numel=prod(shape), decay=True, frozen=True, quantised=True)
    bank = BankSpec(name="quantised", storage=kind, elements=prod(shape), layout=None, packed=size)
    held, at = drawn(kind, _stage(tensor, bank), torch.empty(size, dtype=torch.uint8)), places["one"]
    host, device = HostDecoder(dtype, threads=1), open_device("cpu")
    ours, theirs = (torch.empty(at.numel, dtype=TORCH_DTYPE[dtype]) for _ in range(2))
    host.decode(kind, held, at, ours)
    DeviceDecoder(device, max(64 * 256, -(-128 * columns // 64) * 64)).decode(kind, held, at, theirs)
    host.close()
    device.close()
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    if kind in TRANSPOSED:
        ours = ours.view(matrices, columns, shape[1]).transpose(1, 2).reshape(-1)
    first = int(drawn_places[0] * (at.numel - 1))
    count = 1 + int(drawn_places[1] * (at.numel - first - 1))
    read = held.numpy().data
    reader = PackedReader(kind, at, lambda place, begin, end: read[place[0] + begin : place[0] + end], dtype)
    wanted = ours[first : first + count].view(torch.uint8).numpy().tobytes()
    assert bytes(reader.elements(first, count)) == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_from_a_file_to_compute(dtype: Dtype, tmp_path: Path) -> None:
    """Experts rest in their file's own bytes, all of them or one, and are decoded with transformers' bits; what is trained of
    them begins with the same values, as the model has them and without a remainder."""
    weight = torch.randn(3, 64, 40, generator=torch.Generator().manual_seed(3))
    blocks, exponents = mxfp4(weight)
    save_file({"experts_blocks": blocks, "experts_scales": exponents}, tmp_path / "model.safetensors")
    wanted = convert_moe_packed_tensors(blocks, exponents, dtype=TORCH_DTYPE[dtype])
    entry = open_checkpoint(tmp_path).entries["experts"]
    host = HostDecoder(dtype, threads=1)
    with TensorReader() as reader, Workers() as workers:
        first_weights = FirstWeights({"experts": entry}, reader, lambda names, pieces: {}, dtype=dtype)
        for held, first in (((3, 64, 40), 0), ((64, 40), 64 * 40)):
            places, size = packed_bank("mxfp4", [("experts", held)])
            tensor = TensorSpec(
                name="experts", shape=held, offset=0, numel=prod(held), decay=True, first=first, whole=(3, 64, 40), frozen=True,
                quantised=True, transposed=True,
            )  # fmt: skip
            stage = _stage(tensor, BankSpec(name="quantised", storage="mxfp4", elements=8192, layout=None, packed=size))
            bank, decoded = torch.empty(size, dtype=torch.uint8), torch.empty(prod(held), dtype=TORCH_DTYPE[dtype])
            first_weights.begin(stage)
            first_weights.fill_quantised(stage, bank, workers=workers)
            host.decode("mxfp4", bank, places["experts"], decoded)
            rested = wanted.transpose(1, 2).reshape(-1)[first : first + decoded.numel()]
            assert torch.equal(decoded, rested)
        trained = replace(tensor, shape=(3, 64, 40), numel=7680, first=0, frozen=False, quantised=False, transposed=False)
        stage = _stage(trained, *banks_of(dtype, trained=8192))
        assert first_weights.begin(stage)
        weights, rest = torch.empty(8192, dtype=TORCH_DTYPE[dtype]), torch.ones(8192, dtype=torch.int16)
        first_weights.fill(stage, 0, weights, rest if dtype == "bfloat16" else None)
    host.close()
    assert torch.equal(weights[:7680], wanted.reshape(-1)) and not weights[7680:].any()
    assert dtype == "float32" or not rest.any()


def _stage(tensor: TensorSpec, *banks: BankSpec) -> StageSpec:
    return StageSpec(
        index=0, kind="block", name="block", tensors=(tensor,), forward_flops=1.0, forward_peak=0, backward_peak=0, banks=banks
    )


@pytest.mark.parametrize(
    ("kind", "each"),
    [
        ("nf4", 0.5 + 4 / 64), ("nf4_double", 0.5 + 1 / 64 + 4 / 64 / 256), ("int8", 1 + 4 / 4096), ("mxfp4", 0.5 + 1 / 32),
        ("fp8", 1 + 4 / 128**2),
    ],
)  # fmt: skip
def test_bytes_at_rest(kind: Quantised, each: float) -> None:
    """Counts bytes of a matrix per weight: 0.5625, 0.516, 1.001, 0.531 and 1.0002."""
    assert packed_bank(kind, [("one", (4096, 4096))])[1] == pytest.approx(each * 4096**2, abs=4096 + 256)


def test_what_float16_has_not_is_one_error() -> None:
    stage, bank = packed("int8", "float32")
    values: Any = {name: torch.full((at.numel,), 1e5) for name, at in stage.packed().items()}
    with pytest.raises(UsageError, match=r"model\.quantize: int8: short: 800 values are NaN or Inf"):
        quantised_weights.quantise(
            stage, bank, lambda name, most: iter(values[name].split(most)), dtype="float32", workers=Workers()
        )  # fmt: skip
