"""Documents that share a row and do not see each other: the same as each in a row of its own, in plain PyTorch.

A head cut in pieces keeps the loss of every label, so that losses are compared token by token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import every, quick_and_slow
from torch._subclasses.fake_tensor import FakeTensorMode

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.anatomy import dissect, isolated
from fuyou_cli.engine.attention import attending_apart, longest
from fuyou_cli.engine.calls import one_row_masks, with_fake_parameters
from fuyou_cli.engine.describe import LiveBytes
from fuyou_cli.engine.skeleton import build

from .comparing import distance, unequal
from .families import FAMILIES, VOCABULARY, llama
from .plain_torch import torch_adamw
from .rig import OPTIMIZER, Rig, Shape, Subject

SHAPE = Shape(batch=3, micro=2, tokens=24, vocabulary=60)
# Longer and shorter than the windows of 8 tokens; of two rows the last document is padding.
DOCUMENTS = [[11, 1, 12], [9, 7, 8], [24]]
PADDED = {(0, 2), (1, 2)}
STEPS = 2
LABELS = 10 + 8 + 6 + 23


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns (ids, labels) of each step: no label at a document's beginning, none in padding."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        ids = torch.randint(1, VOCABULARY, (SHAPE.batch, SHAPE.tokens), generator=generator)
        labels = ids.clone()
        for row, lengths in enumerate(DOCUMENTS):
            begin = 0
            for number, size in enumerate(lengths):
                labels[row, begin] = -100
                if (row, number) in PADDED:
                    ids[row, begin:], labels[row, begin:] = 0, -100
                begin += size
        found.append((ids, labels))
    return found


def plain_losses(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each label in order, every document in a forward of its own."""
    found = []
    for row, lengths in enumerate(DOCUMENTS):
        for part, wanted in zip(ids[row].split(lengths), labels[row].split(lengths), strict=True):
            logits = model(input_ids=part[None], use_cache=False).logits[0, :-1].float()
            losses = torch.nn.functional.cross_entropy(logits, wanted[1:], reduction="none", ignore_index=-100)
            found.append(losses[wanted[1:] != -100])
    return torch.cat(found)


def plain(subject: Subject) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Returns losses by label of each step, and the weights, of torch's AdamW over documents that nothing is packed with."""
    model = subject.fresh()
    model.load_state_dict(subject.initial)
    adamw = torch_adamw(list(model.parameters()), OPTIMIZER)
    every = []
    for ids, labels in batches(STEPS):
        losses = plain_losses(model, ids, labels)
        every.append(losses.detach())
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
    return every, {name: value.detach().clone() for name, value in model.named_parameters()}


def packed(rig: Rig) -> list[torch.Tensor]:
    """Returns losses by label of each step."""
    every = []
    for number, (ids, labels) in enumerate(batches(STEPS), start=1):
        options = {"lr": rig.optimizer.lr, "last": number == STEPS, "documents": DOCUMENTS}
        outcome = rig.executor.step(ids, labels, step=number, **options)
        every.append(torch.cat(rig.executor.head._losses).cpu())
        assert outcome.loss == pytest.approx(float(every[-1].double().mean()), rel=1e-6)
    rig.executor.drain()
    return every


@pytest.mark.parametrize(
    ("attention", "family"),
    quick_and_slow(
        [
            *(("sdpa", family) for family in ("mistral", "llama", "gemma3", "gpt_neox", "phi3")),
            *(("eager", family) for family in ("llama", "gemma2")),
        ],
        lambda number: number in (0, 6),
    ),
)
def test_packed_equals_unpacked(attention: str, family: str, tmp_path: Path) -> None:
    """Compares losses by label within 1e-6, and so the gradients: AdamW's first steps enlarge the last bit of a small one, so
    weights are the same to 1e-5 only."""
    subject = Subject(FAMILIES[family], SHAPE, attention=attention, apart=True)
    assert subject.attention == attention
    with Rig(subject, tmp_path) as rig:
        ours, weights = packed(rig), rig.weights()
        assert rig.executor.attention.kernel == ("flash" if attention == "sdpa" else "")
    theirs, expected = plain(subject)
    assert all(len(our) == LABELS for our in ours)
    assert all(float(((our - their) / their).abs().max()) <= 1e-6 for our, their in zip(ours, theirs, strict=True))
    assert float((ours[0] - theirs[0]).abs().max()) <= 1e-6
    assert distance(weights, expected) <= 1e-5


