"""Runs `fuyou plan`: shows what a run needs, and whether it fits.

Trains nothing, but measures a machine that was never measured. Plans any causal language model from its config.json alone, even
one that cannot be trained yet. A described machine replaces this one completely.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from fuyou_cli.advice.facts import Outcome, check_export, check_output, facts_of, of_rank, room_of, with_evaluation
from fuyou_cli.advice.planning import Replanner, changes_that_help, command_of, plan_recipe, ways_to_be_faster
from fuyou_cli.advice.rings import plan_ring, two_boxes
from fuyou_cli.core.errors import PlanError, UsageError
from fuyou_cli.core.units import parse_rate
from fuyou_cli.machine.described import Box, described_box
from fuyou_cli.spec.hardware import ASSUMED_LINK, ASSUMED_NAME, PAYLOAD, Network
from fuyou_cli.training.length import counted_evaluation

from .console import result_console, status_console, write_json, write_status
from .error_screen import like_ctrl_c
from .render.plan_screen import plan_json, show_plan
from .render.progress import TransferDisplay
from .render.ring_screen import ring_json, show_ring

if TYPE_CHECKING:
    from fuyou_cli.advice.facts import RunFacts
    from fuyou_cli.recipe.load import LoadedRecipe

MOST_BOXES = 64
_SLOWEST, _FASTEST = 1e5, 1e12  # bytes per second of a link
_ETHERNET = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(GbE|Gbit/s|Gbps|Mbit/s|Mbps)\s*$", re.IGNORECASE)


@like_ctrl_c()  # so that a process that tokenises ends too
def run_plan(
    loaded: LoadedRecipe,
    *,
    dry_run: bool = False,
    hardware: str | None = None,
    json_output: bool = False,
    verbose: bool = False,
    boxes: int = 1,
    link: str | None = None,
    ranks: int = 1,
) -> bool:
    """Plans, and returns whether the run fits. `hardware` describes a machine; without it, this one is planned for. `boxes`:
    like it; `ranks`: on each, but a described GPU has one rank. Raises PlanError if there is no plan (with --json also printed
    on stdout)."""
    notes, box = _Notes(), None if hardware is None else described_box(hardware)
    network = _network(box, boxes, link, ranks)
    options = [*([] if hardware is None else ["--hardware", hardware]), *["--dry-run"] * dry_run]
    if hardware is None:
        check_output(loaded.recipe)
    if box is not None and ranks > 1 and network.ranks_per_box != ranks:
        notes(f"note: train.nproc={ranks} is left out: each described card has one rank; name {ranks}, such as {ranks}xrtx4090")
    try:
        if network.ranks > 1:
            return _run_ring(loaded, box, network, notes, measured=not dry_run, json_output=json_output, verbose=verbose)
        outcome = _planned(loaded, box, notes, measured=not dry_run)
    except PlanError as error:
        notes.write()
        if json_output:
            write_json({"fits": False, "problems": [error.message], "help": error.hint, "plan": None})
        raise
    if hardware is None:
        check_export(loaded.recipe, outcome.prepared.model_dir)  # before any output: a refused export does not fit
    facts = _facts(loaded, options, outcome, described=hardware is not None, counted=not dry_run)
    facts = replace(facts, notes=tuple(notes.kept))

    if json_output:
        notes.write()
        write_json(plan_json(facts))
    else:
        show_plan(result_console(), facts, verbose=verbose)
    return not outcome.problems


def _network(box: Box | None, boxes: int, link: str | None, ranks: int) -> Network:
    """Returns what connects the ranks that are planned. Raises UsageError."""
    if not 1 <= boxes <= MOST_BOXES:
        raise UsageError(f"--boxes {boxes}: a plan is of 1 to {MOST_BOXES} boxes")
    if boxes == 1 and link is not None:
        raise UsageError(f"--link {link} connects boxes, and there is one", hint="add --boxes 2")
    ranks = ranks if box is None or box.machine.device == "cpu" else box.cards
    name = (link or ASSUMED_NAME) if boxes > 1 else ""
    return Network(boxes=boxes, ranks_per_box=ranks, link=parse_link(name) if name else ASSUMED_LINK, link_name=name)


def parse_link(text: str) -> float:
    """Parses "10GbE", "25Gbit/s" or "1.2GB/s" into the bytes per second that arrive. Raises UsageError, also for a rate that no
    network has: one digit too many is easily written."""
    if (match := _ETHERNET.match(text)) is not None:
        unit = 1e6 if match[2].lower().startswith("m") else 1e9
        rate = float(match[1]) * unit / 8 * PAYLOAD
    else:
        try:
            rate = parse_rate(text, "B/s")
        except ValueError:
            rate = 0.0
    if not _SLOWEST <= rate <= _FASTEST:
        what = f"--link: {text!r} is no rate of a network (those are from 1Mbit/s to 1TB/s)"
        raise UsageError(what, hint="write 10GbE, 2.5GbE, 25Gbit/s or 1.2GB/s")
    return rate


def _run_ring(
    loaded: LoadedRecipe, box: Box | None, network: Network, notes: _Notes, *, measured: bool, json_output: bool, verbose: bool
) -> bool:
    """Plans the ranks of a run, and shows them."""
    with TransferDisplay(status_console()) as progress:
        ring = plan_ring(loaded, box, network, measure=measured, count=measured, say=notes, progress=progress)
    facts = facts_of(ring.ranks[ring.slowest], ring.rooms[ring.slowest], described=box is not None)
    facts = replace(of_rank(facts, network.ranks_per_box), notes=tuple(notes.kept))
    if json_output:
        notes.write()
        write_json(ring_json(ring, facts))
    else:
        show_ring(result_console(), ring, facts, verbose=verbose)
    return not ring.problems


class _Notes:
    """Collects planning's messages: keeps notes for the end of the screen, and prints progress at once."""

    def __init__(self) -> None:
        self.kept: list[str] = []

    def __call__(self, text: str) -> None:
        kind, colon, message = text.partition(": ")
        if colon and kind in ("note", "warning"):
            self.kept.append(message if kind == "note" else text)
        else:
            write_status(text)

    def write(self) -> None:
        """Writes the notes to stderr, if no screen of a plan shows them."""
        for note in self.kept:
            write_status(note if note.startswith("warning: ") else f"note: {note}")


