"""What a run writes to its drives, in words: on a line of the answer, in full, and as warnings."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fuyou_cli.advice.facts import RunFacts
from fuyou_cli.advice.room import Room
from fuyou_cli.advice.wear import WORN, Spared, Wear, Writes, wear_of, writes_of
from fuyou_cli.core.units import gb
from fuyou_cli.machine.drives import nearly_worn
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.plan import Plan

from .theme import say


def written(plan: Plan, room: Room, facts: RunFacts) -> Writes | None:
    """What is written from here to the run's end; None where its length is not known."""
    return None if facts.left is None else writes_of(plan, room, steps=facts.left, resumed=facts.done is not None)


def wear_in_full(plan: Plan, hardware: HardwareProfile, room: Room, facts: RunFacts) -> str:
    """What the run writes, and which share of what its drives are rated for, where that is known."""
    writes = written(plan, room, facts) or writes_of(plan, room, steps=1000, resumed=facts.done is not None)
    counted = "1,000 steps write" if facts.left is None else f"the run's {facts.left:,} steps write"
    if facts.left is not None and facts.done:
        counted = f"the {facts.left:,} steps that are left write"
    said = f"{counted} {gb(writes.steps) if writes.steps else 'nothing'}"
    beside = {"loading": writes.loading, "saving": writes.saving, "export": writes.export}
    if names := [name for name, size in beside.items() if size]:
        said += f", {' + '.join(names)} {gb(sum(beside.values()))}"
    wear = wear_of(hardware, writes)
    return f"{said} (1 TB = 1e12 bytes, as drives are rated)" if wear is None else said + _share_of_rating(hardware, wear)


def spared_rows(spared: Spared | None) -> list[tuple[str, str]]:
    """What was not done to spare the drives, and what it would have brought."""
    if spared is None:
        return []
    said = (
        f"{gb(spared.per_step)} a step: {spared.instead}; writing them would be {spared.faster:.1%} faster and write "
        f"{gb(spared.each)} to each drive in 1,000 steps (offload.wear=ignore)"
    )
    unknown = "" if spared.rated else "; what its drives are rated for is not known, they are spared all the same"
    return [("spared", said + unknown)]


def wear_in_brief(plan: Plan, hardware: HardwareProfile, room: Room, facts: RunFacts) -> str:
    """The same on one line: bytes of all that is written, and the share of a drive's rating."""
    writes = written(plan, room, facts) or writes_of(plan, room, steps=1000, resumed=facts.done is not None)
    steps = 1000 if facts.left is None else facts.left
    said = f"{gb(writes.total) if writes.total else 'nothing'} written in {steps:,} step{'s' * (steps != 1)}"
    wear = wear_of(hardware, writes)
    if wear is None:
        return said
    drive = "its drive" if len(hardware.drives) == 1 else f"each of its {len(hardware.drives)} drives"
    if {drive.rated_bytes for drive in hardware.drives} != {wear.rated}:
        drive = "one of its drives"
    return f"{said}, {_share(wear.run)} of what {drive} is rated for"


def _share_of_rating(hardware: HardwareProfile, wear: Wear) -> str:
    """Of the drive that is rated for least, and what was written before the run."""
    drives, after = hardware.drives, f"{_share(wear.after)} after that"
    share = f"{_share(wear.run)} of the {gb(wear.rated)}"
    if len(drives) == 1:
        already = f", {wear.before:.0%} of which are written already, {after}" if wear.before else ""
        return f": {share} its drive is rated for{already}"
    which = "each" if {drive.rated_bytes for drive in drives} == {wear.rated} else "the least of them"
    already = f"; the most worn has written {wear.before:.0%} of its own already, {after}" if wear.before else ""
    return f"; {gb(wear.run * wear.rated)} to each of its {len(drives)} drives: {share} {which} is rated for{already}"


def _share(part: float) -> str:
    return f"{part:.0%}" if part >= 0.1 else f"{part:.1%}"


def warn_of_worn(console: Console, hardware: HardwareProfile) -> None:
    """Drives near their end by their own account, which is there where nobody knows what they are rated for too."""
    for said in dict.fromkeys(nearly_worn(hardware.drives)):
        say(console, Text.assemble(("warning", "bold yellow"), f": {said}"))


def warn_of_wear(console: Console, plan: Plan, hardware: HardwareProfile, room: Room, facts: RunFacts) -> None:
    """Where the run takes much of what a drive is rated for, or the rest of it."""
    wear = wear_of(hardware, written(plan, room, facts))
    if wear is None:
        return
    if wear.run > WORN:
        drive = "its drive" if len(hardware.drives) == 1 else "one of its drives"
        warning = f": the run writes {_share(wear.run)} of what {drive} is rated for"
        say(console, Text.assemble(("warning", "bold yellow"), warning))
    if wear.after > 1:
        already = f", {_share(wear.before)} is written already" if wear.before else ""
        warning = f": the run takes a drive to {_share(wear.after)} of what it is rated for{already}"
        say(console, Text.assemble(("warning", "bold yellow"), warning))
