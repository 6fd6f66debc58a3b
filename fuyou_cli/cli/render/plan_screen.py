"""Shows a plan, on the screen or as data: the answer in five lines, then what was understood, the machine, where everything is
kept, what one step costs (seconds by resource, what compute waits for, how long the run takes), and what the run does to its
drives (traffic of a step, wear, commits, the disk it needs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from rich.console import Console
from rich.text import Text

from fuyou_cli.advice.facts import USUAL, WORN, Outcome, Room, RunFacts, Spared, TwoBoxes, wear_of
from fuyou_cli.advice.planning import altered, per_token
from fuyou_cli.core.disk import FileSystem
from fuyou_cli.core.json_files import one_line
from fuyou_cli.core.units import GiB, MiB, brief, count, duration, gb, gib
from fuyou_cli.machine.measure.timing import are_busy
from fuyou_cli.machine.profile import nearly_worn, origins_of
from fuyou_cli.planner.commit_interval import LITTLE_LOST, commit_costs
from fuyou_cli.planner.memory import phase_peaks
from fuyou_cli.planner.search import FastRegion
from fuyou_cli.spec.hardware import Network
from fuyou_cli.spec.model import ModelSpec, Rule, StageSpec
from fuyou_cli.spec.plan import Plan, StagePlan, Tier
from fuyou_cli.training.state.resume import REFUSED

from .theme import (
    RESOURCE_STYLE,
    Symbols,
    bar,
    column,
    heading,
    machine_in_words,
    ordered,
    pairs,
    percent,
    rate,
    ruled,
    say,
    show,
    some,
    speed,
    symbols,
    tera,
)

WIDE = 96  # columns from which bars are long and the policy of a placement is shown
_TITLE: dict[Tier, str] = {"gpu": "GPU", "cpu": "RAM", "ssd": "SSD"}
_OPTIMIZER: dict[Rule, str] = {"adamw": "AdamW", "lion": "Lion"}


def show_plan(console: Console, facts: RunFacts, *, verbose: bool) -> None:
    """Prints the answer in five lines, warnings, then the whole plan."""
    shapes = symbols(console)
    show_answer(console, facts, shapes)
    warn_of_wear(console, facts)
    heading(console, "Plan")
    show_details(console, facts, shapes, verbose=verbose)


def show_details(console: Console, facts: RunFacts, shapes: Symbols, *, verbose: bool) -> None:
    """Prints all of a plan but the answer."""
    pairs(console, _understood(facts, shapes) + _machine(facts, shapes))
    if facts.deciding_assumptions or (verbose and facts.hardware.measured == "described"):
        _rates(console, facts, shapes)
    _placement(console, facts, shapes)
    show_step(console, facts, shapes)
    _endings(console, facts)
    show_traffic(console, facts, shapes)
    if verbose:
        _stages(console, facts.plan, facts.model, shapes)
    if facts.changes is not None:
        _changes(console, facts, facts.changes, shapes)
    if facts.notes:
        heading(console, "Notes")
    for note in facts.notes:
        say(console, f"- {note}", indent=2)


def show_changed(console: Console, before: Plan, now: Plan) -> None:
    """Prints in one line which figures of a plan are others, now that it was made again."""
    was, figures = _figures_that_may_change(before), _figures_that_may_change(now)
    changed = [
        f"{name} {figures.get(name, 'none')} (was {was.get(name, 'none')})"
        for name in {**was, **figures}
        if figures.get(name) != was.get(name)
    ]
    if changed:
        say(console, f"the plan, now that the data is read: {', '.join(changed)}")


def _figures_that_may_change(plan: Plan) -> dict[str, str]:
    sizes: dict[str, int] = {}
    for line in plan.memory:
        name = line.what if line.what == "process" else f"{line.what} in {_TITLE[line.tier]}"
        sizes[name] = sizes.get(name, 0) + line.size
    return {
        "a step": brief(plan.predicted.step_seconds),
        "tokens in it": f"{plan.step_tokens:,}",
        "lookahead": f"{plan.lookahead}",
        **{name: gib(size) for name, size in sizes.items() if size},
    }


def show_length(console: Console, facts: RunFacts) -> None:
    """Prints what the number of steps decides, if it became known after the plan."""
    pairs(console, [*run_length(facts), *evaluating(facts), ("wear", wear_in_full(facts))])
    _endings(console, facts)
    warn_of_wear(console, facts)


def _endings(console: Console, facts: RunFacts) -> None:
    """Prints which limits of the recipe stop the run early."""
    of = f" of {facts.steps:,}" if facts.steps else ""
    rows = [("limit", f"{end.limit} stops the run after step {end.step:,}{of}; {end.again}") for end in facts.endings]
    if rows:
        pairs(console, rows)


def _understood(facts: RunFacts, shapes: Symbols) -> list[tuple[str, str]]:
    plan, model, numerics = facts.plan, facts.model, facts.plan.numerics
    dtypes = "float32 weights"
    if numerics.compute_dtype == "bfloat16":
        dtypes = "bfloat16 weights + int16 remainder = exact float32 master"
    if model.layout.dtype != "float32":
        dtypes += f", {model.layout.dtype} states"
    blocks = sum(stage.kind == "block" and stage.expert_range is None for stage in model.stages)
    active = f" ({count(model.active_parameters)} active per token)" if model.inactive_parameters else ""
    tied = ", head tied to the embedding" if model.tied_head else ""
    batch, pieces = _batch(plan, shapes)
    if numerics.head_chunk_tokens:
        pieces.append(f"head in chunks of {numerics.head_chunk_tokens:,} tokens")
    if numerics.vocabulary_rows:
        pieces.append(f"vocabulary in pieces of {numerics.vocabulary_rows:,} tokens")
    if numerics.range_experts:
        pieces.append(f"experts in ranges of {numerics.range_experts:,}")
    if plan.sweeps > 1:
        pieces.append(f"{plan.sweeps} sweeps of {plan.group.tokens:,} tokens")
    return [
        ("model", f"{plan.model}: {model.architecture}, {count(model.parameters)} parameters{active}, {blocks} blocks{tied}"),
        ("method", f"{_trained(model)}, {dtypes}, float32 {_OPTIMIZER[model.layout.rule]}; {_clipping(plan)}"),
        *([("frozen", _frozen(model))] if model.sources or model.imported_because else []),
        ("batch", ", ".join([batch, *pieces])),
        *([("processes", _replicas(plan, model))] if plan.replicas > 1 else []),
        *([("kernels", facts.kernels)] if facts.kernels else []),
    ]


def _replicas(plan: Plan, model: ModelSpec) -> str:
    """Says what each of several replicas computes and sends."""
    lanes, count = plan.numerics.lanes, plan.replicas
    each = sum(stage.gradient_bytes(plan.numerics.accumulate_dtype) for stage in model.stages)
    sent = gb(2 * each * (count - 1) // count)
    told = f"{count} replicas of the model, each for {lanes // count} of {lanes} lanes of the rows, send {sent} a step each"
    reads = any(plan.stages[stage.index].weights == "ssd" and stage.frozen_weight_bytes for stage in model.stages)
    return told + ("; each reads all frozen weights from the ssd, and a ring's rank only its own" if reads else "")


def _batch(plan: Plan, shapes: Symbols) -> tuple[str, list[str]]:
    """Says what a step holds, and how it is divided: rows as they are, if their lengths are known."""
    numerics, typical = plan.numerics, plan.typical
    rows = numerics.batch_size
    if typical is None:
        size = f"{rows} {shapes.times} {numerics.max_seq_len:,} = {numerics.tokens:,} tokens per step"
        return size, [f"micro-batch {numerics.micro_batch_size}"]
    padding = 1 - typical.tokens / typical.computed
    held = f"{len(typical.parts)} micro-batch{'es' * (len(typical.parts) != 1)}"
    return (
        f"{some(rows, 'row')} of at most {numerics.max_seq_len:,}, typically {typical.tokens:,} tokens per step",
        [f"{padding:.0%} padding", f"in {held} of at most {numerics.micro_batch_tokens:,}"],
    )


def _trained(model: ModelSpec) -> str:
    frozen = model.frozen_parameters
    if not frozen:
        return "full fine-tuning"
    trained = f"{count(model.parameters - frozen)} parameters trained, {count(frozen)} frozen"
    if model.quantisation is None:
        return trained
    kind = "nf4 with double quantisation" if model.quantisation == "nf4_double" else model.quantisation
    return f"{trained} ({count(model.quantised_parameters)} of them in {kind})"


def _frozen(model: ModelSpec) -> str:
    """Says where frozen weights are read from, and why some of them are copied first."""
    read = sum(piece.size for stage in model.stages for piece in stage.source)
    copied = sum(stage.imported_bytes for stage in model.stages)
    parts = [f"{gib(read)} read from the model's own files, not copied"] if read else []
    if copied:
        parts.append(f"{gib(copied)} copied into the store: {model.imported_because}")
    return "; ".join(parts)


def _clipping(plan: Plan) -> str:
    clipping = "no clipping" if plan.clip_grad_norm is None else f"exact clipping at norm {plan.clip_grad_norm:g}"
    if plan.clip_grad_norm is not None and not plan.norm_first:
        return f"{clipping}: updates wait for the last gradient"
    if plan.norm_first:
        clipping += ", which a first backward measures"
    if any(stage.deferred for stage in plan.stages):
        return f"{clipping}: every update runs in the next forward"
    return f"{clipping}: every update overlaps {'the second backward' if plan.norm_first else 'backward'}"


def _machine(facts: RunFacts, shapes: Symbols) -> list[tuple[str, str]]:
    plan, hardware, dot = facts.plan, facts.hardware, f" {shapes.dot} "
    name = [hardware.name] if hardware.measured == "described" and hardware.name else []
    io = plan.io
    engine = [
        f"lookahead {plan.lookahead}",
        some(io.update_threads, "update thread"),
        f"I/O {io.backend if facts.io_uring else 'by threads (built without io_uring)'}, {gib(io.block_size)} blocks, "
        f"{io.read_depth} reads and {io.write_depth} writes in flight",
    ]
    rates = f"{dot.join(_known_rates(facts)) or 'none'} ({_source(facts)})"
    machine = [*name, *machine_in_words(hardware, ranks=max(1, facts.ranks_on_box))]
    return [("machine", dot.join(machine)), ("rates", rates), ("engine", dot.join(engine))]


def _known_rates(facts: RunFacts) -> list[str]:
    hardware, later = facts.hardware, facts.hardware.lasting()
    rates = [
        (hardware.matmul_flops, f"matmul {tera(hardware.matmul_flops)} TFLOPS"),
        (hardware.store_read, f"store read {rate(hardware.store_read)}, write {rate(hardware.store_write)}"),
        (hardware.store_read_mixed, f"both at once {rate(hardware.store_read_mixed)} + {rate(hardware.store_write_mixed)}"),
        (
            hardware.slows_down,
            f"sustained write {rate(later.store_write)}, both at once {rate(later.store_read_mixed)} + "
            f"{rate(later.store_write_mixed)}",
        ),
        (hardware.adamw_bytes, f"AdamW {rate(hardware.adamw_bytes)} per thread"),
        (hardware.h2d, f"to GPU {rate(hardware.h2d)}, back {rate(hardware.d2h)}"),
        (hardware.device_memory_rate, f"GPU memory {rate(hardware.device_memory_rate)}"),
        (hardware.dram, f"dram {rate(hardware.dram)}"),
    ]
    return [words for value, words in rates if value]


def _source(facts: RunFacts) -> str:
    """Tells where the rates come from."""
    hardware = facts.hardware
    if hardware.measured == "assumed":
        return f"assumed, not measured (to measure them: `fuyou bench --dir {facts.folder}`)"
    source = "described" if hardware.measured == "described" else f"measured {hardware.measured}"
    source += f", profile {hardware.digest()}"
    if are_busy(hardware.others_cores):
        source += f"; other programs used {hardware.others_cores:.1f} cores then: `fuyou bench` measures again"
    return source


def _rates(console: Console, facts: RunFacts, shapes: Symbols) -> None:
    """Prints every rate of a described machine with its source."""
    heading(console, "Rates of this machine", "none was measured here")
    content = ruled(shapes, "rate", "value")
    column(content, "origin")
    column(content, "source", wrap=True, style="dim")
    plus = " + " if console.width >= WIDE else "\n+ "  # three rates on a line leave sources one word per line
    for origin in origins_of(facts.hardware):
        value = f"{tera(origin.values[0])} TFLOPS" if origin.flops else plus.join(rate(value) for value in origin.values)
        content.add_row(Text(origin.what), value, Text(origin.origin), Text(origin.source))
    show(console, content, indent=2)


def _placement(console: Console, facts: RunFacts, shapes: Symbols) -> None:
    """Prints what is kept where, next to what there is, and the RAM that the phases of the run need."""
    plan, predicted = facts.plan, facts.plan.predicted
    room: dict[Tier, tuple[int, int]] = {} if facts.room.gpu is None else {"gpu": (predicted.gpu_peak, facts.room.gpu)}
    room |= {"cpu": (predicted.cpu_peak, plan.cpu_budget), "ssd": (predicted.ssd_bytes, facts.room.store)}
    largest = max(*(peak for peak, _ in room.values()), *(line.size for line in plan.memory))
    unit, name = (GiB, "GiB") if largest >= GiB else (MiB, "MiB")

    def number(size: int) -> str:
        return f"{size / unit:,.2f}" if size else shapes.none

    with_policy = console.width >= WIDE
    heading(console, f"Placement ({name})")
    content = ruled(shapes, "what", "total", *(_TITLE[tier] for tier in room))
    if with_policy:
        column(content, "policy", wrap=True, style="dim")
    for what in dict.fromkeys(line.what for line in plan.memory):
        lines = [line for line in plan.memory if line.what == what]
        total = max(line.total for line in lines)
        sizes = [number(sum(line.size for line in lines if line.tier == tier)) for tier in room]
        policy = ", ".join(dict.fromkeys(line.policy for line in lines if line.policy))
        content.add_row(Text(what), f"{total / unit:,.2f}" if total else "", *sizes, *([Text(policy)] if with_policy else []))
    content.add_section()
    content.add_row("peak", "", *(number(peak) for peak, _ in room.values()), style="bold")
    content.add_row("available", "", *(number(limit) for _, limit in room.values()))
    used = (percent(peak, limit) + " over" * (peak > limit) for peak, limit in room.values())
    content.add_row("used", "", *(Text(share, style="red" if share.endswith("over") else "") for share in used))
    show(console, content, indent=2)
    peaks = (f"{phase} {gib(peak)}{' (over budget)' * (peak > plan.cpu_budget)}" for phase, peak in phase_peaks(plan).items())
    pairs(console, [("RAM peaks", f" {shapes.dot} ".join(peaks))])


def _stages(console: Console, plan: Plan, model: ModelSpec, shapes: Symbols) -> None:
    """Prints where stages are kept. Neighbours of the same kind, size and homes share a line."""
    heading(console, "Stages", "where weights, states, stored gradients and the kept input are")
    content = ruled(shapes)
    for title in ("stage", "kind", "params", "weights", "", "states", "", "grads", "input"):
        column(content, title, right=title in ("params", "weights", "states"))
    position = 0
    for homes, same in groupby(map(_homes, plan.stages, model.stages)):
        kind, params, sizes, weights, states, gradients, boundary, kept_in_ram, kept_there = homes
        number = len(list(same))
        content.add_row(
            f"{position}" if number == 1 else f"{position}-{position + number - 1}",
            kind if number == 1 else f"{kind} {shapes.times}{number}",
            count(params),
            gib(sizes[0]),
            _TITLE[weights],
            gib(sizes[1]) if sizes[1] or not sizes[0] else "frozen",
            _TITLE[states] if sizes[1] or not sizes[0] else "",
            _TITLE[gradients] if sizes[1] else "",
            (_TITLE[boundary] if boundary else "")
            + (f" +{kept_in_ram}" if kept_in_ram else "")
            + (f" {_TITLE['gpu']} +{kept_there}" if kept_there else ""),
        )
        position += number
    show(console, content, indent=2)
    note = "+1: with the graph of a compiled block" if model.compiled else "+n: with the outputs of n operators"
    outputs = f"; {note}" if any(stage.given for stage in plan.stages) else ""
    say(console, f"Sizes are for one stage{outputs}.", style="dim", indent=2)


def _homes(stage: StagePlan, spec: StageSpec) -> tuple[str, int, tuple[int, int], Tier, Tier, Tier, Tier | None, int, int]:
    outputs = len(stage.kept), len(stage.kept_there)
    sizes, kept_input = (spec.weight_bytes, spec.state_bytes), stage.boundary if spec.goes_back else None
    return spec.kind, spec.params, sizes, stage.weights, stage.states, stage.gradients, kept_input, *outputs


# ---- other plans -----------------------------------------------------------------------------------------------------


def _changes(console: Console, facts: RunFacts, outcomes: Sequence[Outcome], shapes: Symbols) -> None:
    """Prints changes that make the run fit, or spare its drives, to be added to the command."""
    if not outcomes:
        words = nothing_helps(facts, fits=not facts.problems)
        say(console, f"{words[0].upper()}{words[1:]}.")  # units stay as they are
        return
    heading(console, "Changes that help", f"the smallest of each kind, planned again ({facts.tried} plans tried)")
    content = ruled(shapes, "add", "step", "tokens/s", "RAM", "ssd a step")
    for outcome in outcomes:
        content.add_row(Text(" ".join(outcome.overrides)), *_figures(outcome.plan))
    show(console, content, indent=2)
    if worn := [wear.run for outcome in outcomes if (wear := outcome.wear()) is not None and not wear.accepted]:
        say(console, f"Each of these still writes {min(worn):.0%} or more of a drive's rated writes.", indent=2)


def _figures(plan: Plan) -> tuple[str, str, str, str]:
    predicted = plan.predicted
    per_second = plan.step_tokens / predicted.step_seconds if predicted.step_seconds > 0 else 0.0
    moved = gb(predicted.read_per_step + predicted.written_per_step)
    return brief(predicted.step_seconds), speed(per_second), gib(predicted.cpu_peak), moved


# ---- the answer ------------------------------------------------------------------------------------------------------


_BUSY = 0.9  # share of a step; with compute busy for more, little can be gained
_WAITING = 0.2  # share of a step; with longer waits a larger batch helps, because states move once a step


def show_answer(console: Console, facts: RunFacts, shapes: Symbols) -> None:
    """Prints five lines on a console of 100 columns, then further reasons why a run does not fit."""
    problems = facts.problems
    say(console, _verdict(facts, problems))
    rows = [
        ("step", _step(facts, shapes)),
        ("bottleneck", _bottleneck(facts.plan)),
        *([("link", _link(facts.network))] if facts.network is not None and facts.network.boxes > 1 else []),
        ("wear", wear_in_brief(facts)),
        ("next", _next(facts, fits=not problems)),
    ]
    if not problems and _advised(facts):
        rows += [("or", _changed(outcome, facts)) for outcome in _advised(facts)[1:]]
        rows += [("try", facts.faster_command), *([("run", f"{facts.command} (as planned here)")] if facts.command else [])]
    if facts.boxes is not None and not problems:
        rows.append(("boxes", boxes_in_words(facts.boxes, facts.plan)))
    pairs(console, rows)
    for problem in problems[1:]:
        say(console, f"also: {problem}")


def _verdict(facts: RunFacts, problems: list[str]) -> Text:
    if problems:
        return Text.assemble(("does not fit", "bold red"), f": {one_line(problems[0])}")
    predicted, room = facts.plan.predicted, facts.room
    margin = f"RAM {gib(predicted.cpu_peak)} of {gib(facts.plan.cpu_budget)}"
    if room.gpu is not None:
        margin += f", GPU {gib(predicted.gpu_peak)} of {gib(room.gpu)}"
    fits = Text.assemble(("fits", "bold green"), f": {margin}")
    return fits.append("; cannot be trained yet", "bold red") if facts.refusal else fits


def _step(facts: RunFacts, shapes: Symbols) -> str:
    seconds, measured = facts.plan.predicted.step_seconds, facts.hardware.measured
    rates = ["sustained"] * facts.plan.sustained + [measured] * (measured in ("assumed", "described"))
    parts = [brief(seconds)]
    if seconds > 0:
        parts.append(f"{speed(facts.tokens / seconds)} tokens/s")
    if facts.left and facts.run_seconds:
        parts.append(f"{some(facts.left, 'step')} in {brief(facts.run_seconds)}")
    if facts.ranks_on_box:
        parts.append("of this rank alone, without waits for others" if facts.network is None else "of all ranks")
    if rates:
        parts.append(f"at {', '.join(rates)} rates")
    return f" {shapes.dot} ".join(parts)


def _link(network: Network) -> str:
    return f"{rate(network.link)} each way between boxes, {1e3 * network.latency:.2g} ms ({network.link_name})"


def _bottleneck(plan: Plan) -> str:
    predicted = plan.predicted
    name, step, stalls = predicted.bottleneck, predicted.step_seconds, predicted.stalls
    share, waits = f"{name}, {percent(predicted.seconds.get(name, 0.0), step)} of the step", sum(stalls.values())
    if not stalls:
        return share
    if waits < 0.001 * step:
        return f"{share}; compute hardly waits"
    who = "it" if name == "compute" else "compute"
    worst = max(stalls, key=lambda cause: stalls[cause])
    return f"{share}; {who} waits {brief(waits)} ({percent(waits, step)}), mostly for {worst}"


def _next(facts: RunFacts, *, fits: bool) -> str:
    """Names the most helpful change, if one is known, then the command that runs the plan."""
    worn = facts.wear is not None and not facts.wear.accepted
    if facts.changes:
        best = facts.changes[0]
        if fits:
            wear = best.wear()
            spared = "" if wear is None else f", {wear.run:.0%} of a drive's rated writes"
            return f"{_changed(best, facts)}: spares the drives{spared}"
        return f"add {_keys(best, facts)}: fits, a step takes {brief(best.plan.predicted.step_seconds)}"
    if facts.changes is not None:
        return nothing_helps(facts, fits=fits)
    if facts.advice and (worn or not fits):
        return facts.advice
    if not fits:
        return "make the step smaller, or give the run more memory or disk"
    if facts.refusal:
        return f"choose another model; this one cannot be trained yet: {facts.refusal}"
    if facts.left == 0:
        return "nothing: all steps are done"
    if any(REFUSED in note for note in facts.notes):
        return f"{_faster(facts)}; a run would still be refused, see the notes below"
    return _faster(facts) + (f". Run: {facts.command}" if facts.command and not _advised(facts) else "")


def _advised(facts: RunFacts) -> tuple[Outcome, ...]:
    """Returns the changes that make the run faster, unless something has to be done first."""
    undone = facts.refusal is None and facts.left != 0
    return facts.faster or () if undone and not facts.changes and facts.hardware.measured != "assumed" else ()


def _changed(outcome: Outcome, facts: RunFacts) -> str:
    """Says a change with what it alters, and its figures beside the plan's."""
    now, was, times = outcome.plan.predicted, facts.plan.predicted, outcome.tokens / facts.tokens
    tokens = [speed(1 / seconds) if seconds else "?" for seconds in map(per_token, (outcome.plan, facts.plan))]
    as_many = " for as many tokens" if times != 1 else ""
    return (
        f"add {_keys(outcome, facts)}: {tokens[0]} tokens/s instead of {tokens[1]}; a step takes {brief(now.step_seconds)} "
        f"instead of {brief(times * was.step_seconds)}{as_many} and writes {gb(now.written_per_step)} instead of "
        f"{gb(times * was.written_per_step)}"
    )


