"""What a run does to its drives: traffic of a step, wear, commits, and the disk it needs."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fuyou_cli.advice.facts import USUAL, RunFacts
from fuyou_cli.advice.wear import WORN, Spared, Wear, wear_of
from fuyou_cli.core.disk import FileSystem
from fuyou_cli.core.units import duration, gb
from fuyou_cli.machine.drives import nearly_worn
from fuyou_cli.planner.commit_interval import commit_costs
from fuyou_cli.spec.hardware import HardwareProfile

from .theme import Symbols, column, heading, pairs, ruled, say, show, some


def show_traffic(console: Console, facts: RunFacts, shapes: Symbols) -> None:
    """Print bytes read and written in a step by kind, then wear, commits and disks."""
    predicted = facts.plan.predicted
    heading(console, "SSD traffic per step")
    content = ruled(shapes)
    column(content, "what", wrap=True)
    column(content, "read", right=True)
    column(content, "written", right=True)
    for kind in dict.fromkeys((*predicted.read_by, *predicted.written_by)):
        read, written = predicted.read_by.get(kind, 0), predicted.written_by.get(kind, 0)
        if read or written:
            content.add_row(Text(kind), gb(read) if read else shapes.none, gb(written) if written else shapes.none)
    content.add_section()
    content.add_row("total", gb(predicted.read_per_step), gb(predicted.written_per_step), style="bold")
    show(console, content, indent=2)
    spared = [("spared", spared_in_words(facts.spared))] if facts.spared else []
    pairs(console, [("commits", _commits(facts)), ("wear", wear_in_full(facts)), *spared, *map(_disk, facts.room.disks)])


def _commits(facts: RunFacts) -> str:
    """Say how often the run's state is made durable, what that takes, and what a crash loses at most."""
    plan, costs = facts.plan, commit_costs(facts.plan)
    rings = {stage.ring.offset: stage.ring for stage in plan.stages if stage.ring.size}.values()
    once, spare = (sum(getattr(ring, key) * ring.size for ring in rings) for key in ("stages", "spares"))
    if plan.store_mode == "redo":
        durable = sum(stage.gradients_extent.size for stage in plan.stages if stage.gradients_extent is not None)
        return (
            f"every step, by its gradients (redo): {gb(once)} of states, {gb(spare)} spare, {gb(durable)} of gradients; "
            f"two copies would take {gb(2 * once)}"
        )
    if plan.commit_every is None:
        return f"only at the start and the end, two copies of {gb(once)}; a crash loses the whole run"
    often = "every step" if plan.commit_every == 1 else f"every {plan.commit_every:,} steps"
    if plan.keep > 1:
        return f"a snapshot {often}, the last {plan.keep} kept: {1 + plan.keep} copies of {gb(once)}"
    places = f"two copies of {gb(once)}, written in turn"
    if plan.commit_every == 1 or costs is None:
        return f"every step; a crash loses the step under way; {places}"
    lost = costs.lost if facts.run_seconds is None else min(costs.lost, facts.run_seconds)
    loses = f"a crash loses at most {duration(lost)}"
    if facts.steps is not None and facts.steps // plan.commit_every == (facts.done or 0) // plan.commit_every:
        return f"only at the end, which comes before the {plan.commit_every:,} steps of an interval; {loses}; {places}"
    return f"{often}, {100 * costs.time:.1f}% of the time and {100 * costs.written:.0f}% of the writes; {loses}; {places}"


def _disk(disk: FileSystem) -> tuple[str, str]:
    held = f", {gb(disk.held)} of it there already" if disk.held else ""
    return "disk", f"{' and '.join(disk.what)}: {gb(disk.wanted)}{held}; {gb(disk.free)} free"


def wear_in_brief(facts: RunFacts) -> str:
    """Say what is written in all, and the share of a drive's rating, on one line."""
    writes, steps, drives = facts.shown_writes, USUAL if facts.left is None else facts.left, facts.hardware.drives
    said = f"{gb(writes.total) if writes.total else 'nothing'} written in {some(steps, 'step')}"
    wear = wear_of(facts.hardware, writes)
    if wear is None:
        return said
    drive = "its drive" if len(drives) == 1 else f"each of its {len(drives)} drives"
    if {drive.rated_bytes for drive in drives} != {wear.rated}:
        drive = "one of its drives"
    return f"{said}, {_share(wear.run)} of what {drive} is rated for"


def wear_in_full(facts: RunFacts) -> str:
    """Say what the run writes, and which share of what its drives are rated for, where that is known."""
    writes = facts.shown_writes
    counted = f"{USUAL:,} steps write" if facts.left is None else f"the run's {facts.left:,} steps write"
    if facts.left is not None and facts.done:
        counted = f"the {facts.left:,} remaining steps write"
    said = f"{counted} {gb(writes.steps) if writes.steps else 'nothing'}"
    beside = {"loading": writes.loading, "saving": writes.saving, "export": writes.export}
    if names := [name for name, size in beside.items() if size]:
        said += f", {' + '.join(names)} {gb(sum(beside.values()))}"
    wear = wear_of(facts.hardware, writes)
    return said if wear is None else said + _share_of_rating(facts.hardware, wear)


def _share_of_rating(hardware: HardwareProfile, wear: Wear) -> str:
    """Say the share of the drive that is rated for least, and what was written before the run."""
    drives, after = hardware.drives, f"{_share(wear.after)} after the run"
    share = f"{_share(wear.run)} of the {gb(wear.rated)}"
    if len(drives) == 1:
        return f": {share} its drive is rated for" + (f"; {wear.before:.0%} written before, {after}" if wear.before else "")
    which = "each" if {drive.rated_bytes for drive in drives} == {wear.rated} else "the least of them"
    before = f"; the most worn has written {wear.before:.0%} of its own rating before, {after}" if wear.before else ""
    return f"; {gb(wear.run * wear.rated)} to each of its {len(drives)} drives: {share} {which} is rated for{before}"


def _share(part: float) -> str:
    return f"{part:.0%}" if part >= 0.1 else f"{part:.1%}"


def spared_in_words(spared: Spared) -> str:
    """Say what is not written to spare the drives, and what it would have brought."""
    return f"{gb(spared.per_step)} per step: {spared.instead}; offload.wear=ignore writes it and is {spared.faster:.1%} faster"


def warn_of_wear(console: Console, facts: RunFacts) -> None:
    """Warn of drives near their end by their own account, and of a run that takes much of what they are rated for."""
    warnings, wear = list(dict.fromkeys(nearly_worn(facts.hardware.drives))), facts.wear
    if wear is not None and wear.run > WORN:
        drive = "its drive" if len(facts.hardware.drives) == 1 else "one of its drives"
        warnings.append(f"the run writes {_share(wear.run)} of what {drive} is rated for")
    if wear is not None and wear.after > 1:
        before = f"; {_share(wear.before)} was written before" if wear.before else ""
        warnings.append(f"after the run a drive has written {_share(wear.after)} of what it is rated for{before}")
    for warning in warnings:
        say(console, Text.assemble(("warning", "bold yellow"), f": {warning}"))
