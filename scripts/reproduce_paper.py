#!/usr/bin/env python3
"""Reproduces the paper on paper: predicts its steps from its hardware, then makes fuyou's own plans for the same machines.

    python scripts/reproduce_paper.py [--part 1|2] [--json FILE]
    python scripts/reproduce_paper.py --part 1 --set IN_FLIGHT=3      the errors with another value of a listed number
    needs no GPU, no drives and no data; a quarter of an hour

Part 1 takes the hardware and policy of "Ratel: Optimizing Holistic Data Movement to Fine-tune 100B Model on a Consumer GPU"
(ICDE 2025; first published as Fuyou, arXiv 2403.06504): the whole batch in the GPU's memory, weights and states on the drives,
30 bytes per parameter and step, gradients in RAM, nothing deferred, no states kept in RAM. The simulator that plans runs
predicts each published step. `paper/given.py` lists all inputs: four constants, the hardware, the policy.

Part 2 is what `fuyou plan --hardware` chooses on the same machines, and on two consumer drives. All of it is predicted. The
exit code is 1 if a line that is asked does not hold.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paper import given, ours, policy
from paper.ours import Ours
from paper.policy import Reproduced
from proof import verdicts
from rich.console import Console
from rich.table import Table

from fuyou_cli.core.units import gib
from fuyou_cli.machine.described import described

WIDTH = 190
WHOLE = {"model", "machine", "settings", "busiest"}  # columns whose words are not broken
LEFT = {"what", "from", *WHOLE}
PLAN = ("weights in RAM", "states in RAM", "updates deferred", "outputs kept")
STEPS = 1000  # that endurance is told for
HOUR = 3600


def show_origin(console: Console, words: Sequence[str]) -> None:
    """Prints what made the figures below. None of them depends on the machine that it names."""
    versions = ", ".join(f"{name} {version}" for name, version in verdicts.versions().items() if name != "commit")
    console.print(shlex.join(["python", "scripts/reproduce_paper.py", *words]), markup=False, highlight=False)
    console.print(f"{verdicts.described()}; {versions}\n", markup=False, highlight=False)


def set_given(text: str) -> None:
    """Sets another value (NAME=VALUE) of a number that part 1 lists. Raises ValueError with what is wanted."""
    name, _, value = text.partition("=")
    names = [name for lines in given.listed().values() for line in lines for name in line.names]
    numbers = [name for name in names if isinstance(getattr(given, name), int | float)]
    if name not in numbers:
        raise ValueError(f"the name is none of {', '.join(numbers)}")
    before = getattr(given, name)
    try:
        setattr(given, name, type(before)(value))
    except ValueError:
        kind = "whole number" if isinstance(before, int) else "number"
        raise ValueError(f"a {kind} is wanted, such as {name}={before:g}") from None
    given.PUBLISHED = given.published()
    fitted = {row.drives for row in given.PUBLISHED if row.role == "fitted"}
    if unknown := {row.drives for row in given.PUBLISHED} - fitted:
        counts = ", ".join(map(str, sorted(unknown)))
        raise ValueError(f"then no published row gives the rate of {counts} drives, which others are predicted for")


def verdict(holds: bool) -> str:
    return "holds" if holds else "DOES NOT HOLD"


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT else "right", overflow="fold", no_wrap=column in WHOLE)
    for row in rows:
        table.add_row(*row)
    return table


# ---- part 1 --------------------------------------------------------------------------------------------------------------


def show_reproduced(console: Console, found: Reproduced) -> None:
    """Prints one table: all inputs, then every published row."""
    console.print("The paper, reproduced on paper: seconds per step, predicted by the simulator", style="bold")
    table = table_of(("what", "published s", "predicted s", "error", "busiest", "from"), [])
    for group, lines in given.listed().items():
        for number, line in enumerate(lines, start=1):
            value = f"{line.value}: {rates_of(found)}" if "FITTED_BATCH" in line.names else line.value
            table.add_row(f"{group} {number}: {value}", "", "", "", "", line.source)
        table.add_section()
    for row in found.rows:
        paper = row.published
        error = f"{row.error:+.1%}" if paper.role == "predicted" else f"({row.error:+.1%}) {paper.role}"
        what = f"{paper.model}, {paper.batch} sequences, {paper.drives} drives"
        table.add_row(what, f"{paper.seconds:.1f}", f"{row.predicted:.1f}", error, row.busiest, paper.where)
    console.print(table)
    moved = [row.moved for row in found.rows]
    console.print(
        f"bytes that these steps move per parameter: {min(moved):.1f} to {max(moved):.1f}, of {given.STEP_BYTES}: blocks that "
        "are there when forward turns are not read again."
    )
    show_batch_of_135b(console, found)
    console.print(
        f"errors of {len(found.errors)} rows, those in brackets left out: median {found.median:.1%} (asked at most "
        f"{policy.MEDIAN:.0%}), worst {found.worst:.1%} (asked at most {policy.WORST:.0%}): {verdict(found.holds)}"
    )
    others = found.errors_but("135B")
    console.print(
        f"    without 135B, whose batch is one of the constants: {len(others)} rows, median {statistics.median(others):.1%}, "
        f"worst {max(others):.1%}"
    )


def rates_of(found: Reproduced) -> str:
    return "; ".join(f"{drives}: {rate / 1e9:.1f} GB/s" for drives, rate in sorted(found.rates.items()))


def show_batch_of_135b(console: Console, found: Reproduced) -> None:
    implied, row, may_be = policy.one_drive_batch(found.rates), policy.one_drive_row(), policy.batches_of_135b()
    (number,) = (number for number, line in enumerate(given.constants(), start=1) if "BATCH_135B" in line.names)
    console.print(
        f"constant {number}: no batch is published for 135B. It is wider than 70B, which holds {may_be[-1]} at most, and "
        f"narrower than 175B, which holds {may_be[0]}: one of {', '.join(map(str, may_be))}. On one drive a step is "
        f"{given.STEP_BYTES} bytes per parameter at that drive's rate whatever its batch, so that {row.figure:g} tokens/s are "
        f"{implied:.1f} sequences: {given.BATCH_135B}. That row is left out of the errors."
    )
    for batch in may_be:
        if batch != given.BATCH_135B:
            errors = ", ".join(f"{error:+.0%}" for error in policy.at_batch(batch, found.rates))
            console.print(f"    at {batch} the errors of 135B's rows would be {errors}")


# ---- part 2 --------------------------------------------------------------------------------------------------------------


def show_beside(console: Console, rows: Sequence[Ours]) -> None:
    console.print("\nBetter than the paper, on paper: tokens per second, the same machines, fuyou's policy", style="bold")
    columns = ("model", "machine", "batch", "micro", "paper", "ours", "ours clipped", "ours committed",
               "paper, of GPU", "ours, of GPU",
               "GPU busy", "s", "TB/step", *PLAN)  # fmt: skip
    console.print(table_of(columns, [beside(row) for row in rows]))
    console.print(how_planned(rows))
    slower, clipped = [row for row in rows if row.slower], [row for row in rows if row.slower_clipped]
    committed = [row for row in rows if row.slower_committed]
    console.print(f"rows where ours is slower: {len(slower)} of {len(rows)}")
    for row in slower:
        why = row.problem or f"the GPU computes {row.busy:.0%} of the step; else it waits for {row.waits or 'nothing'}"
        console.print(f"    {row.model}, {row.batch}, {row.where}: {why}")
    console.print(
        f"rows where ours, clipped, is slower than the paper, which does not clip: {len(clipped)}. Gradients wait in float32 "
        "until the norm of all is known; what RAM does not hold of them is written and read once more, 8 bytes per parameter."
    )
    for row in clipped:
        console.print(slower_line(row, row.clipped))
    console.print(
        f"rows where ours, committed every step, is slower than the paper, which loses a run that ends: {len(committed)}. "
        "States that rest in RAM are written to the ssd each step then."
    )
    for row in committed:
        console.print(slower_line(row, row.committed))


def slower_line(row: Ours, tokens: float | None) -> str:
    why = "does not fit its drive" if tokens is None else f"{tokens:.1f} tokens/s"
    return f"    {row.model}, {row.batch}, {row.where}: {why}, the paper {row.paper:.1f}"


def how_planned(rows: Sequence[Ours]) -> str:
    fitting = [row for row in rows if not row.problem]
    micro = ", ".join(str(size) for size in sorted({row.micro for row in fitting}))
    sums = ", ".join(sorted({row.sums for row in fitting}))
    ram = max((row.ram for row in fitting), default=0)
    return (
        f"planned by the code of `fuyou plan --hardware`; what differs from the defaults: {ours.UNCLIPPED}, as the paper does "
        f"not clip, and no commits between a run's ends, as it has none. `clipped` is {ours.CLIPPED} and `committed` "
        f"{ours.COMMITTED}, each the default, one at a time. The recipe gives model, batch and {given.LENGTH:,} tokens a row; "
        f"of {ours.PAPER_RAM} GiB plans may take {gib(ram)}, sums are {sums}, micro-batches of {micro} rows were chosen (a "
        "described GPU has one rate for all sizes).\n"
        f"of GPU: {given.FLOPS_COUNTED} FLOP per parameter and token over {given.GPU_FLOPS / 1e12:g} TFLOPS, for both, as the "
        "paper counts: what is kept counts as if it were computed again, so that more than 100 % is possible. GPU busy: the "
        "share of the step in which it computes at all. weights in RAM: those at home there or on the GPU, whose copy in RAM "
        "is what updates write."
    )


def beside(row: Ours) -> tuple[str, ...]:
    if row.problem:
        return (row.model, row.where, str(row.batch), row.problem)
    paper, share = "", ""
    if row.paper is not None:
        paper, share = f"{row.paper:,.0f}", f"{replace(row, tokens=row.paper).counted:.0%}"
    return (
        row.model, row.where, str(row.batch), str(row.micro), paper, f"{row.tokens:,.0f}",
        speed_of(row.clipped), speed_of(row.committed), share,
        f"{row.counted:.0%}", f"{row.busy:.0%}", f"{row.seconds:.1f}", f"{row.written / 1e12:.2f}", *plan_of(row),
    )  # fmt: skip


def tb(size: int) -> str:
    return f"{size / 1e12:,.0f} TB"


def speed_of(tokens: float | None) -> str:
    return "no fit" if tokens is None else f"{tokens:,.0f}"


def plan_of(row: Ours) -> tuple[str, ...]:
    return tuple(f"{share:.0%}" for share in (row.weights_in_ram, row.states_in_ram, row.deferred, row.kept))


def show_large(console: Console, rows: Sequence[Ours]) -> bool:
    """Prints 175B at 32,768 tokens: as planned, with everything recomputed, and at the rates of the shipped parts."""
    name, batch, ram = ours.LARGE
    where = f"{name} on one 4090, {ram} GiB, {given.ALL_DRIVES} drives"
    console.print(f"\n{where}, {batch * given.LENGTH:,} tokens per step", style="bold")
    columns = (
        "settings",
        "machine",
        "micro",
        "tok/s",
        "clipped",
        "committed",
        f"{given.FLOPS_COUNTED} per parameter",
        f"{ours.USEFUL_FLOPS} per parameter",
        "GPU busy",
        "s",
        "TB/step",
        *PLAN,
    )
    shown = []
    for row in rows:
        shares = (f"{row.counted:.1%}", f"{row.counted * ours.USEFUL_FLOPS / given.FLOPS_COUNTED:.1%}", f"{row.busy:.1%}")
        speed = (str(row.micro), f"{row.tokens:.1f}", speed_of(row.clipped), speed_of(row.committed))
        settings = row.problem or "\n".join(row.settings)
        shown.append((settings, row.where, *speed, *shares, f"{row.seconds:.1f}", f"{row.written / 1e12:.2f}", *plan_of(row)))
    console.print(table_of(columns, shown))
    best = rows[0].counted
    holds = best >= ours.SHARE
    paper = max((row for row in given.PUBLISHED if row.model == name), key=lambda row: row.batch)
    tokens = paper.batch * given.LENGTH
    console.print(
        f"of the device's measured rate: {best:.0%} (asked at least {ours.SHARE:.0%}): {verdict(holds)}. Counted as the "
        f"paper's {ours.counted(name, tokens / paper.seconds):.1%} at {tokens:,} tokens are, {given.FLOPS_COUNTED} FLOP per "
        "parameter and token of each: it says how fast tokens go by, not how busy the GPU is, as outputs that are kept are not "
        "computed again. The second line computes them again; the third is what `fuyou plan --hardware "
        f"{ours.paper_parts(given.ALL_DRIVES, ram)}` says, whose drives have other rates than those of part 1."
    )
    return holds


def show_consumers(console: Console, rows: Sequence[Ours]) -> None:
    drives = described(ours.consumer_parts(max(ours.CONSUMER_RAM)))
    drive, fastest = drives.drives[0], ours.fastest_of(rows)
    console.print(
        f"\n{len(drives.drives)} x {drive.model} ({tb(drive.capacity)}): the fastest batch of those tried, all predicted",
        style="bold",
    )
    columns = ("model", "machine", "tokens/step", "micro", "tok/s", "clipped", "committed", "of GPU", "GPU busy", "s", "TB/h",
               f"TB/{STEPS:,} steps", "of rated", "days to rating", *PLAN)  # fmt: skip
    shown = []
    for row in fastest:
        speed = (
            f"{row.batch * given.LENGTH:,}",
            str(row.micro),
            f"{row.tokens:,.0f}",
            speed_of(row.clipped),
            speed_of(row.committed),
        )
        shares = (
            f"{row.counted:.0%}",
            f"{row.busy:.0%}",
            f"{row.seconds:.1f}",
            f"{row.written / row.seconds * HOUR / 1e12:.1f}",
        )
        written = STEPS * row.written
        days = f"{row.rated / row.written * row.seconds / HOUR / 24:.0f}"
        worn = (f"{written / 1e12:,.0f}", f"{written / row.rated:.0%}", days)
        shown.append((row.model, row.where, *speed, *shares, *worn, *plan_of(row)))
    console.print(table_of(columns, shown))
    last = max((drives.burst_bytes / row.written for row in fastest if row.written), default=0.0)
    console.print(
        "sustained: at the rates that are left once the drives' fast regions "
        f"({drives.burst_bytes / len(drives.drives) / 1e9:.0f} GB each) are full, which they are after {last:.1f} steps at the "
        f"latest: what a run gets. of rated: {STEPS:,} steps, of {tb(drive.rated_bytes)} per drive."
    )
    by_machine: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        by_machine.setdefault((row.model, row.where), []).append("no fit" if row.problem else f"{row.tokens:,.0f}")
    batches = tuple(f"{batch} sequences" for batch in ours.CONSUMER_BATCHES)
    console.print("tokens per second of every batch tried:")
    console.print(table_of(("model", "machine", *batches), [(*names, *speeds) for names, speeds in by_machine.items()]))


def part_two(console: Console, rates: dict[int, float]) -> tuple[bool, list[Ours]]:
    status = Console(stderr=True)
    groups = [
        ours.paper_cases(rates),
        ours.large_cases(rates),
        *(ours.consumer_cases(sustained=late) for late in (True, False)),
    ]
    cases = [case for group in groups for case in group]
    found = list(ours.planned(cases, lambda text: status.print(text, style="dim")))
    beside_paper, large = found[: len(groups[0])], found[len(groups[0]) :][: len(groups[1])]
    show_beside(console, beside_paper)
    holds = show_large(console, large)
    show_consumers(console, found[len(beside_paper) + len(large) :])
    return holds, found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="also write the tables there")
    options.add_argument("--part", type=int, choices=(1, 2), help="one of the two only")
    options.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="with --part 1")
    asked = options.parse_args()
    if asked.set and asked.part != 1:
        options.error("--set: part 2 plans in processes of its own; add --part 1")
    try:
        for text in asked.set:
            set_given(text)
    except ValueError as error:
        options.error(f"--set {text}: {error}")
    console = Console(width=WIDTH)
    show_origin(console, sys.argv[1:])
    holds, both = True, {}
    if asked.part in (None, 1):
        found = policy.reproduced()
        show_reproduced(console, found)
        rates, holds = found.rates, found.holds
        both["paper"] = [asdict(row) for row in found.rows]
    else:
        rates = policy.fitted_rates()
    if asked.part in (None, 2):
        better, plans = part_two(console, rates)
        holds = holds and better
        both["ours"] = [asdict(row) for row in plans]
    if asked.json is not None:
        asked.json.write_text(json.dumps(both, indent=1) + "\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