def _planned(loaded: LoadedRecipe, box: Box | None, notes: _Notes, *, measured: bool) -> Outcome:
    with TransferDisplay(status_console()) as progress:
        machine = None if box is None else box.machine
        planned = plan_recipe(loaded, machine, measure=measured, count=measured, say=notes, progress=progress)
    return Outcome(changes=(), prepared=planned, room=room_of(planned, described=machine is not None))


def _facts(loaded: LoadedRecipe, options: list[str], outcome: Outcome, *, described: bool, counted: bool) -> RunFacts:
    """Collects what is known about the plan, and plans again to find alternatives. `options` of the command decide a plan;
    `counted`: the rows to evaluate are read."""
    prepared = outcome.prepared
    facts = facts_of(prepared, outcome.room, described=described, command=command_of(loaded))
    tokenizer_dir = prepared.tokenizer_dir
    facts = with_evaluation(facts, prepared, counted_evaluation(prepared.recipe, tokenizer_dir) if counted else None)
    elsewise = Replanner(loaded=loaded, prepared=prepared, described=described)
    if outcome.passes():
        faster = ways_to_be_faster(elsewise)
        added = faster[0].overrides if faster else ()
        again = command_of(loaded, "plan", changes=added, options=options) if faster else ""

        def command_for(network: Network) -> str:
            return command_of(loaded, "plan", options=[*options, "--boxes", str(network.boxes), "--link", network.link_name])

        boxes = two_boxes(prepared, outcome.room, command_for)
        facts = replace(facts, faster=faster, faster_command=again, boxes=boxes)
    else:
        changes = tuple(changes_that_help(elsewise, fits=not outcome.problems))
        facts = replace(facts, changes=changes, tried=elsewise.plans)
    return facts
