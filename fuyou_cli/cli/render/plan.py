"""`fuyou plan`: what was understood, the machine, where everything rests, and what one step costs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from fuyou_cli.advice.facts import RunFacts
from fuyou_cli.advice.room import Room
from fuyou_cli.core.disk import FileSystem
from fuyou_cli.core.units import count, duration, gb, gib
from fuyou_cli.machine.background_load import are_busy
from fuyou_cli.machine.origins import RatedBy, origins_of
from fuyou_cli.planner.commit_interval import CommitCosts, commit_costs
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ITEM_SIZE, ModelSpec
from fuyou_cli.spec.plan import MemoryLine, Plan, StagePlan, Tier

from .answer import assumptions_that_decide, show_answer
from .memory import TIER_TITLE, show_memory, show_phase_peaks
from .options import show_changes, show_comparison
from .step import WIDE, length, run_seconds, show_step
from .theme import Symbols, column, heading, memory_unit, pairs, percent, rate, ruled, say, show, symbols, tera
from .wear import spared_rows, warn_of_wear, warn_of_worn, wear_in_full

POLICY_WIDTH = 96  # columns from which the policy column is shown


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
    """The answer in five lines, what warns of something, then the whole plan."""
    shapes = symbols(console)
    show_answer(console, plan, hardware, room, facts, shapes)
    warn_of_worn(console, hardware)
    warn_of_wear(console, plan, hardware, room, facts)
    heading(console, "Plan")
    pairs(console, _understood(plan, model, shapes) + _machine(plan, hardware, facts, shapes))
    _rates(console, plan, hardware, shapes, verbose=verbose)
    _placement(console, plan, room, shapes)
    show_phase_peaks(console, plan, shapes)
    show_step(console, plan, model, hardware, shapes, steps=facts.left, done=facts.done, even=facts.even, region=facts.region)
    _endings(console, facts)
    _traffic(console, plan, hardware, room, shapes, facts)
    if verbose:
        if facts.step is not None:
            show_memory(console, plan, model, facts.step, shapes)
        _stages(console, plan, model, shapes)
    if facts.compared is not None:
        show_comparison(console, facts.compared, shapes)
    if facts.changes is not None:
        show_changes(console, facts.changes, shapes, tried=facts.tried)
    _notes(console, facts)


def _notes(console: Console, facts: RunFacts) -> None:
    """What was noticed on the way and decides nothing."""
    if facts.notes:
        heading(console, "Notes")
    for note in facts.notes:
        say(console, f"- {note}", indent=2)


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
        ("model", f"{plan.model}: {model.architecture}, {count(model.parameters)} parameters{active}, {blocks} blocks{tied}"),
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


def _rates(console: Console, plan: Plan, hardware: HardwareProfile, shapes: Symbols, *, verbose: bool) -> None:
    """Of a machine that nobody measured here: every rate and whose figure that is, or those alone that decide and that nobody
    measured anywhere."""
    if hardware.measured != "described":
        return
    if verbose:
        _origins(console, "Rates of this machine", "none was measured here", origins_of(hardware), shapes)
    elif rates := assumptions_that_decide(plan, hardware):
        _origins(console, "Rates that decide, and are assumptions", "-v shows all rates", rates, shapes)


def _origins(console: Console, title: str, note: str, rates: Sequence[RatedBy], shapes: Symbols) -> None:
    """Of every rate: what it is, and whose figure that is."""
    heading(console, title, note)
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
    worn = [("wear", wear_in_full(plan, hardware, room, facts)), *spared_rows(facts.spared)]
    pairs(console, [("commits", _commits(plan, facts)), *worn, *map(_disk, room.disks)])


def _commits(plan: Plan, facts: RunFacts) -> str:
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
    places = f"in place: two extents of {gb(once)} take turns"
    costs = commit_costs(plan)
    if plan.commit_every == 1 or costs is None:
        return f"{often}, {places}; a run that is killed loses the step under way"
    run = None if facts.left is None else run_seconds(plan, facts.left, facts.region)
    if facts.steps is not None and facts.steps // plan.commit_every == (facts.done or 0) // plan.commit_every:
        between = f"sooner than the {plan.commit_every:,} steps between two"
        return f"where the run ends alone, {between}; {_kill(costs, run)}; {places}"
    shares = f"{100 * costs.time:.1f}% of time, {100 * costs.written:.0f}% of writes"
    return f"{often}: {shares}; {_kill(costs, run)}; {places}"


def _kill(costs: CommitCosts, run: float | None) -> str:
    """What it costs at most. `run`: seconds of all steps, where their number is known."""
    return f"a kill costs at most {duration(costs.lost if run is None else min(costs.lost, run))}"


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


def show_length(console: Console, plan: Plan, hardware: HardwareProfile, room: Room, facts: RunFacts) -> None:
    """What the number of steps decides, where that was known after the plan."""
    rows = length(plan, facts.left, facts.done, facts.region)
    pairs(console, [*rows, ("wear", wear_in_full(plan, hardware, room, facts))])
    _endings(console, facts)
    warn_of_wear(console, plan, hardware, room, facts)
