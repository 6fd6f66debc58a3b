"""Tests frozen tables of tokens of which only the rows of a step's tokens are read: the bits of a run that reads all of them.

Costs about 5 s of one core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from fuyou_cli.core.errors import SwapError, UsageError
from fuyou_cli.engine.forward_only import ForwardOnly
from fuyou_cli.engine.moves import Table
from fuyou_cli.planner import layout
from fuyou_cli.planner.layout import ROW_COST
from fuyou_cli.planner.place import plan
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.recipe.schema import AdapterSection
from fuyou_cli.spec.model import PAGE
from fuyou_cli.spec.plan import Plan, Span

from .comparing import unequal
from .families import llama
from .rig import HARDWARE, Rectangle, Rig, Shape, Subject

STEPS = 4
ROWS, WIDTH = 2000, 64
TABLE = ("model.embed_tokens",)


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tables of a few hundred KiB be read by rows: to ask for one takes no time here."""
    monkeypatch.setattr(layout, "ROW_COST", 0)


def large(**changes: object) -> PreTrainedConfig:
    """Makes a Llama whose table is many times what a step looks up."""
    return llama(**{"vocab_size": ROWS, "hidden_size": WIDTH, **changes})


def frozen(shape: Shape | None = None, freeze: Sequence[str] = TABLE, **changes: object) -> Subject:
    return Subject(large(**changes), shape or Shape(batch=2, micro=1), freeze=freeze)


def reading_all(*asked: Any) -> Plan:
    made = plan(*asked)
    return replace(made, stages=tuple(replace(stage, looked_up=0) for stage in made.stages))


def tables(run: Rig) -> list[int]:
    return [stage.stage for stage in run.plan.stages if stage.looked_up]


