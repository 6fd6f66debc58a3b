"""Frozen parameters: losses and weights as plain PyTorch with `requires_grad=False`; nothing is written or kept for them.

Costs about 15 s of one core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import crossed, every
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from fuyou_cli.checkpoint.reader import parse_file
from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.anatomy import Anatomy, dissect, frozen, read_in_place, whole_in_place
from fuyou_cli.engine.cutting import cut_vocabulary
from fuyou_cli.engine.skeleton import build
from fuyou_cli.spec.model import PAGE, SOURCES_AT, InPlace, Lying, SourceFile

from .comparing import unequal
from .families import gpt2, llama
from .plain_torch import assert_as_plain_torch
from .rig import Rig, Shape, Subject
from .test_exact import _SETTINGS, OPTIMIZER

STEPS = 4
WAYS: dict[str, tuple[str, ...]] = {
    "the lower half": ("model.embed_tokens", "model.layers.[0-0].*"),
    "the upper half": ("model.layers.1", "model.norm", "lm_head"),
    "parts of blocks": ("model.layers.*.mlp", "model.layers.0.self_attn.q*", "*_proj.weight"),
    "all but norms": ("*_proj", "model.embed_tokens", "lm_head"),
    "all but the head": ("model",),
    "the embedding": ("model.embed_tokens",),
}


TIED = llama(tie_word_embeddings=True)
LOWER = ("model.embed_tokens", "model.layers.0")
RUNS: dict[str, tuple[PreTrainedConfig, Shape, tuple[str, ...], dict[str, Any]]] = {
    "tied, cut, emulated, swapped": (TIED, Shape(vocabulary=40), LOWER, {"device": "emulated", "kept": "all"}),
    "tied, cut, in two sweeps": (TIED, Shape(vocabulary=40), ("model.layers.*.mlp",), {"sweeps": 2}),
    "tied, cut, states on the device": (TIED, Shape(vocabulary=40), ("*_proj",), {"device": "emulated", "home": "gpu"}),
    "gpt2, cut, swapped": (gpt2(), Shape(vocabulary=40), ("transformer.wpe", "*.mlp"), {"kept": "all"}),
    "whole": (llama(), Shape(), LOWER, {}),
}


def _frozen_names(subject: Subject) -> set[str]:
    return {t.name for stage in subject.spec.stages for t in stage.tensors if t.frozen}


def _freezing(names: set[str]) -> Any:
    def prepare(model: PreTrainedModel) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in names)

    return prepare


def _same_as_torch(subject: Subject, folder: Path, *, clip: float | None, family: str = "llama", **rig: Any) -> None:
    names, optimizer = _frozen_names(subject), _SETTINGS.get(family, OPTIMIZER)
    way = {"clip": clip, "optimizer": optimizer, "prepare": _freezing(names), **rig}
    _, weights = assert_as_plain_torch(subject, folder, STEPS, **way)
    moved = set(unequal(weights, {name: subject.initial[name] for name in weights}))  # without a tied head's second name
    assert moved.isdisjoint(names) and moved | names == set(weights)


@crossed(2, clip=[0.5, None], way=WAYS)
def test_any_part_of_a_model(way: str, clip: float | None, tmp_path: Path) -> None:
    _same_as_torch(Subject(llama(), Shape(), freeze=WAYS[way]), tmp_path, clip=clip)


@pytest.mark.parametrize("run", every(2, RUNS))
def test_any_kind_of_run(run: str, tmp_path: Path) -> None:
    config, shape, patterns, rig = RUNS[run]
    subject = Subject(config, shape, freeze=patterns)
    _same_as_torch(subject, tmp_path, clip=0.5, family="gpt2" if run.startswith("gpt2") else "llama", **rig)


@pytest.mark.parametrize("way", ["the lower half", "all but norms"])
def test_a_step_reads_4_bytes_of_a_frozen_bf16_parameter_and_writes_none(way: str, tmp_path: Path) -> None:
    subject = Subject(llama(num_hidden_layers=6), Shape(dtype="bfloat16"), freeze=WAYS[way])
    frozen = sum(stage.params - stage.trained for stage in subject.spec.stages)
    trained = sum(stage.trained for stage in subject.spec.stages)
    with Rig(subject, tmp_path, clip=None, gradients="cpu", boundaries="cpu", lookahead=1) as run:
        run.run(2)
        before = run.counters()
        ids, labels = next(subject.batches(1))
        run.step(ids, labels, 3, last=True)
        run.executor.drain()
        after, planned = run.counters(), run.plan.predicted
    read, written = after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes
    assert written == 12 * trained == planned.written_per_step
    assert 4 * trained < read <= 4 * frozen + 14 * trained
    assert all(bool(stage.state_bytes) == bool(stage.trained) for stage in subject.spec.stages)


def test_a_pattern_stands_for_whole_numbers_and_names() -> None:
    """Says by hand what is frozen: all else here asks the code for it."""
    anatomy = dissect(build(llama(num_hidden_layers=12), dtype="float32", attention="sdpa"))
    found = frozen(anatomy, ("model.layers.[2-10].mlp", "model.layers.1.self_attn.q*", "lm_head"))
    wanted = {f"model.layers.{block}.mlp.{name}_proj.weight" for block in range(2, 11) for name in ("gate", "up", "down")}
    wanted |= {"model.layers.1.self_attn.q_proj.weight", "lm_head.weight"}
    assert {tensor.name for stage in found.stages for tensor in stage.tensors if tensor.frozen} == wanted


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("model.embed_tokens", "model.layers.[7-9]"), r"no parameter of LlamaForCausalLM matches `model\.layers\.\[7-9\]`"),
        (("model.embed",), r"no parameter of LlamaForCausalLM matches `model\.embed`"),
        (("*",), "every parameter of LlamaForCausalLM matches"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        Subject(llama(), Shape(), freeze=patterns)
    known = "it has model.embed_tokens, model.layers.*, model.norm, lm_head"
    assert refused.value.hint in (known, "leave out the pattern of what is to be trained")


# ---- as they lie in files ------------------------------------------------------------------------------------------


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
