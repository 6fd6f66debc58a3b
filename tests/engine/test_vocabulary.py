"""Tests embedding and head cut along the vocabulary: beside plain PyTorch, the same wherever bytes rest, byte for byte
planned."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import crossed, every
from torch.autograd.graph import get_gradient_edge
from transformers import AutoModelForCausalLM, PreTrainedConfig

from fuyou_cli.core.errors import NumericsError, PlanError, UsageError
from fuyou_cli.engine.cutting import is_plain
from fuyou_cli.engine.executor import Executor
from fuyou_cli.engine.loss import Head, pieces
from fuyou_cli.planner.place import least_memory, plan
from fuyou_cli.spec.model import StageKind

from .comparing import assert_near, assert_same, distance, relative
from .families import FAMILIES, llama
from .measuring import Seen
from .plain_torch import assert_as_plain_torch
from .rig import HARDWARE, OPTIMIZER, Rig, Shape, Subject, add_named, outcome

STEPS = 20
ROWS = 40  # of 97: pieces of 40, 40 and 17
PIECES = [(0, 40), (40, 80), (80, 97)]
CLIPS = pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
MODELS: dict[str, PreTrainedConfig] = {
    "untied": llama(),
    "tied": llama(tie_word_embeddings=True),
    "scaled, capped, tied": FAMILIES["gemma2"],
    "positions, tied": FAMILIES["gpt2"],
}
# Additions are in another order than torch's, so a weight whose gradient is nearly zero gets noise of 1e-9 in either run,
# which an epsilon of 1e-8 would blow up to updates of the full size. (The gradients themselves are as close to those in
# float64 as a whole head's, see below.) GPT-2's key biases have a true gradient of zero; Gemma's norm weights start at
# zero, so that everything moves far at a low rate already.
QUIET = replace(OPTIMIZER, epsilon=1e-6)
SETTINGS = {
    "positions, tied": replace(QUIET, lr=2e-3, epsilon=1e-5),
    "scaled, capped, tied": replace(QUIET, lr=1e-3, epsilon=1e-5),
}


def pieces_of(subject: Subject, kind: StageKind) -> list[tuple[int, int] | None]:
    return [stage.vocabulary for stage in subject.spec.stages if stage.kind == kind and stage.vocabulary]


# ---- the result ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "clip"),
    every(3, [("untied", 0.5), ("tied", 0.5), ("tied", None), ("scaled, capped, tied", None), ("positions, tied", 0.5)]),
)
def test_beside_plain_pytorch(name: str, clip: float | None, tmp_path: Path) -> None:
    """Takes 20 steps of torch's AdamW with weight decay over the same micro-batches; chunks of 5 tokens cut rows unevenly."""
    optimizer = SETTINGS.get(name, QUIET)
    subject = Subject(MODELS[name], Shape(vocabulary=ROWS, chunk=5))
    assert pieces_of(subject, "embedding") == pieces_of(subject, "head") == PIECES
    losses, weights = assert_as_plain_torch(subject, tmp_path, STEPS, clip=clip, optimizer=optimizer)
    moved = {n: float((value - subject.initial[n]).norm() / value.norm()) for n, value in weights.items()}
    assert {name: far for name, far in moved.items() if far <= 1e-2} == {}
    assert losses[-1] < losses[0] - 0.3


def _first_gradients(subject: Subject, folder: Path) -> dict[str, torch.Tensor]:
    with Rig(subject, folder, gradients="cpu") as rig:
        ids, labels = next(subject.batches(1))
        rig.step(ids, labels, 1, last=True)
        found: dict[str, torch.Tensor] = {}
        for stage in rig.owning_stages():
            add_named(found, stage, rig.resting_gradients(stage))
    return found


@pytest.mark.parametrize("name", ["untied", "tied", "scaled, capped, tied"])
def test_gradients_are_as_good_as_those_of_a_whole_head(name: str, tmp_path: Path) -> None:
    """Both beside the same model in float64."""
    whole, cut = (Subject(MODELS[name], Shape(vocabulary=rows)) for rows in (0, ROWS))
    exact_model = whole.fresh()
    exact_model.load_state_dict(whole.initial)
    exact_model.double()
    ids, labels = next(whole.batches(1))
    tokens = int((labels[:, 1:] != -100).sum())
    exact_model(input_ids=ids, labels=labels, num_items_in_batch=tokens, use_cache=False).loss.backward()
    exact = {n: p.grad for n, p in exact_model.named_parameters() if p.grad is not None}
    errors = [distance(_first_gradients(s, tmp_path / str(i)), exact) for i, s in enumerate((whole, cut))]
    assert errors[0] <= 1e-6
    assert errors[1] <= max(1.5 * errors[0], 3e-7)


