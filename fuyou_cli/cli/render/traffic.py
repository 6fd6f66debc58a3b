"""Shows what a run does to its drives: traffic of a step, wear, commits, and the disk it needs."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fuyou_cli.advice.facts import USUAL, RunFacts
from fuyou_cli.advice.room import WORN, Spared, wear_of
from fuyou_cli.core.disk import FileSystem
from fuyou_cli.core.units import duration, gb
from fuyou_cli.machine.drives import nearly_worn
from fuyou_cli.planner.commit_interval import LITTLE_LOST, commit_costs

from .theme import Symbols, column, heading, pairs, ruled, say, show, some


def show_traffic(console: Console, facts: RunFacts, shapes: Symbols) -> None:
    """Prints bytes read and written in a step by kind, then wear, commits and disks."""
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
    """Tells how often the run's state is committed, what that costs, and the most work that a crash loses."""
    plan, costs = facts.plan, commit_costs(facts.plan)
    places = f"two copies of {gb(sum(stage.pair.size for stage in plan.stages))}, written in turn"
    if plan.commit_every is None:
        return f"only at the start and the end: a crash loses the whole run{_sooner(facts)}; {places}"
    if plan.commit_every == 1:
        return f"every step; a crash loses only the running step; {places}"
    often = "every step" if plan.commit_every == 1 else f"every {plan.commit_every:,} steps"
    if costs is None or plan.predicted.step_seconds <= 0:
        return f"{often}; {places}"
    lost = costs.lost if facts.run_seconds is None else min(costs.lost, facts.run_seconds)
    told = f"a crash loses at most {duration(lost)}"
    if facts.steps is not None and facts.steps // plan.commit_every == (facts.done or 0) // plan.commit_every:
        often = f"only at the end, because the run is shorter than an interval of {plan.commit_every:,} steps"
    else:
        told += f", commits take {100 * costs.time:.1f}% of the time and {100 * costs.written:.0f}% of the writes"
    return f"{often}: {told}{_sooner(facts) if lost > LITTLE_LOST else ''}; {places}"


def _sooner(facts: RunFacts) -> str:
    """Says what to set so that a crash loses little, and the share of the time that commits then take."""
    plan, again = facts.plan, facts.sooner
    costs = None if again is None else commit_costs(again)
    if again is None or costs is None:
        return ""
    loses = "the running step" if again.commit_every == 1 else duration(costs.lost)
    takes = max(0.0, 1 - plan.plain_seconds / again.predicted.step_seconds)
    return f"; with checkpoint.commit_every_steps={again.commit_every} at most {loses}, for {takes:.1%} of the time"


def _disk(disk: FileSystem) -> tuple[str, str]:
    held = f", {gb(disk.held)} of it already there" if disk.held else ""
    return "disk", f"{' and '.join(disk.what)}: {gb(disk.wanted)}{held}; {gb(disk.free)} free"


def wear_in_brief(facts: RunFacts) -> str:
    """Tells the bytes written in all and the share of a drive's rating, on one line."""
    writes, steps = facts.shown_writes, USUAL if facts.left is None else facts.left
    said = f"{gb(writes.total) if writes.total else 'nothing'} written in {some(steps, 'step')}"
    wear = wear_of(facts.hardware, writes)
    return said if wear is None else f"{said}, {_share(wear.run)} of a drive's rated writes"


def wear_in_full(facts: RunFacts) -> str:
    """Tells what each part of the run writes, and its share of the least drive's rated writes, if known."""
    writes = facts.shown_writes
    counted = f"{USUAL:,} steps write" if facts.left is None else f"the run's {facts.left:,} steps write"
    if facts.left is not None and facts.done:
        counted = f"the {facts.left:,} remaining steps write"
    parts = {counted: writes.steps, "loading": writes.loading, "saving": writes.saving, "export": writes.export}
    said = ", ".join(f"{name} {gb(size)}" for name, size in parts.items() if size) or "nothing is written"
    if wear := wear_of(facts.hardware, writes):
        number = len(facts.hardware.drives)
        each, which = (f" to each of {number} drives", "the least of them") if number > 1 else ("", "the drive")
        said += f"; {gb(wear.run * wear.rated)}{each} is {_share(wear.run)} of the {gb(wear.rated)} that {which} is rated for"
        said += f"; the most worn drive: {wear.before:.0%} used before, {_share(wear.after)} after" if wear.before else ""
    return said


def _share(part: float) -> str:
    return f"{part:.0%}" if part >= 0.1 else f"{part:.1%}"


def spared_in_words(spared: Spared) -> str:
    """Tells which writes are avoided to spare the drives, and how much faster they would be."""
    return f"{gb(spared.per_step)} per step: {spared.instead}; offload.wear=ignore writes it and is {spared.faster:.1%} faster"


def warn_of_wear(console: Console, facts: RunFacts) -> None:
    """Warns about drives that report the end of their life, and about a run that uses much of their rated writes."""
    warnings, wear = list(dict.fromkeys(nearly_worn(facts.hardware.drives))), facts.wear
    if wear is not None and wear.run > WORN:
        warnings.append(f"the run writes {_share(wear.run)} of a drive's rated writes")
    if wear is not None and wear.after > 1:
        before = f"; it had used {_share(wear.before)} before" if wear.before else ""
        warnings.append(f"after the run, a drive will have used {_share(wear.after)} of its rated writes{before}")
    for warning in warnings:
        say(console, Text.assemble(("warning", "bold yellow"), f": {warning}"))
