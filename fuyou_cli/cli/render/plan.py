"""`fuyou plan`: what was understood, the machine, where everything rests, and what one step costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fuyou_cli.cli.break_even import BreakEven
from fuyou_cli.cli.compare import Comparison
from fuyou_cli.cli.drives import nearly_worn
from fuyou_cli.cli.endings import Ending
from fuyou_cli.cli.origins import RatedBy, origins_of
from fuyou_cli.cli.others import are_busy
from fuyou_cli.cli.planning import Outcome
from fuyou_cli.cli.room import Room, plan_problems
from fuyou_cli.cli.wear import WORN, Wear, Writes, wear_of, writes_of
from fuyou_cli.core.disk import FileSystem
from fuyou_cli.core.units import count, gb, gib
from fuyou_cli.planner.lasting import FastRegion
from fuyou_cli.planner.timeline import Timeline
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ITEM_SIZE, ModelSpec
from fuyou_cli.spec.plan import MemoryLine, Plan, StagePlan, Tier

from .memory import TIER_TITLE, show_memory, show_phase_peaks
from .options import show_changes, show_comparison
from .step import WIDE, length, show_step
from .theme import (
    Symbols,
    column,
    heading,
    memory_unit,
    pairs,
    percent,
    rate,
    ruled,
    say,
    show,
    symbols,
    tera,
)

POLICY_WIDTH = 96  # columns from which the policy column is shown


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What belongs on the screen and is no part of a plan."""

    steps: int | None = None  # of the whole run; None where the data decides
    done: int | None = None  # of these, by the saved run that is gone on from; None of a new one
    io_uring: bool = True  # whether this build has it
    folder: Path = Path()  # whose drive the store would be on
    command: str = "fuyou finetune recipe.yaml"  # to run what fits; empty where it cannot be run
    refusal: str | None = None  # why the model cannot be trained yet
    even: BreakEven | None = None
    compared: Comparison | None = None
    changes: tuple[Outcome, ...] | None = None  # that help; None where none are needed
    tried: int = 0  # plans made to find them
    advice: str = ""  # what to do where nobody has looked for such changes
    region: FastRegion | None = None  # of the drives; None where they are not known to slow down
    endings: tuple[Ending, ...] = ()  # before the last step, by limits of the recipe
    step: Timeline | None = None  # with its memory; None where nobody asked for that

    @property
    def left(self) -> int | None:
        """Steps that are still to be done."""
        return None if self.steps is None else max(0, self.steps - (self.done or 0))


def show_plan(
    console: Console,
    plan: Plan,
    model: ModelSpec,
    hardware: HardwareProfile,
    room: Room,
    *,
    verbose: bool,
    facts: RunFacts,
) -> None:
    """The whole plan, and how to run it when it fits."""
    shapes = symbols(console)
    say(console, Text.assemble(("fuyou plan", "bold"), "  ", plan.model))
    pairs(console, _understood(plan, model, shapes) + _machine(plan, hardware, facts, shapes))
    if hardware.measured == "described":
        _origins(console, origins_of(hardware), shapes)
    _placement(console, plan, room, shapes)
    show_phase_peaks(console, plan, model, shapes)
    show_step(console, plan, model, hardware, shapes, steps=facts.left, done=facts.done, even=facts.even, region=facts.region)
    _endings(console, facts)
    _traffic(console, plan, hardware, room, shapes, facts)
    if verbose:
        if facts.step is not None:
            show_memory(console, plan, model, facts.step, shapes)
        _stages(console, plan, model, shapes)
    if facts.compared is not None:
        show_comparison(console, facts.compared, shapes)
    _verdict(console, plan, hardware, room, facts)
    if facts.changes is not None:
        show_changes(console, facts.changes, shapes, tried=facts.tried)


def _endings(console: Console, facts: RunFacts) -> None:
    """Where limits of the recipe stop the run early."""
    of = f" of {facts.steps:,}" if facts.steps else ""
    rows = [("limit", f"{end.limit} stops the run after step {end.step:,}{of}; {end.again}") for end in facts.endings]
    if rows:
        pairs(console, rows)