@pytest.mark.parametrize(("tied", "lookahead", "clip"), [(False, 1, 0.5), (True, 2, None), (True, 4, 0.5)])
def test_the_fewest_slots_are_enough(tied: bool, lookahead: int, clip: float | None, tmp_path: Path) -> None:
    """Uses one slot of gradients for all: what is read ahead must not take the one that is needed first. Spans are rounded to
    2 MiB, so the model is large enough for a budget to matter; with much scratch a step takes more memory than loading."""
    config = llama(vocab_size=6000, hidden_size=256, intermediate_size=512, tie_word_embeddings=tied)
    large, way = Subject(config, Shape(batch=2, micro=1, vocabulary=2500)), {"clip": clip, "chunks": 250}
    with Rig(large, tmp_path / "roomy", **way) as rig:
        assert max(len(slots.gradient_slots) for slots in rig.plan.slot_classes) == 2
        expected, request = (rig.run(3), rig.weights()), replace(rig.request, cpu_budget=1, lookahead=lookahead)
    with pytest.raises(PlanError):
        plan(large.spec, HARDWARE, request)
    least = least_memory(large.spec, HARDWARE, request)
    with Rig(large, tmp_path / "least", lookahead=lookahead, budget=least, **way) as rig:
        assert max(len(slots.gradient_slots) for slots in rig.plan.slot_classes) == 1
        assert_same((rig.run(3), rig.weights()), expected)


