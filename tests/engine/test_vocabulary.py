"""Tests embedding and head cut along the vocabulary: beside plain PyTorch, the same wherever bytes rest, byte for byte
planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import crossed, every
from torch.autograd.graph import get_gradient_edge
from transformers import PreTrainedConfig

from fuyou_cli.core.errors import NumericsError, PlanError, UsageError
from fuyou_cli.engine.executor import Executor, StepAbandoned
from fuyou_cli.engine.vocabulary import is_plain
from fuyou_cli.planner.place import least_memory, plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.spec.model import StageKind

from .comparing import distance, relative, unequal
from .families import FAMILIES, gpt2, llama
from .plain_torch import plain_run
from .rig import HARDWARE, OPTIMIZER, Rig, Shape, Subject, add_named, assert_moves_as_planned

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
    every(2, [("untied", 0.5), ("tied", 0.5), ("tied", None), ("scaled, capped, tied", None), ("positions, tied", 0.5)]),
)
def test_beside_plain_pytorch(name: str, clip: float | None, tmp_path: Path) -> None:
    """Takes 20 steps of torch's AdamW with weight decay over the same micro-batches; chunks of 5 tokens cut rows unevenly."""
    optimizer = SETTINGS.get(name, QUIET)
    subject = Subject(MODELS[name], Shape(vocabulary=ROWS, chunk=5))
    assert pieces_of(subject, "embedding") == pieces_of(subject, "head") == PIECES
    with Rig(subject, tmp_path, clip=clip, optimizer=optimizer) as rig:
        losses, weights = rig.run(STEPS), rig.weights()
        assert rig.generations == {STEPS}
    plain_losses, plain_weights = plain_run(subject, STEPS, clip=clip, optimizer=optimizer)
    assert relative(losses, plain_losses) <= 1e-6
    assert distance(weights, plain_weights) <= 1e-6
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


WAYS: dict[str, dict[str, Any]] = {
    "all in RAM": dict(home="cpu"),
    "gradients in RAM": dict(gradients="cpu"),
    "lookahead 1": dict(lookahead=1),
    "lookahead 4": dict(lookahead=4),
    "emulated device": dict(device="emulated"),
    "everything at once": dict(device="emulated", lookahead=4, directories=3, backend="threads", update_threads=2),
}


@pytest.fixture(scope="module", params=every(3, ["untied", "tied", "scaled, capped, tied", "dropout, tied"]))
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(MODELS.get(request.param, gpt2(dropout=0.1)), Shape(vocabulary=ROWS, chunk=5))


@CLIPS
def test_bitwise_the_same_wherever_bytes_rest(clip: float | None, subject: Subject, tmp_path: Path) -> None:
    with Rig(subject, tmp_path / "ssd", clip=clip) as rig:
        expected, weights = rig.run(4), rig.weights()
        assert not rig.padding().any()
    ways = list(WAYS.items())[1 if clip else 0 :: 2]
    for way, options in ways:
        with Rig(subject, tmp_path / way.replace(" ", "-"), clip=clip, **options) as rig:
            assert rig.run(4) == expected, way
            assert unequal(rig.weights(), weights) == [], way


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def large(request: pytest.FixtureRequest) -> Subject:
    """Makes a model large enough for a budget to matter: spans are rounded to 2 MiB."""
    config = llama(vocab_size=6000, hidden_size=256, intermediate_size=512, tie_word_embeddings=request.param)
    return Subject(config, Shape(batch=2, micro=1, vocabulary=2500))