def boxes_in_words(boxes: TwoBoxes, plan: Plan) -> str:
    """Says what two boxes like the planned one would do, and what not."""
    why = f" ({'; '.join(boxes.remarks)})" if boxes.remarks else ""
    if not boxes.helps:
        return f"two such boxes over {boxes.network.link_name} would be {boxes.speed_up:.2g} times as fast: no gain{why}"
    written = [gb(USUAL * size) for size in (boxes.written, plan.predicted.written_per_step)]
    return (
        f"two such boxes over {boxes.network.link_name}: {speed(boxes.tokens_per_second)} tokens/s, {boxes.speed_up:.1f}x, "
        f"{written[0]} on a box instead of {written[1]} in {some(USUAL, 'step')}{why}: {boxes.command}"
    )


def _keys(outcome: Outcome, facts: RunFacts) -> str:
    alters = ", ".join(altered(outcome, facts.plan))
    return " ".join(outcome.overrides) + (f" (other losses: {alters})" if alters else "")


def nothing_helps(facts: RunFacts, *, fits: bool) -> str:
    """Says that none of the changes tried helps a plan that wears its drives too much, or one that does not fit, and what this
    one takes."""
    tried = f"({facts.tried} plans tried)"
    if fits:
        return f"no change of one or two keys spares the drives {tried}"
    needs = facts.plan.predicted
    on_gpu = f"{gib(needs.gpu_peak)} of GPU memory, " if needs.gpu_peak else ""
    return (
        f"no change of one or two keys makes it fit {tried}: it takes {on_gpu}{gib(needs.cpu_peak)} of RAM and "
        f"{gb(needs.ssd_bytes)} of disk"
    )