def results(subject: Subject, folder: Path, **rig: Any) -> tuple[list[float], dict[str, torch.Tensor], int, Rig]:
    """Returns losses, weights, the bytes that all steps but the first read of the table, and the rig, which is closed."""
    with Rig(subject, folder, **rig) as run:
        for number, (ids, labels) in enumerate(subject.batches(STEPS), start=1):
            run.step(ids, labels, number, last=number in (1, STEPS))
            if number == 1:
                run.executor.drain()
                run.daemon.events()
        run.executor.drain()
        of_table = {stage.index for stage in subject.spec.stages if stage.looked_up}
        read = sum(event.bytes for event in run.daemon.events() if event.label in of_table)
        assert run.daemon.events_dropped == 0
        return run.losses, run.weights(), read, run


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole": ({}, {}),
    "rows that share no page, device": ({"hidden_size": 2048, "head_dim": 8, "vocab_size": 300}, {"device": "emulated"}),
    "cut": ({"shape": Shape(batch=2, micro=1, vocabulary=600)}, {}),
    "cut, device, bfloat16": (
        {"shape": Shape(batch=2, micro=1, vocabulary=600, dtype="bfloat16", tokens=8)}, {"device": "emulated"},
    ),
    "device, batch in RAM, far ahead": ({}, {"device": "emulated", "batch_on_device": False, "lookahead": 4}),
    "summed, two drives": ({}, {"data_sums": True, "directories": 2, "clip": None}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_a_run_that_reads_all(case: str, tmp_path: Path) -> None:
    """Reads of the table at most what the plan says, which is less than all of it."""
    made, rig = CASES[case]
    subject = frozen(**made)
    losses, weights, read, run = results(subject, tmp_path / "rows", **rig)
    wanted, wanted_weights, all_read, _ = results(subject, tmp_path / "all", planning=reading_all, **rig)
    assert losses == wanted
    assert unequal(weights, wanted_weights) == []
    pieces = [stage for stage in subject.spec.stages if stage.looked_up]
    assert tables(run) == [stage.index for stage in pieces] != []
    planned, size = (sum(stage.looked_up for stage in run.plan.stages), sum(stage.weight_bytes for stage in pieces))
    assert 0 < read <= (STEPS - 1) * planned < (STEPS - 1) * size == all_read
    whole = reading_all(run.spec, HARDWARE, run.request)
    by_rows, by_all = (plan_schedule(run.spec, made).traffic.read["weights"] for made in (run.plan, whole))
    assert by_rows - planned == by_all - size


@pytest.mark.parametrize(
    ("subject", "rig"),
    [
        ({"tie_word_embeddings": True}, {}),
        ({"freeze": ("model.layers.0",)}, {}),
        ({"shape": Shape(batch=8, micro=4, tokens=32), "vocab_size": 200}, {}),  # as many pages as the table has
        ({"shape": Shape(batch=2, micro=1)}, {"sweeps": 2, "clip": None}),
        ({}, {"lookahead": 5}),  # as many stages as the model has
    ],
    ids=["tied", "trained", "small", "two sweeps", "all stages fetched early"],
)
def test_others_are_read_whole(subject: dict[str, Any], rig: dict[str, Any], tmp_path: Path) -> None:
    with Rig(frozen(**subject), tmp_path, **rig) as run:
        assert tables(run) == []
        run.run(2)


def test_a_table_under_an_adapter_is_looked_up(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft comes with the extra lora")
    subject = Subject(large(), Shape(batch=2, micro=1, tokens=8, dtype="bfloat16"), adapter=AdapterSection(r=2))
    losses, weights, read, run = results(subject, tmp_path / "rows", states="cpu")
    wanted, wanted_weights, all_read, _ = results(subject, tmp_path / "all", states="cpu", planning=reading_all)
    assert tables(run) == [0]
    assert losses == wanted
    assert unequal(weights, wanted_weights) == []
    assert read < all_read


def test_evaluations_look_up_their_own_rows(tmp_path: Path) -> None:
    """And a copy of all weights has all of them."""
    subject = frozen()
    seen = []
    for planning in (plan, reading_all):
        with Rig(subject, tmp_path / str(len(seen)), planning=planning) as run:
            forward, (ids, labels) = ForwardOnly(run.executor), next(subject.batches(1))
            run.step(ids, labels, 1, last=True)
            with forward.open():
                losses = [
                    forward.losses(Rectangle(some, some), last=False).sum(-1) for some in (ids.flip(1) // 2, ids // 3, ids)
                ]
                forward.stop_ahead()
                copied = [flat.clone() for stage, flat in forward.weights() if stage == 0]
            run.step(ids, labels, 2, last=True)
            seen.append((torch.stack(losses).tolist(), copied[0], run.losses))
    assert seen[0][0] == seen[1][0] and seen[0][2] == seen[1][2]
    assert torch.equal(seen[0][1], seen[1][1])


def test_a_step_given_up_is_forgotten(tmp_path: Path) -> None:
    """The next one looks up its own rows, whether the one before was prefetched for or under way."""
    subject = frozen()
    (first, labels), (second, others) = subject.batches(2)
    with Rig(subject, tmp_path / "whole", clip=0.5) as run:
        run.step(first, labels, 1)
        run.step(second, others, 2, last=True)
        wanted = run.losses
    with Rig(subject, tmp_path / "given up", clip=0.5) as run:
        run.step(first, labels, 1)
        run.executor.abandon()  # what was prefetched

        def give_up() -> None:
            raise KeyboardInterrupt

        run.executor.between_micro_batches = give_up
        with pytest.raises(KeyboardInterrupt):
            run.step(first, labels, 2)
        run.executor.abandon()
        run.executor.between_micro_batches = lambda: None
        run.step(second, others, 2, last=True)
        assert run.losses == wanted


def test_all_pages_of_rows_that_lie_in_two_are_read() -> None:
    """Rows of 384 bytes: some end in the page behind the one that they share with others."""
    table = Table(0, first=64, row=384, rows=64, extent=Span(offset=0, size=7 * PAGE))
    rows = torch.tensor([3, 9, 10, 11, 20, 21])
    read = {table.pages(row) for row in table.apart(rows)}
    assert read == {table.pages(int(row)) for row in rows}
    assert len(read) == 4


@pytest.mark.parametrize("fault", ["short", "another byte"])
def test_what_cannot_be_read_is_named(fault: str, tmp_path: Path) -> None:
    subject = frozen()
    with Rig(subject, tmp_path, data_sums=True, clip=None) as run:
        run.daemon.label_names[0] = "the table"
        (ids, labels), (later, others) = subject.batches(2)
        run.step(ids, labels, 1, last=True)
        run.executor.drain()
        extent, row = run.plan.stages[0].frozen_extent, int(later.max())
        assert extent is not None
        file = next(tmp_path.rglob("store.bin"))
        if fault == "short":
            os.truncate(file, extent.offset)
        else:
            with file.open("r+b") as opened:
                opened.seek(extent.offset + 4 * WIDTH * row)
                opened.write(b"\x07\x07")
        with pytest.raises(SwapError, match="the table"):
            run.step(later, others, 2, last=True)


def test_a_small_table_is_read_whole_as_asking_for_rows_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "ROW_COST", ROW_COST)
    with Rig(frozen(), tmp_path) as run:
        assert tables(run) == []


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_ids_that_the_models_own_code_changes_in_place(device: Any, tmp_path: Path) -> None:
    subject, found = frozen(), []
    in_a_page = PAGE // (4 * WIDTH)
    read = {int(row) // in_a_page for ids, _ in subject.batches(2) for row in ids.flatten()}
    other = in_a_page * next(page for page in range(ROWS // in_a_page) if page not in read)
    for planning in (plan, reading_all):
        with Rig(subject, tmp_path / str(len(found)), planning=planning, clip=None, device=device) as run:
            base, own = run.anatomy.model.base_model, run.anatomy.model.base_model.forward

            def changing(input_ids: torch.Tensor, own: Any = own, **others: Any) -> Any:
                return own(input_ids=input_ids.masked_fill_(input_ids % 2 == 0, other), **others)

            try:
                for number, (ids, labels) in enumerate(subject.batches(2), start=1):
                    base.forward = changing  # a step puts back what it found at first
                    run.step(ids, labels, number, last=True)
                    run.executor.drain()
                    for slot in run.plan.slot_classes[run.plan.stages[0].slot_class].weight_slots:
                        run.memory.tensor(slot, torch.uint8).fill_(0xFF)  # what was not read shows as NaN
            finally:
                base.forward = own
            found.append(run.losses)
    assert found[0] == found[1] and len(found[0]) == 2


def test_ids_that_the_models_own_code_makes(tmp_path: Path) -> None:
    """All of the table is read if its first step shows it; a model that begins to do so later is refused."""
    subject = frozen()
    found = []
    for planning, after in ((plan, 1), (reading_all, 1), (plan, 2)):
        with Rig(subject, tmp_path / str(len(found)), planning=planning, clip=None) as run:
            base, own = run.anatomy.model.base_model, run.anatomy.model.base_model.forward
            base.forward = lambda input_ids, own=own, **others: own(input_ids=(ROWS - 1) - input_ids, **others)
            try:
                if after == 1:
                    found.append(run.run(2))
                    continue
                base.forward = own
                (first, labels), (second, others) = subject.batches(2)
                run.step(first, labels, 1)
                run.step(second, others, 2)
                base.forward = lambda input_ids, own=own, **others: own(input_ids=(ROWS - 1) - input_ids, **others)
                with pytest.raises(UsageError, match="looks up other tokens"):
                    run.step(first, labels, 3, last=True)
                run.executor.abandon()
            finally:
                base.forward = own
    assert found[0] == found[1]