def _understood(plan: Plan, model: ModelSpec, shapes: Symbols) -> list[tuple[str, str]]:
    numerics = plan.numerics
    tokens = numerics.batch_size * numerics.max_seq_len
    if numerics.compute_dtype == "bfloat16":
        dtypes = "bfloat16 weights + int16 remainder = exact float32 master"
    else:
        dtypes = "float32 weights"
    blocks = sum(stage.kind == "block" for stage in model.stages)
    active = f" ({count(model.active_parameters)} active per token)" if model.inactive_parameters else ""
    tied = ", head tied to the embedding" if model.tied_head else ""
    chunk = f", head in chunks of {numerics.head_chunk_tokens:,} tokens" if numerics.head_chunk_tokens else ""
    if numerics.vocabulary_rows:
        chunk += f", embedding and head in pieces of {numerics.vocabulary_rows:,} tokens of the vocabulary"
    clip = (
        f"clipping at norm {plan.clip_grad_norm:g}, exact: updates wait for the last gradient"
        if plan.clip_grad_norm is not None
        else _without_clipping(plan, model)
    )
    return [
        ("model", f"{model.architecture}, {count(model.parameters)} parameters{active}, {blocks} blocks{tied}"),
        ("method", f"full fine-tuning, {dtypes}, float32 AdamW; {clip}"),
        (
            "batch",
            f"{numerics.batch_size} {shapes.times} {numerics.max_seq_len:,} = {tokens:,} tokens per step, "
            f"micro-batch {numerics.micro_batch_size}{chunk}",
        ),
    ]


def _without_clipping(plan: Plan, model: ModelSpec) -> str:
    deferred = sum(model.stages[stage.stage].params for stage in plan.stages if stage.deferred)
    if not deferred:
        return "no clipping: every update overlaps backward"
    return f"no clipping: {deferred / model.stored_parameters:.0%} of the updates run in the next forward, the rest in backward"


def _machine(plan: Plan, hardware: HardwareProfile, facts: RunFacts, shapes: Symbols) -> list[tuple[str, str]]:
    device = f"{hardware.device} ({hardware.device_name})"
    if hardware.device_memory:
        device += f" {gib(hardware.device_memory)}"
    parts = [
        device,
        f"{hardware.cores} cores",
        f"{gib(hardware.ram_total)} RAM, {gib(hardware.ram_available)} available",
        f"{gb(hardware.disk_free)} of disk free",
    ]
    rates = [f"matmul {tera(hardware.matmul_flops)} TFLOPS"] if hardware.matmul_flops else []
    if hardware.store_read:
        rates.append(f"store read {rate(hardware.store_read)}, write {rate(hardware.store_write)}")
    if hardware.store_read_mixed:
        rates.append(f"at once {rate(hardware.store_read_mixed)} + {rate(hardware.store_write_mixed)}")
    if hardware.slows_down:
        later = hardware.lasting()
        mixed = f"{rate(later.store_read_mixed)} + {rate(later.store_write_mixed)}"
        rates.append(f"sustained write {rate(later.store_write)}, at once {mixed}")
    if hardware.adamw_bytes:
        rates.append(f"AdamW {rate(hardware.adamw_bytes)} per thread")
    if hardware.h2d:
        rates.append(f"to GPU {rate(hardware.h2d)}, back {rate(hardware.d2h)}")
    dot = f" {shapes.dot} "
    threads = "1 update thread" if plan.io.update_threads == 1 else f"{plan.io.update_threads} update threads"
    backend = plan.io.backend if facts.io_uring else "by threads (built without io_uring)"
    digest = f"profile {hardware.digest()}"
    source = f"described, {digest}" if hardware.measured == "described" else f"measured {hardware.measured}, {digest}"
    if are_busy(hardware.others_cores):
        source += f"; others used {hardware.others_cores:.1f} cores then: `fuyou bench` measures it again"
    if hardware.measured == "assumed":
        source = f"assumed, not measured: `fuyou bench --dir {facts.folder}` measures them"
    return [
        ("machine", dot.join(([hardware.name] if hardware.measured == "described" and hardware.name else []) + parts)),
        ("rates", f"{dot.join(rates) or 'none'} ({source})"),
        (
            "engine",
            f"lookahead {plan.lookahead} {shapes.dot} {threads} {shapes.dot} "
            f"I/O {backend}, {gib(plan.io.block_size)} blocks, {plan.io.read_depth} reads and "
            f"{plan.io.write_depth} writes in flight",
        ),
    ]


def _origins(console: Console, rates: Sequence[RatedBy], shapes: Symbols) -> None:
    """Of every rate of a machine that nobody measured here: what it is, and whose figure that is."""
    heading(console, "Rates of this machine", "none was measured here")
    content = ruled(shapes)
    column(content, "rate", wrap=True)
    column(content, "value", right=True)
    column(content, "origin")
    column(content, "source", wrap=True, style="dim")
    plus = " + " if console.width >= WIDE else "\n+ "  # three rates on a line leave sources a word a line
    for one in rates:
        value = f"{tera(one.values[0])} TFLOPS" if one.flops else plus.join(rate(value) for value in one.values)
        content.add_row(Text(one.what), value, Text(one.origin), Text(one.source))
    show(console, content, indent=2)