def _knows_compiled(facts: RunFacts) -> bool:
    """Tells whether compiled blocks are planned at rates that were measured of one."""
    model, tokens = facts.model, facts.plan.numerics.micro_batch_tokens
    blocks = (stage for stage in model.stages if stage.kind == "block")
    shapes = ((model.compute_dtype, model.hidden_size, stage.params, tokens) for stage in blocks)
    return all(facts.hardware.stage_rate("compiled block", *shape).kind == "compiled block" for shape in shapes)


def _faster(facts: RunFacts) -> str:
    plan, hardware = facts.plan, facts.hardware
    if hardware.measured == "assumed":
        return f"measure this machine: `fuyou bench --dir {facts.folder}`"
    if advised := _advised(facts):
        return _changed(advised[0], facts)
    if rates := facts.deciding_assumptions:
        return f"measure that machine: the important rates are assumptions ({'; '.join(rate.what for rate in rates)})"
    if are_busy(hardware.others_cores):
        others = f"other programs used {hardware.others_cores:.1f} cores"
        return f"measure again when the machine is idle: `fuyou bench --dir {facts.folder}` ({others})"
    step = plan.predicted.step_seconds or 1.0
    if plan.predicted.bottleneck in ("compute", "cpu") and plan.predicted.seconds[plan.predicted.bottleneck] >= _BUSY * step:
        if facts.may_compile:
            busy = "compute is nearly always busy"
            return f"try train.compile=true (other losses): {busy}; on an H100 and an H200 steps took 7 to 28 % less with it"
        if facts.model.compiled and not _knows_compiled(facts):
            return "nothing to change: compute is nearly always busy, at rates of blocks that are not compiled"
        return "nothing to change: compute is nearly always busy"
    waits = sum(plan.predicted.stalls.values()) / step
    if waits > _WAITING:
        if facts.faster is None and facts.done is None and facts.advice:
            return f"{facts.advice}: compute waits {waits:.0%} of the step"
        faster = "faster memory" if plan.predicted.bottleneck == "dram" else "more RAM or faster drives"
        return f"try {faster}: compute waits {waits:.0%} of the step"
    return "no better choice is known"


