"""Tests where frozen parameters lie in a slot if they are read from the checkpoint's files as they lie there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fuyou_cli.checkpoint.header import parse_file
from fuyou_cli.engine.anatomy import Anatomy, dissect, frozen
from fuyou_cli.engine.in_place import read_in_place, whole_in_place
from fuyou_cli.engine.skeleton import build
from fuyou_cli.engine.vocabulary import cut_vocabulary
from fuyou_cli.spec.model import PAGE, SOURCES_AT, InPlace, Lying, SourceFile

CONFIG = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
PATTERNS = ["model.embed_tokens", "model.layers.0.*", "model.layers.1.self_attn.*"]


@pytest.fixture
def anatomy() -> Anatomy:
    import transformers

    return frozen(dissect(build(transformers.LlamaConfig(**CONFIG), dtype="float32", attention="sdpa")), PATTERNS)


def saved(anatomy: Anatomy, folder: Path) -> tuple[dict[str, torch.Tensor], InPlace, bytes]:
    """Saves random weights in two files, as places of the address space, and returns all bytes from `SOURCES_AT` on."""
    torch.manual_seed(1)
    weights = {name: torch.randn(tensor.shape) for name, tensor in anatomy.model.state_dict().items()}
    names, content, lying, sources = sorted(weights), b"", dict[str, Lying](), list[SourceFile]()
    for number, some in enumerate((names[::3], [name for name in names if name not in names[::3]])):
        file = folder / f"{number}.safetensors"
        save_file({name: weights[name] for name in some}, file, metadata={"odd": "x" * number})
        begin, data = SOURCES_AT + len(content), file.read_bytes()
        for name, entry in parse_file(file).entries.items():
            lying[name] = Lying(dtype=entry.dtype, source=number, address=begin + entry.begin)
        content += data + bytes(-len(data) % PAGE)
        sources.append(SourceFile(path=str(file), size=len(data), changed=1, header=""))
    return weights, InPlace(tensors=lying, sources=tuple(sources)), content


@pytest.mark.parametrize("rows", [0, 300])
def test_what_pieces_hold_is_each_parameter(rows: int, anatomy: Anatomy, tmp_path: Path) -> None:
    """Cuts at rows of a piece of the vocabulary."""
    weights, files, content = saved(anatomy, tmp_path)
    placed = read_in_place(cut_vocabulary(anatomy, rows), files, "float32")
    assert placed.sources == files.sources
    assert not placed.imported_because
    checked = 0
    for stage in placed.stages:
        slot = bytearray(4 * stage.params)
        assert bool(stage.source) == bool(stage.frozen)
        for piece in stage.source:
            at = 4 * stage.trained + piece.place
            slot[at : at + piece.size] = content[piece.offset - SOURCES_AT :][: piece.size]
            assert piece.place % PAGE == piece.offset % PAGE == piece.size % PAGE == 0
        for tensor in stage.tensors:
            if tensor.frozen:
                held = torch.frombuffer(slot, dtype=torch.float32)[tensor.offset : tensor.offset + tensor.numel]
                assert held.equal(weights[tensor.name].view(-1)[tensor.first : tensor.first + tensor.numel])
                checked += 1
            else:
                assert tensor.offset + tensor.numel <= stage.trained
    assert checked > 10


@pytest.mark.parametrize("rows", [0, 300])
def test_all_of_a_stage_may_lie_as_in_the_files(rows: int, anatomy: Anatomy, tmp_path: Path) -> None:
    """Whatever is frozen: products are chosen by what wants gradients. None where one tensor would have to be converted."""
    weights, files, content = saved(anatomy, tmp_path)
    cut = cut_vocabulary(anatomy, rows)
    placed = whole_in_place(cut, files, "float32")
    assert placed is not None
    for stage, own in zip(placed.stages, cut.stages, strict=True):
        slot = bytearray(4 * stage.params)
        for piece in stage.source:
            slot[piece.place : piece.place + piece.size] = content[piece.offset - SOURCES_AT :][: piece.size]
        for tensor, was in zip(stage.tensors, own.tensors, strict=True):
            held = torch.frombuffer(slot, dtype=torch.float32)[tensor.offset : tensor.offset + tensor.numel]
            assert held.equal(weights[tensor.name].view(-1)[tensor.first : tensor.first + tensor.numel])
            assert (tensor.name, tensor.frozen) == (was.name, was.frozen)
    assert whole_in_place(cut, files, "bfloat16") is None


def test_neighbours_share_a_piece_and_little_else_is_read(anatomy: Anatomy, tmp_path: Path) -> None:
    _, files, _ = saved(anatomy, tmp_path)
    block = next(stage for stage in read_in_place(anatomy, files, "float32").stages if stage.kind == "block")
    read, needed = sum(piece.size for piece in block.source), 4 * sum(tensor.numel for tensor in block.tensors)
    assert len(block.source) < len(block.tensors)
    assert needed < read <= needed + 2 * PAGE * len(block.source)


@pytest.mark.parametrize(
    ("files", "dtype", "why"),
    [
        ({"refusal": "they are far away"}, "float32", r"they are far away"),
        ({}, "bfloat16", r"is float32 in the model's files, and computes in bfloat16 \(3 stages\)"),
        ({"alignment": 1 << 20}, "float32", r"is not at a multiple of 1048576 bytes .* \(3 stages\)"),
    ],
)
def test_what_cannot_be_read_there_is_said(
    files: dict[str, object], dtype: str, why: str, anatomy: Anatomy, tmp_path: Path
) -> None:
    import re
    from dataclasses import replace

    _, found, _ = saved(anatomy, tmp_path)
    placed = read_in_place(anatomy, replace(found, **files), dtype)  # type: ignore[arg-type]
    assert placed.stages == anatomy.stages
    assert not placed.sources
    assert re.search(why, placed.imported_because)