def _placement(console: Console, plan: Plan, room: Room, shapes: Symbols) -> None:
    tiers: tuple[Tier, ...] = ("cpu", "ssd") if room.gpu is None else ("gpu", "cpu", "ssd")
    peak = {"gpu": plan.predicted.gpu_peak, "cpu": plan.predicted.cpu_peak, "ssd": plan.predicted.ssd_bytes}
    limit = {"gpu": room.gpu or 0, "cpu": plan.cpu_budget, "ssd": room.store}
    unit, name = memory_unit(max(*peak.values(), *(line.size for line in plan.memory), 0))

    def number(size: int) -> str:
        return f"{size / unit:,.2f}" if size else shapes.none

    with_policy = console.width >= POLICY_WIDTH
    heading(console, f"Placement ({name})")
    content = ruled(shapes)
    column(content, "what", wrap=True)
    for title in ("total", *(TIER_TITLE[tier] for tier in tiers)):
        column(content, title, right=True)
    if with_policy:
        column(content, "policy", wrap=True, style="dim")
    for what, lines in _by_kind(plan.memory).items():
        total = max(line.total for line in lines)
        sizes = [number(sum(line.size for line in lines if line.tier == tier)) for tier in tiers]
        policy = ", ".join(dict.fromkeys(line.policy for line in lines if line.policy))
        content.add_row(Text(what), f"{total / unit:,.2f}" if total else "", *sizes, *([Text(policy)] if with_policy else []))
    content.add_section()
    last = [""] if with_policy else []
    content.add_row("peak", "", *(number(peak[tier]) for tier in tiers), *last, style="bold")
    content.add_row("available", "", *(number(limit[tier]) for tier in tiers), *last)
    content.add_row("used", "", *(_used(peak[tier], limit[tier]) for tier in tiers), *last)
    show(console, content, indent=2)


def _by_kind(lines: Sequence[MemoryLine]) -> dict[str, list[MemoryLine]]:
    groups: dict[str, list[MemoryLine]] = {}
    for line in lines:
        groups.setdefault(line.what, []).append(line)
    return groups


def _used(peak: int, limit: int) -> Text:
    over = peak > limit
    return Text(percent(peak, limit) + (" over" if over else ""), style="red" if over else "")


def _traffic(console: Console, plan: Plan, hardware: HardwareProfile, room: Room, shapes: Symbols, facts: RunFacts) -> None:
    predicted = plan.predicted
    heading(console, "SSD traffic per step")
    content = ruled(shapes)
    column(content, "what", wrap=True)
    column(content, "read", right=True)
    column(content, "written", right=True)
    for kind in dict.fromkeys((*predicted.read_by, *predicted.written_by)):
        read, written = predicted.read_by.get(kind, 0), predicted.written_by.get(kind, 0)
        content.add_row(Text(kind), gb(read) if read else shapes.none, gb(written) if written else shapes.none)
    content.add_section()
    content.add_row("total", gb(predicted.read_per_step), gb(predicted.written_per_step), style="bold")
    show(console, content, indent=2)
    pairs(console, [("commits", _commits(plan)), ("wear", _wear(plan, hardware, room, facts)), *map(_disk, room.disks)])


def _commits(plan: Plan) -> str:
    """How often the run's state is made durable, by what, and what that takes of the disk."""
    rings = {stage.ring.offset: stage.ring for stage in plan.stages if stage.ring.size}.values()
    once, spare = (sum(getattr(ring, key) * ring.size for ring in rings) for key in ("stages", "spares"))
    if plan.store_mode == "redo":
        durable = gb(sum(stage.gradients_extent.size for stage in plan.stages if stage.gradients_extent is not None))
        return (
            f"every step, by its gradients (redo): {gb(once)} once, {gb(spare)} of spare places, {durable} of gradients; "
            f"two extents would take {gb(2 * once)}"
        )
    if plan.commit_every is None:
        return f"where the run begins and ends alone, two extents of {gb(once)}: one that is killed begins again"
    often = "every step" if plan.commit_every == 1 else f"every {plan.commit_every:,} steps"
    if plan.keep > 1:
        return f"a snapshot {often}, the last {plan.keep} kept: {1 + plan.keep} extents of {gb(once)}"
    lost = "the step under way" if plan.commit_every == 1 else "what came after the last commit"
    return f"{often}, in place: two extents of {gb(once)} take turns; a run that is killed loses {lost}"