# ---- one step --------------------------------------------------------------------------------------------------------


_CAUSES = 4  # most causes of waiting that are named
_NOTHING = 1e-4  # share of a step; shorter waits are not shown


def show_step(console: Console, facts: RunFacts, shapes: Symbols) -> None:
    """Prints the simulated step: a row per resource, then speed, waits and the length of the run."""
    note = "predicted from assumed rates" if facts.hardware.measured == "assumed" else "predicted"
    note += " with sustained drive rates" if facts.plan.sustained else ""
    heading(console, "One optimizer step", f"{note}; resources overlap")
    predicted, step = facts.plan.predicted, facts.plan.predicted.step_seconds
    content = ruled(shapes)
    column(content, "resource")
    for title in ("work", "rate", "takes", "share"):
        column(content, title, right=True)
    column(content)
    width = 20 if console.width >= WIDE else 6
    for name in ordered(list(predicted.seconds)):
        if name == "dram" and facts.plan.device == "cpu" and name != predicted.bottleneck:
            continue  # compute there moves bytes too, which are not counted
        seconds = predicted.seconds[name]
        drawn = Text(bar(seconds / step if step > 0 else 0, width, shapes), style=RESOURCE_STYLE.get(name, "blue"))
        if name == predicted.bottleneck:
            drawn.append("  bottleneck", style="bold default")
        content.add_row(Text(name), *_work(name, seconds, facts), brief(seconds), percent(seconds, step), drawn)
    show(console, content, indent=2)
    pairs(console, [*_parts(facts, shapes), *_drives(facts), *run_length(facts), *evaluating(facts)])


