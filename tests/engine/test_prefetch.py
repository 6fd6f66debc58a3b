"""Tests that what comes next is fetched while a visit waits for its own, and nobody waits for a slot for ever."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from drawn import every

from fuyou_cli.engine.visits import INSIDE
from fuyou_cli.planner import ledgers
from fuyou_cli.planner.place import least_memory
from fuyou_cli.swap.daemon import Result

from .comparing import Outcome, unequal
from .families import gpt2, llama
from .rig import HARDWARE, Rig, Shape, Subject

STEPS = 4
UPDATES: dict[str, dict[str, Any]] = {
    "clipped": dict(clip=0.5),
    "at once": dict(clip=None),
}


class HeldBack:
    """Keeps back the word that `held` has ended until `awaited` was asked for in the step under way: what a slow drive does.
    Requests are (operation, stage)."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, held: tuple[str, int], awaited: tuple[str, int]) -> None:
        self.asked: list[tuple[str, int]] = []
        self.holds = False  # for good; else until `awaited` is asked for
        self.polls_in_vain = 0
        self._held, self._awaited, self._tickets = held, awaited, set[int]()
        self._poll = rig.daemon.poll
        for operation in ("read", "update"):
            monkeypatch.setattr(rig.daemon, operation, self._noting(operation, getattr(rig.daemon, operation)))
        monkeypatch.setattr(rig.daemon, "poll", self.poll)

    def _noting(self, operation: str, submit: Any) -> Any:
        def noted(*arguments: Any, **named: Any) -> int:
            ticket: int = submit(*arguments, **named)
            asked = (operation, named["label"] if "label" in named else arguments[0].label)
            self.asked.append(asked)
            if asked == self._held:
                self._tickets.add(ticket)
            return ticket

        return noted

    def poll(self, ticket: int) -> Result | None:
        if ticket in self._tickets and (self.holds or self._awaited not in self.asked):
            self.polls_in_vain += not self.holds
            assert self.polls_in_vain < 500, f"{self._awaited} is not asked for while {self._held} is under way"
            return None
        return self._poll(ticket)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(llama(num_hidden_layers=5), Shape())