def written(plan: Plan, room: Room, facts: RunFacts) -> Writes | None:
    """What is written from here to the run's end; None where its length is not known."""
    return None if facts.left is None else writes_of(plan, room, steps=facts.left, resumed=facts.done is not None)


def _wear(plan: Plan, hardware: HardwareProfile, room: Room, facts: RunFacts) -> str:
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


def _disk(disk: FileSystem) -> tuple[str, str]:
    """One file system: what the run puts there and what is left for it. What a stop saves is what rests in the store, no other
    copy of it."""
    held = f", {gb(disk.held)} of it there already" if disk.held else ""
    saved = "; a saved state is part of the store" if "the store" in disk.what else ""
    return "disk", f"{' and '.join(disk.what)}: {gb(disk.wanted)}{held}; {gb(disk.free)} free{saved}"


def _stages(console: Console, plan: Plan, model: ModelSpec, shapes: Symbols) -> None:
    heading(console, "Stages", "where weights, states, resting gradients and the kept input rest")
    item = ITEM_SIZE[model.compute_dtype]
    content = ruled(shapes)
    for title in ("stage", "kind", "params", "weights", "", "states", "", "grads", "input"):
        column(content, title, right=title in ("params", "weights", "states"))
    for first, last in _ranges(plan.stages, model):
        homes, spec = plan.stages[first], model.stages[first]
        number = f"{first}" if first == last else f"{first}-{last}"
        kind = spec.kind if first == last else f"{spec.kind} {shapes.times}{last - first + 1}"
        content.add_row(
            number,
            kind,
            count(spec.params),
            gib(spec.params * item),
            TIER_TITLE[homes.weights],
            gib(spec.params * model.state_item),
            TIER_TITLE[homes.states],
            TIER_TITLE[homes.gradients],
            TIER_TITLE[homes.boundary] + (f" +{len(homes.kept)}" if homes.kept else ""),
        )
    show(console, content, indent=2)
    kept = "; +n: with the outputs of n operators" if any(stage.kept for stage in plan.stages) else ""
    say(console, f"Sizes are of one stage{kept}.", style="dim", indent=2)


def _ranges(stages: Sequence[StagePlan], model: ModelSpec) -> list[tuple[int, int]]:
    """First and last of every run of stages with the same kind, size and homes."""
    ranges: list[tuple[int, int]] = []
    previous: object = None
    for position, stage in enumerate(stages):
        spec = model.stages[position]
        homes = (stage.weights, stage.states, stage.gradients, stage.boundary, len(stage.kept))
        same = (spec.kind, spec.params, *homes)
        if same == previous:
            ranges[-1] = (ranges[-1][0], position)
        else:
            ranges.append((position, position))
        previous = same
    return ranges


def _worn(console: Console, hardware: HardwareProfile) -> None:
    """Drives near their end by their own account, which is there where nobody knows what they are rated for too."""
    for said in dict.fromkeys(nearly_worn(hardware.drives)):
        say(console, Text.assemble(("warning", "bold yellow"), f": {said}"))


def show_length(console: Console, plan: Plan, hardware: HardwareProfile, room: Room, facts: RunFacts) -> None:
    """What the number of steps decides, where that was known after the plan."""
    rows = length(plan, facts.left, facts.done, facts.region)
    pairs(console, [*rows, ("wear", _wear(plan, hardware, room, facts))])
    _endings(console, facts)
    _wear_warnings(console, plan, hardware, room, facts)


def _wear_warnings(console: Console, plan: Plan, hardware: HardwareProfile, room: Room, facts: RunFacts) -> None:
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
    if facts.advice and not wear.accepted:
        say(console, facts.advice, indent=2)


def _verdict(console: Console, plan: Plan, hardware: HardwareProfile, room: Room, facts: RunFacts) -> None:
    console.print()
    _worn(console, hardware)
    problems = plan_problems(plan, room)
    _wear_warnings(console, plan, hardware, room, facts)
    if not problems:
        margin = f"RAM {gib(plan.predicted.cpu_peak)} of {gib(plan.cpu_budget)}"
        if room.gpu is not None:
            margin += f", GPU {gib(plan.predicted.gpu_peak)} of {gib(room.gpu)}"
        run = ("",) if facts.refusal or not facts.command else (". Run: ", (facts.command, "bold"))
        say(console, Text.assemble(("fits", "bold green"), f": {margin}", *run))
    else:
        say(console, Text.assemble(("does not fit", "bold red"), ":"))
        for problem in problems:
            say(console, f"- {problem}", indent=2)
    if facts.refusal:
        say(console, Text.assemble(("cannot be trained yet", "bold red"), f": {facts.refusal}"))