def _work(name: str, seconds: float, facts: RunFacts) -> tuple[str, str]:
    """Returns amount and rate of one resource. On device cpu, compute and updates share one resource, the cores."""
    predicted, hardware, stored = facts.plan.predicted, facts.hardware, facts.model.updated_parameters
    if seconds <= 0:
        return "", ""
    if name in ("compute", "cpu"):
        return f"{tera(predicted.compute_flops)} TFLOP", f"{tera(predicted.compute_flops / seconds)} TFLOPS"
    if name == "update":
        return f"{count(stored)} params", f"{count(stored / seconds)} params/s"
    moved = {
        "ssd read": predicted.read_per_step,
        "ssd write": predicted.written_per_step,
        "h2d": seconds * hardware.h2d,
        "d2h": seconds * hardware.d2h,
        "dram": seconds * hardware.dram,
    }[name]
    return gb(moved), rate(moved / seconds)


def _parts(facts: RunFacts, shapes: Symbols) -> list[tuple[str, str]]:
    """Returns speed, forward and backward, and what compute waits for; less for a plan that was not simulated."""
    predicted, step = facts.plan.predicted, facts.plan.predicted.step_seconds
    rows = []
    if step > 0 and not facts.ranks_on_box:
        counted = "active parameters" if facts.model.inactive_parameters else "parameters"
        six = f"6N: 6 {shapes.times} {counted} {shapes.times} tokens/s"
        six += f", frozen ones 4 {shapes.times}" if facts.model.frozen_parameters else ""
        rows.append(("speed", f"{speed(facts.tokens / step)} tokens/s, {tera(predicted.step_flops / step)} TFLOPS ({six})"))
    if 0 < predicted.forward_seconds < step:
        backward = brief(step - predicted.forward_seconds)
        phase = "head and backward, twice:" if facts.plan.norm_first else "head and backward"
        rows.append(("step", f"{brief(step)}: forward {brief(predicted.forward_seconds)}, {phase} {backward}"))
        rows.append(("waiting", waiting_for(predicted.stalls, step)))
    return rows