@pytest.mark.parametrize(
    "options",
    every(
        2,
        [
            {"device": "emulated", "kept": "all"},
            {"device": "emulated", "kept_there": "room", "batch_on_device": False},
            {"sweeps": 3},
        ],
    ),
    ids=str,
)
def test_the_same_however_bytes_move(options: dict[str, Any], tmp_path: Path) -> None:
    found, subject = [], Subject(llama(), replace(SHAPE, micro=1), apart=True)
    for number, chosen in enumerate(({}, options)):
        with Rig(subject, tmp_path / str(number), **chosen) as rig:
            found.append((packed(rig), rig.weights()))
    (losses, weights), (others, moved) = found
    assert all(torch.equal(one, other) for one, other in zip(losses, others, strict=True))
    assert unequal(weights, moved) == []


def test_whole_rows_are_the_usual_step(tmp_path: Path) -> None:
    """Takes each row as one document; so packed rows that are taken for whole ones have other losses."""
    found = []
    for apart in (False, True):
        with Rig(Subject(llama(), SHAPE, apart=apart), tmp_path / str(apart)) as rig:
            ids, labels = batches(1)[0]
            rig.step(ids, labels, 1, last=True)
            found.append(torch.cat(rig.executor.head._losses))
    assert torch.equal(*found)
    model = Subject(llama(), SHAPE).fresh()
    assert float((found[0] - plain_losses(model, *batches(1)[0]).detach()).abs().max()) > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_memory_grows_with_the_row_not_with_its_square(attention: str) -> None:
    """Measures a forward and its masks, where documents have 32 tokens and a window has 8."""

    def peak(tokens: int) -> int:
        model = build(FAMILIES["mistral"], dtype="float32", attention=attention)
        documents = [[32] * (tokens // 32)]
        with (
            FakeTensorMode(allow_non_fake_inputs=True), with_fake_parameters(model), one_row_masks(model, longest(documents)),
            attending_apart(documents), LiveBytes() as live,
        ):  # fmt: skip
            ids = torch.zeros((1, tokens), dtype=torch.long)
            model.base_model(input_ids=ids, position_ids=torch.arange(tokens)[None], use_cache=False)
        return live.peak

    assert peak(1024) <= 4.1 * peak(256) < 2 * 1024 * 1024 * 4  # so that a float32 mask of the row would show


REFUSED = {
    "gpt2": r"it looks positions up in a table \(wpe\)",
    "opt": r"it looks positions up in a table",
    "gpt_neo": "its attention is computed by code of its own",
    "gptj": "its attention is computed by code of its own",
    "falcon": "its attention is computed by code of its own",
}


def test_every_tried_family_keeps_documents_apart_or_is_refused() -> None:
    for family, config in FAMILIES.items():
        anatomy = dissect(build(config, dtype="float32", attention="sdpa"))
        if family not in REFUSED:
            assert isolated(anatomy).isolated
            continue
        with pytest.raises(UsageError, match=rf"{type(anatomy.model).__name__} cannot keep documents apart: {REFUSED[family]}"):
            isolated(anatomy)


def test_positions_that_depend_on_the_row_are_refused() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    config = llama(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors})
    with pytest.raises(UsageError, match=r"depend on the length of the row \(rope type longrope\)"):
        isolated(dissect(build(config, dtype="float32", attention="sdpa")))


def test_convolutions_over_tokens_are_refused() -> None:
    config = transformers.Lfm2Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    with pytest.raises(UsageError, match="it has convolutions over tokens"):
        isolated(dissect(build(config, dtype="float32", attention="sdpa")))
