#!/usr/bin/env python3
"""Measures how long the search for a plan takes: `planner.search.search` alone, without reading the model or the recipe.

    python scripts/bench_search.py [--times 3] [--results DIR]
    needs no GPU and no drives; two minutes where the bar is kept
    to try the script itself: --quick, 13B alone, one search each

The models are configurations of tests/engine/configs. Machines are described by their parts. Every variant is the default
recipe with the settings that its line names, with micro-batches of one row. A line is the median over the searches of one
variant; the first search is not counted. A search is one thread. If it takes clearly longer than its processor time, others had
its core, and a line that is too long for that reason is not judged.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.on_paper import known_config, recipe_of
from proof.verdicts import PASS, Row, conclude, holds, plain_parser, say, show_command, unless_noisy

from fuyou_cli.advice.planning import plan_recipe
from fuyou_cli.cli.console import write_status
from fuyou_cli.core.errors import FuyouError
from fuyou_cli.machine.described import described as machine_of
from fuyou_cli.planner.place import too_small
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.search import search
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec

BUSY = 0.9  # of a search's seconds that the processor works for it, at least, where nobody else has its core
MACHINE, TWO_DRIVES = "rtx4090,12xp5510,512GiB,2xgold5320", "rtx4090,2xgen4,512GiB"
LARGE, SMALL = "llama-3.1-405b", "olmo-2-13b"
BAR, BAR_LARGE = 2.0, 4.0  # seconds
UNCLIPPED, RECOMPUTED = "train.clip_grad_norm=null", "offload.activations=recompute"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Names a configuration and what differs from the defaults (clipped, everything open)."""

    model: str
    settings: tuple[str, ...] = ()
    machine: str = MACHINE

    @property
    def words(self) -> str:
        machine = "" if self.machine == MACHINE else f", {self.machine}"
        return f"{self.model}, {', '.join(self.settings) or 'as by default'}{machine}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Holds the seconds of one search, and the seconds that the processor worked for it."""

    wall: float
    processor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Holds the searches of one variant; all do the same."""

    case: Case
    stages: int  # of the model
    placed: int  # stages of all choices placed
    visits: int  # simulated
    samples: tuple[Sample, ...]


WHOLE = (
    Case(model=LARGE),
    Case(model=LARGE, settings=(UNCLIPPED,)),
    Case(model=LARGE, settings=(UNCLIPPED, RECOMPUTED)),
    Case(model=LARGE, settings=(RECOMPUTED,)),
    Case(model=LARGE, settings=("offload.optimizer_states=ssd",)),
    Case(model=LARGE, settings=("offload.weights=ssd",)),
    Case(model=LARGE, machine=TWO_DRIVES),  # its step measures the norm first
    Case(model=SMALL),
    Case(model=SMALL, settings=(UNCLIPPED,)),
)
QUICK = tuple(case for case in WHOLE if case.model == SMALL)


def asked_of(case: Case) -> tuple[ModelSpec, HardwareProfile, PlanRequest]:
    """Returns what `fuyou plan --hardware` hands to the search. It also searches once."""
    train = {"max_steps": 1000, "batch_size": 32, "micro_batch_size": 1}
    with recipe_of(known_config(case.model), length=1024, train=train, overrides=case.settings) as loaded:
        planned = plan_recipe(loaded, machine_of(case.machine), say=write_status)
    if not planned.fits_ram:
        raise too_small(planned.model, planned.hardware, planned.request)
    return planned.model, planned.hardware, planned.request


def timed(case: Case, times: int) -> Row:
    asked = asked_of(case)
    samples = []
    for _ in range(times):
        began, worked = time.perf_counter(), time.process_time()
        found = search(*asked)
        samples.append(Sample(wall=time.perf_counter() - began, processor=time.process_time() - worked))
    stages = len(asked[0].stages)
    row = judge(Timed(case=case, stages=stages, placed=found.placed, visits=found.visits, samples=tuple(samples)))
    say(f"{row.what}: {row.measured}")
    return row


def judge(found: Timed) -> Row:
    walls = [sample.wall for sample in found.samples]
    wall, processor = statistics.median(walls), statistics.median(sample.processor for sample in found.samples)
    note = (
        f"{min(walls):.2f} to {max(walls):.2f} s, {processor:.2f} s of the processor; {found.stages} stages, "
        f"{found.placed:,} stages of choices placed, {found.visits:,} visits simulated"
    )
    values = {"samples": [asdict(sample) for sample in found.samples], "placed": found.placed, "visits": found.visits}
    bar = BAR_LARGE if found.case.model == LARGE else BAR
    row = holds(found.case.words, f"< {bar:g} s", f"{wall:.2f} s", wall < bar, note=note, values=values)
    if row.verdict == PASS:  # others can only have made it longer
        return row
    return unless_noisy(row, [{"noisy": processor < BUSY * wall}])


def main(words: Sequence[str] | None = None) -> int:
    options = plain_parser(__doc__)
    options.add_argument("--quick", action="store_true", help="13B alone, one search each: tries the script")
    options.add_argument("--times", type=int, default=3, help="searches of a variant (default: 3)")
    asked = options.parse_args(words)
    cases, times = (QUICK, 1) if asked.quick else (WHOLE, max(1, asked.times))
    show_command("scripts/bench_search.py", words)
    try:
        rows = [timed(case, times) for case in cases]
    except FuyouError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    name = "bench_search-quick" if asked.quick else "bench_search"
    return conclude(name, rows, results=asked.results, settings={"machine": MACHINE, "times": times})


if __name__ == "__main__":
    sys.exit(main())