@pytest.fixture(scope="module")
def expected(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> dict[float | None, Outcome]:
    """Returns what three steps give, by clipping."""
    outcomes: dict[float | None, Outcome] = {}
    for clip in (0.5, None):
        with Rig(subject, tmp_path_factory.mktemp("store"), clip=clip) as rig:
            outcomes[clip] = rig.run(3), rig.weights()
    return outcomes


@pytest.mark.parametrize(
    ("updates", "held", "awaited"),
    [
        ("clipped", ("update", 2), ("read", 3)), ("clipped", ("update", 0), ("update", 1)),
        ("at once", ("update", 2), ("read", 3)), ("clipped", ("read", 3), ("read", 4)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_the_next_stage_is_fetched_while_one_is_waited_for(
    device: Any, updates: str, held: tuple[str, int], awaited: tuple[str, int], subject: Subject,
    expected: dict[float | None, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Fetches one stage ahead, so that nothing of stage n + 1 is asked for before stage n is visited; in the second step. The
    first two blocks are still there from the step before."""
    monkeypatch.setattr(ledgers, "_BEYOND", 0)
    with Rig(subject, tmp_path, lookahead=1, device=device, **UPDATES[updates]) as rig:
        batches = list(subject.batches(3))
        daemon = HeldBack(rig, monkeypatch, held, awaited)
        daemon.holds = updates == "at once"  # the update of the step before is under way until then
        rig.step(*batches[0], 1)
        others = [record for record in rig.executor.visits.residency.records if ("update", record.stage) != held]
        rig.executor.visits.residency.wait_until(lambda: all(record.update is None for record in others), "the test")
        daemon.holds, daemon.asked = False, []
        rig.step(*batches[1], 2)
        rig.step(*batches[2], 3, last=True)
        monkeypatch.undo()
        rig.executor.drain()
        assert awaited in daemon.asked
        losses, weights = expected[UPDATES[updates]["clip"]]
        assert rig.losses == losses
        assert unequal(rig.weights(), weights) == []


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_weights_are_fetched_as_far_ahead_as_slots_are_free(
    device: Any, subject: Subject, expected: dict[float | None, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves of three slots one to an update, and all free in forward: stage 4 is asked for while stage 2 is waited for."""
    with Rig(subject, tmp_path, lookahead=1, device=device, **UPDATES["at once"]) as rig:
        assert len(rig.plan.slot_classes[rig.plan.stages[2].slot_class].weight_slots) == 3
        batches = list(subject.batches(3))
        daemon = HeldBack(rig, monkeypatch, ("read", 2), ("read", 4))
        for step, batch in enumerate(batches, start=1):
            daemon.asked = []
            rig.step(*batch, step, last=step == 3)
        monkeypatch.undo()
        rig.executor.drain()
        losses, weights = expected[None]
        assert rig.losses == losses
        assert unequal(rig.weights(), weights) == []


SUBJECTS: dict[str, tuple[Any, Shape]] = {
    "untied": (llama(num_hidden_layers=3), Shape()),
    "tied": (gpt2(), Shape(batch=2, micro=2)),
    "untied, cut": (llama(), Shape(vocabulary=40)),
    "tied, cut": (llama(tie_word_embeddings=True), Shape(batch=2, micro=2, vocabulary=20)),
    "one size": (llama(vocab_size=160, num_hidden_layers=3), Shape()),
}


POLICIES = [("clipped", "cpu"), ("at once", "emulated")]


@pytest.mark.parametrize(
    ("name", "updates", "device"),
    every(3, [(name, *policy) for name in SUBJECTS for policy in POLICIES]),
)
def test_the_fewest_slots_are_enough(name: str, updates: str, device: Any, tmp_path: Path) -> None:
    """Runs at the least memory that is not refused: one slot for gradients (two under a whole tied head), two for weights."""
    subject = Subject(*SUBJECTS[name])
    with Rig(subject, tmp_path / "roomy", device=device, **UPDATES[updates]) as rig:
        losses, weights = rig.run(STEPS), rig.weights()
    # much scratch for updates: else loading, which needs no slots, would need the most memory
    way: dict[str, Any] = dict(device=device, chunks=240, **UPDATES[updates])
    with Rig(subject, tmp_path / "much scratch", **way) as rig:
        least = least_memory(subject.spec, HARDWARE, rig.request)
    with Rig(subject, tmp_path / "least", budget=least, **way) as rig:
        assert rig.plan.lookahead == 1
        assert max(len(slots.gradient_slots) for slots in rig.plan.slot_classes) == (2 if name == "tied" else 1)
        assert rig.run(STEPS) == losses
        assert unequal(rig.weights(), weights) == []


def test_a_deferred_update_begins_inside_the_visit_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a batch of one micro-batch: weights that arrive in the middle of a forward are updated before its end, where the
    host computes it."""
    subject = Subject(llama(num_hidden_layers=3), Shape(batch=2, micro=2))
    with Rig(subject, tmp_path, lookahead=1, device="cpu") as rig:
        batches = list(subject.batches(2))
        rig.step(*batches[0], 1)
        daemon = HeldBack(rig, monkeypatch, ("read", 3), ("read", 3))
        daemon.holds = True
        record = rig.executor.visits.residency.records[3]
        seen: list[bool] = []

        def arrives(*_: Any) -> None:
            """Arrives in the second block, whose next one is on its way."""
            if daemon.holds:
                seen.append(record.due is None)
                while rig.counters().queued or rig.counters().in_flight:
                    time.sleep(0.001)
                daemon.holds = False
                time.sleep(2 * INSIDE)

        block = subject.anatomy.model.get_submodule("model.layers.1")
        attention, last = block.get_submodule("self_attn.q_proj"), block.get_submodule("mlp.down_proj")
        hooks = [attention.register_forward_pre_hook(arrives)]
        hooks.append(last.register_forward_pre_hook(lambda *_: seen.append(record.due is None)))
        try:
            rig.step(*batches[1], 2, last=True)
        finally:
            for hook in hooks:
                hook.remove()
        assert seen[:2] == [False, True]


def test_a_closed_executor_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    subject = Subject(llama(), Shape())
    with Rig(subject, tmp_path) as rig:
        rig.run(1)
    for module in subject.anatomy.model.modules():
        assert not module._forward_hooks and "forward" not in vars(module)