def waiting_for(stalls: dict[str, float], step: float) -> str:
    """Formats waits as "compute waits 1.8 s, 2% of the step: 1.2 s for ..., 0.5 s for ..., 0.1 s for 2 other things"."""
    causes = sorted(((seconds, cause) for cause, seconds in stalls.items() if seconds > _NOTHING * step), reverse=True)
    if not causes:
        return "compute never waits"
    named = [f"{brief(seconds)} for {cause}" for seconds, cause in causes[:_CAUSES]]
    if others := causes[_CAUSES:]:
        named.append(f"{brief(sum(seconds for seconds, _ in others))} for {some(len(others), 'other thing')}")
    total = sum(stalls.values())
    return f"compute waits {brief(total)}, {percent(total, step)} of the step: {', '.join(named)}"


def _drives(facts: RunFacts) -> list[tuple[str, str]]:
    """Tells how long a step takes while the drives keep their first speed, and after that."""
    region = facts.region
    if region is None:
        return []
    two_speeds = f"a step takes {brief(region.first)} at first, then {brief(region.later)}"
    if not region.size:
        return [("drives", f"{two_speeds}; the point where they slow down is not known")]
    steps = f"{region.steps:,.0f}" if region.steps >= 10 else f"{region.steps:,.2g}"
    lasts = f"the first {gb(region.size)} of writes ({steps} steps, {brief(region.steps * region.first)}) are fast"
    if facts.plan.sustained:
        unknown = "" if facts.left else "; the run's length is not known, so a long run is planned"
        return [("drives", f"{two_speeds}: {lasts}{unknown}")]
    return [("drives", f"{lasts}; {'the run stays within them' if facts.left else two_speeds}")]


def evaluating(facts: RunFacts) -> list[tuple[str, str]]:
    """Tells what an evaluation takes, and all of them, as far as that is known; then what samples and the best weights take."""
    rows = _evaluating(facts)
    if facts.best_bytes:
        rows.append(("best", f"{gb(facts.best_bytes)} written to output_dir/best wherever a loss is the lowest so far"))
    if (cost := facts.sampling) is not None:
        most = f"{cost.passes:,} passes over the weights at most, about {brief(cost.seconds)}"
        rows.append(("samples", f"{some(cost.prompts, 'prompt')} at each evaluation: {most}"))
    return rows