@dataclass(frozen=True, kw_only=True, slots=True)
class Roomy:
    """Holds what three steps give with room for two slots of gradients, and what was asked for."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    request: PlanRequest


@pytest.fixture(scope="module")
def roomy(large: Subject, tmp_path_factory: pytest.TempPathFactory) -> Callable[[float | None], Roomy]:
    """Gives roomy(clip), computed once. Much scratch, so that a step takes more memory than loading."""

    @cache
    def outcome(clip: float | None) -> Roomy:
        with Rig(large, tmp_path_factory.mktemp("roomy"), clip=clip, chunks=250) as rig:
            assert max(len(slots.gradient_slots) for slots in rig.plan.slot_classes) == 2
            return Roomy(losses=rig.run(3), weights=rig.weights(), request=rig.request)

    return outcome


@pytest.mark.parametrize(("lookahead", "clip"), [(1, 0.5), (2, None), (4, 0.5)])
def test_the_fewest_slots_are_enough(
    lookahead: int, clip: float | None, large: Subject, roomy: Callable[[float | None], Roomy], tmp_path: Path
) -> None:
    """Uses one slot of gradients for all: what is read ahead must not take the one that is needed first."""
    expected = roomy(clip)
    request = replace(expected.request, cpu_budget=1, lookahead=lookahead)
    with pytest.raises(PlanError):
        plan(large.spec, HARDWARE, request)
    least = least_memory(large.spec, HARDWARE, request)
    with Rig(large, tmp_path, clip=clip, lookahead=lookahead, budget=least, chunks=250) as rig:
        assert max(len(slots.gradient_slots) for slots in rig.plan.slot_classes) == 1
        assert rig.run(3) == expected.losses
        assert unequal(rig.weights(), expected.weights) == []


def test_mixed_by_budget(large: Subject, roomy: Callable[[float | None], Roomy], tmp_path: Path) -> None:
    """Puts some tensors of some pieces in RAM, the others on the ssd; tied without clipping, untied with it."""
    clip = None if large.spec.tied_head else 0.5
    with Rig(large, tmp_path / "ssd", clip=clip) as rig:
        low = rig.plan.predicted.cpu_peak
    with Rig(large, tmp_path / "cpu", home="cpu", clip=clip) as rig:
        high = rig.plan.predicted.cpu_peak
    mixed = 0
    for share in (0.2, 0.4, 0.6, 0.8):
        with Rig(large, tmp_path / str(share), home=None, clip=clip, budget=int(low + share * (high - low))) as rig:
            pieces = [p for p, s in zip(rig.plan.stages, large.spec.stages, strict=True) if s.vocabulary and s.params]
            resting = {p.gradients_extent is None for p in pieces}
            mixed += len({p.weights for p in pieces}) == 2 or len({p.states for p in pieces}) == 2 or len(resting) == 2
            assert rig.run(3) == roomy(clip).losses
            assert unequal(rig.weights(), roomy(clip).weights) == []
    assert mixed


def test_in_one_piece_and_in_many(tmp_path: Path) -> None:
    """Changes the order of additions by the number of pieces, and nothing else."""
    outcomes = []
    for rows in (VOCABULARY_AND_MORE, 33, 1 + 97 // 20):
        subject = Subject(MODELS["tied"], Shape(vocabulary=rows))
        with Rig(subject, tmp_path / str(rows), optimizer=QUIET) as rig:
            outcomes.append((len(pieces_of(subject, "head")), rig.run(5), rig.weights()))
    assert [count for count, _, _ in outcomes] == [1, 3, 20]
    for _, losses, weights in outcomes[1:]:
        assert relative(losses, outcomes[0][1]) <= 1e-6
        assert distance(weights, outcomes[0][2]) <= 1e-6


VOCABULARY_AND_MORE = 100


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [llama(pad_token_id=41), UNTIED_GEMMA], ids=["plain, padding", "scaled, padding"])
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


@pytest.mark.parametrize(
    ("clip", "dtype", "tied"),
    every(2, [(0.5, "float32", False), (0.5, "bfloat16", True), (None, "float32", True), (None, "bfloat16", False)]),
)
def test_one_more_step_moves_exactly_what_was_predicted(clip: float | None, dtype: Any, tied: bool, tmp_path: Path) -> None:
    """Shares slots of pieces of 700, 700 and 600 rows with the blocks; compares four steps with three."""
    config = llama(vocab_size=2000, hidden_size=128, intermediate_size=256, tie_word_embeddings=tied)
    subject = Subject(config, Shape(dtype=dtype, accumulate="float32", batch=2, micro=2, vocabulary=700))
    plan, updated = assert_moves_as_planned(subject, tmp_path, clip=clip, lookahead=1)
    predicted = plan.predicted
    assert updated == subject.spec.stored_parameters
    two_users = sum(stage.params for stage in subject.spec.stages if stage.kind == "embedding") if tied else 0
    resting = subject.spec.stored_parameters if clip else 0
    assert predicted.read_by["gradients"] == predicted.written_by["gradients"] == 4 * (two_users + resting)


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

ToGiveUp = Callable[[str, Any], tuple[Subject, list[float], dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def to_give_up(tmp_path_factory: pytest.TempPathFactory) -> ToGiveUp:
    """Gives to_give_up(name, device): a subject, and the losses and weights of its three steps where none is given up."""

    @cache
    def made(name: str, device: Any) -> tuple[Subject, list[float], dict[str, torch.Tensor]]:
        subject = Subject(MODELS[name], Shape(vocabulary=ROWS, chunk=5))
        with Rig(subject, tmp_path_factory.mktemp("whole"), device=device) as rig:
            return subject, rig.run(3), rig.weights()

    return made


@pytest.mark.parametrize(("device", "name"), [("cpu", "tied"), ("emulated", "untied")])
@pytest.mark.parametrize("phase", ["forward", "logits", "head", "backward"])
def test_a_step_given_up_in_any_pass_can_be_done_again(
    phase: str, device: Any, name: str, to_give_up: ToGiveUp, tmp_path: Path
) -> None:
    """Clips, so that nothing of it has been applied before its end."""
    subject, expected, weights = to_give_up(name, device)
    with Rig(subject, tmp_path, device=device) as rig:
        batches = list(subject.batches(3))
        rig.step(*batches[0], 1)
        middle = pieces_of(subject, "head")[1]

        def give_up() -> None:
            visit = rig.executor.visits.schedule.visits[rig.executor.visits.lookahead.cursor]
            rows = subject.spec.stages[visit.stage].vocabulary
            if visit.phase == phase and rows == middle:
                raise StepAbandoned

        rig.executor.between_micro_batches = give_up
        assert rig.executor.may_abandon()
        for _ in range(4):  # more often than there are spans that could be lost
            with pytest.raises(StepAbandoned):
                rig.step(*batches[1], 2)
            rig.executor.abandon()
            rig.executor.drain()
        rig.executor.between_micro_batches = lambda: None
        for number in (2, 3):
            rig.step(*batches[number - 1], number, last=number == 3)
        rig.executor.drain()
        assert rig.losses == expected
        assert unequal(rig.weights(), weights) == []


@crossed(2, name=["untied", "tied"], phase=["forward", "logits", "head", "backward"])
def test_unclipped_a_step_can_be_given_up_until_its_first_update(phase: str, name: str, tmp_path: Path) -> None:
    """Updates an untied head's pieces as they are done; a tied one's rest until the embedding's backward."""
    subject = Subject(MODELS[name], Shape(vocabulary=ROWS))
    with Rig(subject, tmp_path, clip=None) as rig:
        seen: dict[str, bool] = {}

        def look() -> None:
            seen[rig.executor.visits.schedule.visits[rig.executor.visits.lookahead.cursor].phase] = rig.executor.may_abandon()

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