def test_in_one_piece_and_in_many(tmp_path: Path) -> None:
    """Changes the order of additions by the number of pieces, and nothing else."""
    outcomes = []
    for rows, count in ((100, 1), (33, 3), (1 + 97 // 20, 20)):
        subject = Subject(MODELS["tied"], Shape(vocabulary=rows))
        with Rig(subject, tmp_path / str(rows), optimizer=QUIET) as rig:
            outcomes.append((rig.run(5), rig.weights()))
        assert len(pieces_of(subject, "head")) == count
        assert_near(outcomes[-1], outcomes[0])


@pytest.mark.parametrize(("clip", "accumulate"), every(2, [(0.5, "float32"), (None, "bfloat16")]))
def test_bfloat16_follows_the_whole_head(clip: float | None, accumulate: Any, tmp_path: Path) -> None:
    shape = Shape(dtype="bfloat16", accumulate=accumulate)
    losses = []
    for rows in (0, ROWS):
        with Rig(Subject(MODELS["tied"], replace(shape, vocabulary=rows)), tmp_path / str(rows), clip=clip) as rig:
            losses.append(rig.run(STEPS))
    assert relative(losses[1], losses[0]) <= 2e-2  # bfloat16 has 8 bits; runs drift apart by the last of them
    assert losses[1][-1] < losses[1][0] - 0.5


# ---- the embedding ---------------------------------------------------------------------------------------------------

UNTIED_GEMMA = transformers.Gemma2Config(**{**FAMILIES["gemma2"].to_dict(), "tie_word_embeddings": False})
EDGES = torch.tensor([[0, 39, 40, 79, 80, 96, 1, 1, 39], [96, 0, 2, 80, 40, 40, 5, 79, 0]])


@crossed(2, dtype=["float32", "bfloat16"], config=[llama(pad_token_id=41), UNTIED_GEMMA])
def test_lookups_and_their_gradients_are_those_of_the_whole_embedding(
    config: PreTrainedConfig, dtype: Any, tmp_path: Path
) -> None:
    subject = Subject(config, Shape(batch=2, micro=2, tokens=9, dtype=dtype, vocabulary=ROWS))
    module = subject.fresh().get_input_embeddings()
    module.weight.data.copy_(subject.initial["model.embed_tokens.weight"])
    expected = module(EDGES)
    gradient = torch.arange(expected.numel()).sin().view(expected.shape).to(expected.dtype)
    expected.backward(gradient)
    streamed = subject.anatomy.model.get_input_embeddings()
    with Rig(subject, tmp_path, gradients="cpu") as rig:
        y = streamed(EDGES)
        assert torch.equal(y, expected)
        _go_to(rig.executor, "backward", pieces_of(subject, "embedding")[-1])
        rig.executor.streamed.tape.hand_on(get_gradient_edge(y), gradient)
        rig.executor.streamed.tape.backward()
        found: dict[str, torch.Tensor] = {}
        for stage in rig.owning_stages():
            if stage.kind == "embedding":
                add_named(found, stage, rig.resting_gradients(stage))
    assert module.weight.grad is not None and bool(module.weight.grad.any())
    assert torch.equal(found["model.embed_tokens.weight"], module.weight.grad.float())
    assert is_plain(streamed) == (config.model_type == "llama")
    assert streamed.padding_idx == config.pad_token_id


def _go_to(executor: Executor, phase: str, rows: tuple[int, int] | None) -> None:
    """Goes there as if everything before the visit of this piece had happened."""
    stages = executor.model.stages
    visits = executor.visits.schedule.visits
    found = [v.index for v in visits if v.phase == phase and stages[v.stage].vocabulary == rows]
    executor.visits.lookahead.cursor = found[0] - 1


def test_an_id_outside_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    subject = Subject(llama(), Shape(vocabulary=ROWS))
    ids, labels = next(subject.batches(1))
    wrong_ids, wrong_labels = ids.clone(), labels.clone()
    wrong_ids[1, 3] = wrong_labels[1, 3] = 97
    for what, batch in (("token id", (wrong_ids, labels)), ("label", (ids, wrong_labels))):
        with Rig(subject, tmp_path / what) as rig, pytest.raises(UsageError, match=f"a {what} outside .* vocabulary of 97"):
            rig.step(*batch, 1)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def test_slots_are_those_of_a_piece(tmp_path: Path) -> None:
    """Cuts a vocabulary of eight times a block: whole, every slot is as large."""
    config = llama(vocab_size=8000, hidden_size=256, intermediate_size=256, tie_word_embeddings=True)
    sizes = {}
    for rows in (0, 1000):
        subject = Subject(config, Shape(batch=2, micro=2, vocabulary=rows))
        with Rig(subject, tmp_path / str(rows), lookahead=1, chunks=3) as rig:
            rig.run(1)
            sizes[rows] = sum(s.size for c in rig.plan.slot_classes for s in (*c.weight_slots, *c.gradient_slots))
    assert sizes[1000] < sizes[0] / 3


# ---- giving up -------------------------------------------------------------------------------------------------------


@crossed(2, name=["untied", "tied"], phase=["forward", "logits", "head", "backward"])
def test_unclipped_a_step_can_be_given_up_until_its_first_update(phase: str, name: str, tmp_path: Path) -> None:
    """Updates an untied head's pieces as they are done; a tied one's rest until the embedding's backward."""
    subject = Subject(MODELS[name], Shape(vocabulary=ROWS))
    with Rig(subject, tmp_path, clip=None) as rig:
        seen: dict[str, bool] = {}

        def look() -> None:
            seen[rig.visit.phase] = rig.executor.may_abandon()

        rig.executor.between_micro_batches = look
        rig.run(1)
    assert seen[phase] == (phase in ("forward", "logits") or (phase == "head" and name == "tied"))


@CLIPS
def test_values_that_are_not_finite_are_named(clip: float | None, tmp_path: Path) -> None:
    subject = Subject(MODELS["untied"], Shape(vocabulary=ROWS))
    poisoned = {name: value.clone() for name, value in subject.initial.items()}
    poisoned["lm_head.weight"][50, 3] = float("inf")
    with Rig(subject, tmp_path, clip=clip) as rig:
        rig.put_weights(poisoned)
        with pytest.raises(NumericsError, match=r"^step 1: the loss \(head\[\d+:\d+\]\) is nan$"):
            rig.run(2)


# ---- a head in pieces ----------------------------------------------------------------------------------------------


HEADS: dict[str, PreTrainedConfig] = {
    "untied": llama(),
    "tied": llama(tie_word_embeddings=True),
    "tied, logits capped": FAMILIES["gemma2"],
}


def batched(func: Any, args: Any) -> tuple[int, ...] | None:
    """Returns the shape that a batched product multiplies by."""
    return tuple(args[1].shape) if func is torch.ops.aten.bmm.default else None


@pytest.mark.parametrize(("head", "chunk"), every(2, product(HEADS, [5, 16, 20])))
def test_in_pieces(head: str, chunk: int, tmp_path: Path) -> None:
    """Cuts each row unevenly by 5 tokens, takes one row with 16, and leaves a rest with 20; a micro-batch has 32."""
    whole, cut = (Subject(HEADS[head], Shape(chunk=size)) for size in (0, chunk))
    assert_near(outcome(cut, tmp_path / "cut", 3), outcome(whole, tmp_path / "whole", 3))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("chunk", [0, 1, 3, 7, 8, 15, 16, 17, 100])
def test_every_token_is_in_one_piece(rows: int, chunk: int) -> None:
    tokens = 8
    seen = [
        (row, token)
        for row_cut, token_cut in pieces(rows, tokens, chunk)
        for row in range(rows)[row_cut]
        for token in range(tokens)[token_cut]
    ]
    assert sorted(seen) == [(row, token) for row in range(rows) for token in range(tokens)]


@pytest.mark.parametrize("chunk", [1, 3, 8, 20])
def test_no_piece_is_larger_than_asked(chunk: int) -> None:
    for rows, tokens in pieces(4, 8, chunk):
        assert len(range(4)[rows]) * len(range(8)[tokens]) <= chunk


def test_pieces_are_one_product_with_weights_that_have_no_gradient() -> None:
    """Torch copies bfloat16 weights that need no gradient for each row of a piece whose strides are not regular."""
    model: Any = AutoModelForCausalLM.from_config(llama()).requires_grad_(False)
    hidden, head = torch.randn(3, 20, model.config.hidden_size), Head(model)
    whole = model.lm_head(hidden)
    with head.stubbed(), Seen(batched) as products:
        for cut in pieces(3, 20, 7):
            assert torch.allclose(head.logits(hidden[cut]), whole[cut], atol=1e-6)
    assert products.found == []