def _evaluating(facts: RunFacts) -> list[tuple[str, str]]:
    cost = facts.evaluation
    if cost is None:
        return []
    if cost.seconds is None or cost.rows is None or cost.passes is None:
        return [("evaluating", f"{brief(cost.pass_seconds)} for {some(cost.pass_rows, 'row')}, forward alone")]
    passes = f"{cost.passes:,} pass{'es' * (cost.passes != 1)}"
    each = f"{brief(cost.seconds)} for {some(cost.rows, 'row')} in {passes}, forward alone"
    if cost.times is None or cost.run_share is None:
        return [("evaluating", each)]
    return [("evaluating", f"{each}; {some(cost.times, 'time')}, {percent(cost.run_share, 1.0)} of the run")]


def run_length(facts: RunFacts) -> list[tuple[str, str]]:
    """Tells how long the remaining steps take, if their number is known."""
    saved = "" if facts.done is None else f"resumes after step {facts.done:,}"
    if facts.left is None or facts.run_seconds is None:
        return [("run", saved)] if saved else []
    takes = f"{some(facts.left, 'step')} in {brief(facts.run_seconds)}, loading and saving not counted"
    return [("run", "; ".join(filter(None, (saved, takes if facts.left else "all steps are done"))))]


# ---- drives ----------------------------------------------------------------------------------------------------------


def show_traffic(console: Console, facts: RunFacts, shapes: Symbols) -> None:
    """Prints bytes read and written in a step by kind, then wear, commits and disks."""
    predicted = facts.plan.predicted
    heading(console, "SSD traffic per step")
    content = ruled(shapes, "what", "read", "written")
    for kind in dict.fromkeys((*predicted.read_by, *predicted.written_by)):
        read, written = predicted.read_by.get(kind, 0), predicted.written_by.get(kind, 0)
        if read or written:
            content.add_row(Text(kind), gb(read) if read else shapes.none, gb(written) if written else shapes.none)
    content.add_section()
    content.add_row("total", gb(predicted.read_per_step), gb(predicted.written_per_step), style="bold")
    show(console, content, indent=2)
    spared = [("spared", spared_in_words(facts.spared))] if facts.spared else []
    wear = [] if facts.ranks_on_box else [("wear", wear_in_full(facts))]  # all ranks of a box write to its drives
    pairs(console, [("commits", _commits(facts)), *wear, *spared, *map(_disk, facts.room.disks)])


def _commits(facts: RunFacts) -> str:
    """Tells how often the run's state is committed, what that costs, and the most work that a crash loses."""
    plan, costs = facts.plan, commit_costs(facts.plan)
    places = f"two copies of {gb(sum(stage.pair.size for stage in plan.stages))}, written in turn"
    if facts.ranks_on_box:
        often = "only at the start and the end" if plan.commit_every is None else _every(plan.commit_every)
        return f"{often}, as all ranks; {places}"
    if plan.commit_every is None:
        return f"only at the start and the end: a crash loses the whole run{_sooner(facts)}; {places}"
    if plan.commit_every == 1:
        return f"every step; a crash loses only the running step; {places}"
    often = _every(plan.commit_every)
    if costs is None or plan.predicted.step_seconds <= 0:
        return f"{often}; {places}"
    lost = costs.lost if facts.run_seconds is None else min(costs.lost, facts.run_seconds)
    costs_words = f"a crash loses at most {duration(lost)}"
    if facts.steps is not None and facts.steps // plan.commit_every == (facts.done or 0) // plan.commit_every:
        often = f"only at the end, because the run is shorter than an interval of {plan.commit_every:,} steps"
    else:
        costs_words += f", commits take {100 * costs.time:.1f}% of the time and {100 * costs.written:.0f}% of the writes"
    return f"{often}: {costs_words}{_sooner(facts) if lost > LITTLE_LOST else ''}; {places}"


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps:,} steps"


def _sooner(facts: RunFacts) -> str:
    """Says what to set so that a crash loses little, and the share of the time that commits then take."""
    plan, replanned = facts.plan, facts.sooner
    costs = None if replanned is None else commit_costs(replanned)
    if replanned is None or costs is None:
        return ""
    loses = "the running step" if replanned.commit_every == 1 else duration(costs.lost)
    takes = max(0.0, 1 - plan.plain_seconds / replanned.predicted.step_seconds)
    return f"; with checkpoint.commit_every_steps={replanned.commit_every} at most {loses}, for {takes:.1%} of the time"


def _disk(disk: FileSystem) -> tuple[str, str]:
    held = f", {gb(disk.held)} of it already there" if disk.held else ""
    return "disk", f"{' and '.join(disk.what)}: {gb(disk.wanted)}{held}; {gb(disk.free)} free"


def wear_in_brief(facts: RunFacts) -> str:
    """Tells the bytes written in all and the share of a drive's rating, on one line."""
    writes, steps = facts.shown_writes, USUAL if facts.left is None else facts.left
    words = f"{gb(writes.total) if writes.total else 'nothing'} written in {some(steps, 'step')}"
    wear = wear_of(facts.hardware, writes)
    return words if wear is None else f"{words}, {_share(wear.run)} of a drive's rated writes"


def wear_in_full(facts: RunFacts) -> str:
    """Tells what each part of the run writes, and its share of the least drive's rated writes, if known."""
    writes = facts.shown_writes
    counted = f"{USUAL:,} steps write" if facts.left is None else f"the run's {facts.left:,} steps write"
    if facts.left is not None and facts.done:
        counted = f"the {facts.left:,} remaining steps write"
    parts = {counted: writes.steps, "loading": writes.loading, "saving": writes.saving, "export": writes.export}
    words = ", ".join(f"{name} {gb(size)}" for name, size in parts.items() if size) or "nothing is written"
    if wear := wear_of(facts.hardware, writes):
        number = len(facts.hardware.drives)
        each, which = (f" to each of {number} drives", "the least of them") if number > 1 else ("", "the drive")
        words += f"; {gb(wear.run * wear.rated)}{each} is {_share(wear.run)} of the {gb(wear.rated)} that {which} is rated for"
        words += f"; the most worn drive: {wear.before:.0%} used before, {_share(wear.after)} after" if wear.before else ""
    return words


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


# ---- the same as data ------------------------------------------------------------------------------------------------


SCHEMA_VERSION = 2
_OF_MODEL = ("architecture", "parameters", "active_parameters", "frozen_parameters", "stored_parameters", "tied_head")


def plan_json(facts: RunFacts) -> dict[str, object]:
    """Returns bytes as integers, times in seconds, rates per second, shares of one."""
    plan, model, hardware = facts.plan, facts.model, facts.hardware
    problems, writes, wear, origins = facts.problems, facts.writes, facts.wear, origins_of(facts.hardware)

    def changed(outcome: Outcome) -> dict[str, object]:
        alters = list(altered(outcome, plan))
        return {"overrides": list(outcome.overrides), "alters": alters, "figures": _figures_json(outcome.plan)}

    changes = [changed(outcome) for outcome in facts.changes or ()]
    return {
        "schema_version": SCHEMA_VERSION,
        "fits": not problems,
        "problems": problems,
        "trainable": facts.refusal is None,
        "refusal": facts.refusal,
        "kernels": facts.kernels or None,
        "evaluation": None if facts.evaluation is None else asdict(facts.evaluation),
        "sampling": None if facts.sampling is None else asdict(facts.sampling),
        "model": model_json(plan.model, model),
        "hardware": asdict(hardware),
        "hardware_digest": hardware.digest(),
        "assumed": hardware.measured == "assumed" or any(rate.origin == "assumption" for rate in origins),
        "rates": [asdict(rate) for rate in origins],
        "room": _room(facts.room),
        "steps": facts.steps,
        "done": facts.done,
        "run_seconds": facts.run_seconds,
        "endings": [asdict(ending) for ending in facts.endings],
        "fast_region": None if facts.region is None else _region(facts.region, plan),
        **_speed(plan),
        "cpu_peak": plan.predicted.cpu_peak,
        "phase_peaks": phase_peaks(plan),
        "written_by_run": None if writes is None else writes.total,
        "writes": None if writes is None else asdict(writes),
        "rated_bytes": sum(drive.rated_bytes for drive in hardware.drives) or None,
        "commits": _commits_json(plan) | {"sooner": None if facts.sooner is None else _commits_json(facts.sooner)},
        "wear": None if wear is None else wear.run,
        "worn_before": None if wear is None else wear.before,
        "worn_after": None if wear is None else wear.after,
        "spared": None if facts.spared is None else asdict(facts.spared),
        "compared": None,  # kept for readers of earlier versions: there is no comparison any more
        "changes": None if facts.changes is None else changes,
        "faster": None if facts.faster is None else [changed(outcome) for outcome in facts.faster],
        "faster_command": facts.faster_command or None,
        **({} if facts.boxes is None else {"boxes": asdict(facts.boxes)}),
        "tried": None if facts.changes is None else facts.tried,
        "plan": asdict(plan),
    }


def model_json(name: str, model: ModelSpec) -> dict[str, object]:
    return {"name": name, "stages": len(model.stages)} | {key: getattr(model, key) for key in _OF_MODEL}


def computed_per_step(plan: Plan) -> int:
    """Returns the tokens that a step computes, with padding."""
    return plan.numerics.tokens if plan.typical is None else plan.typical.computed


def _room(room: Room) -> dict[str, object]:
    disks = [
        {"folders": [str(folder) for folder in disk.folders], "what": list(disk.what)}
        | {"wanted": disk.wanted, "held": disk.held, "free": disk.free}
        for disk in room.disks
    ]
    return asdict(room) | {"disks": disks}


def _region(region: FastRegion, plan: Plan) -> dict[str, object]:
    """Tells how long the drives keep their first speed. `left` means that the run outlasts it, and is planned for the later
    speed."""
    return {
        "bytes": region.size or None,
        "steps": region.steps if region.size else None,
        "seconds": region.steps * region.first if region.size else None,
        "step_seconds": region.first,
        "step_seconds_later": region.later,
        "left": plan.sustained,
    }


def _commits_json(plan: Plan) -> dict[str, object]:
    """Returns the interval, and `costs`: shares of the time and of the writes, and the most seconds that a crash loses."""
    costs = commit_costs(plan)
    costed = None if costs is None else asdict(costs)
    return {"every_steps": plan.commit_every, "costs": costed}


def _speed(plan: Plan) -> dict[str, object]:
    predicted, tokens = plan.predicted, plan.step_tokens
    simulated = predicted.step_seconds > 0
    return {
        "tokens_per_step": tokens,
        "computed_per_step": computed_per_step(plan),
        "tokens_per_second": tokens / predicted.step_seconds if simulated else None,
        "tflops_6n": predicted.step_flops / predicted.step_seconds / 1e12 if simulated else None,
    }


def _figures_json(plan: Plan) -> dict[str, object]:
    """Returns the figures that plans are compared by."""
    keys = ("step_seconds", "cpu_peak", "gpu_peak", "read_per_step", "written_per_step")
    predicted = {key: getattr(plan.predicted, key) for key in keys}
    return {**predicted, **_speed(plan), "store_size": plan.store_size}
