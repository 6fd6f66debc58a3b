"""Shows a plan on the screen: what was understood, the machine, where everything is kept, and what one step costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from fuyou_cli.advice.facts import RunFacts
from fuyou_cli.advice.planning import Outcome
from fuyou_cli.core.units import GiB, MiB, brief, count, gb, gib
from fuyou_cli.machine.background_load import are_busy
from fuyou_cli.machine.origins import origins_of
from fuyou_cli.planner.phases import phase_peaks
from fuyou_cli.spec.model import ModelSpec, Rule, StageSpec
from fuyou_cli.spec.plan import Plan, StagePlan, Tier

from .answer import nothing_helps, show_answer
from .step_table import WIDE, evaluating, run_length, show_step
from .theme import (
    Symbols,
    column,
    heading,
    machine_in_words,
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
from .traffic import show_traffic, warn_of_wear, wear_in_full

POLICY_WIDTH = 96  # columns from which the policy column is shown
_TITLE: dict[Tier, str] = {"gpu": "GPU", "cpu": "RAM", "ssd": "SSD"}
_OPTIMIZER: dict[Rule, str] = {"adamw": "AdamW", "lion": "Lion"}


def show_plan(console: Console, facts: RunFacts, *, verbose: bool) -> None:
    """Prints the answer in five lines, warnings, then the whole plan."""
    shapes = symbols(console)
    show_answer(console, facts, shapes)
    warn_of_wear(console, facts)
    heading(console, "Plan")
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
        ("method", f"{_trained(model)}, {dtypes}, float32 {_OPTIMIZER[model.layout.rule]}; {_clipping(plan, model)}"),
        *([("frozen", _frozen(model))] if model.sources or model.imported_because else []),
        ("batch", ", ".join([batch, *pieces])),
        *([("kernels", facts.kernels)] if facts.kernels else []),
    ]


def _batch(plan: Plan, shapes: Symbols) -> tuple[str, list[str]]:
    """Says what a step holds, and how it is divided: rows as they are, if their lengths are known."""
    numerics, typical = plan.numerics, plan.typical
    rows = numerics.batch_size
    if typical is None:
        whole = f"{rows} {shapes.times} {numerics.max_seq_len:,} = {numerics.tokens:,} tokens per step"
        return whole, [f"micro-batch {numerics.micro_batch_size}"]
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
    return f"{count(model.parameters - frozen)} parameters trained, {count(frozen)} frozen{_quantised(model)}"


def _quantised(model: ModelSpec) -> str:
    """Says how many of them rest quantised, and how."""
    kind, many = model.quantisation, model.quantised_parameters
    words = {"nf4": "nf4", "nf4_double": "nf4 with double quantisation", "int8": "int8", "mxfp4": "mxfp4", "fp8": "fp8"}
    return "" if kind is None else f" ({count(many)} of them in {words[kind]})"


def _frozen(model: ModelSpec) -> str:
    """Says where frozen weights are read from, and why some of them are copied first."""
    there = sum(piece.size for stage in model.stages for piece in stage.source)
    copied = sum(stage.imported_bytes for stage in model.stages)
    parts = [f"{gib(there)} read from the model's own files, not copied"] if there else []
    if copied:
        parts.append(f"{gib(copied)} copied into the store: {model.imported_because}")
    return "; ".join(parts)


def _clipping(plan: Plan, model: ModelSpec) -> str:
    clipping = "no clipping" if plan.clip_grad_norm is None else f"exact clipping at norm {plan.clip_grad_norm:g}"
    if plan.clip_grad_norm is not None and not plan.norm_first:
        return f"{clipping}: updates wait for the last gradient"
    if plan.norm_first:
        clipping += ", which a first backward measures"
    deferred = sum(model.stages[stage.stage].trained for stage in plan.stages if stage.deferred)
    backward, share = "the second backward" if plan.norm_first else "backward", f"{deferred / model.updated_parameters:.0%}"
    if share == "0%":
        return f"{clipping}: every update overlaps {backward}"
    return f"{clipping}: {share} of the updates run in the next forward, the rest beside {backward}"


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
    return [("machine", dot.join([*name, *machine_in_words(hardware)])), ("rates", rates), ("engine", dot.join(engine))]


def _known_rates(facts: RunFacts) -> list[str]:
    hardware, later = facts.hardware, facts.hardware.lasting()
    known = [
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
    return [words for value, words in known if value]


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
    content = ruled(shapes)
    column(content, "rate", wrap=True)
    column(content, "value", right=True)
    column(content, "origin")
    column(content, "source", wrap=True, style="dim")
    plus = " + " if console.width >= WIDE else "\n+ "  # three rates on a line leave sources one word per line
    for one in origins_of(facts.hardware):
        value = f"{tera(one.values[0])} TFLOPS" if one.flops else plus.join(rate(value) for value in one.values)
        content.add_row(Text(one.what), value, Text(one.origin), Text(one.source))
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

    with_policy = console.width >= POLICY_WIDTH
    heading(console, f"Placement ({name})")
    content = ruled(shapes)
    column(content, "what", wrap=True)
    for title in ("total", *(_TITLE[tier] for tier in room)):
        column(content, title, right=True)
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
    content.add_row("used", "", *(_used(peak, limit) for peak, limit in room.values()))
    show(console, content, indent=2)
    peaks = (f"{phase} {gib(peak)}{' (over budget)' * (peak > plan.cpu_budget)}" for phase, peak in phase_peaks(plan).items())
    pairs(console, [("RAM peaks", f" {shapes.dot} ".join(peaks))])


def _used(peak: int, limit: int) -> Text:
    over = peak > limit
    return Text(percent(peak, limit) + (" over" if over else ""), style="red" if over else "")


def _stages(console: Console, plan: Plan, model: ModelSpec, shapes: Symbols) -> None:
    """Prints where stages are kept. Neighbours of the same kind, size and homes share a line."""
    heading(console, "Stages", "where weights, states, stored gradients and the kept input are")
    content = ruled(shapes)
    for title in ("stage", "kind", "params", "weights", "", "states", "", "grads", "input"):
        column(content, title, right=title in ("params", "weights", "states"))
    position = 0
    for homes, same in groupby(map(_homes, plan.stages, model.stages)):
        kind, params, sizes, weights, states, gradients, boundary, kept, kept_there = homes
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
            + (f" +{kept}" if kept else "")
            + (f" {_TITLE['gpu']} +{kept_there}" if kept_there else ""),
        )
        position += number
    show(console, content, indent=2)
    what = "+1: with the graph of a compiled block" if model.compiled else "+n: with the outputs of n operators"
    outputs = f"; {what}" if any(stage.given for stage in plan.stages) else ""
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
    content = ruled(shapes)
    column(content, "add", wrap=True)
    for figure in ("step", "tokens/s", "RAM", "ssd a step"):
        column(content, figure, right=True)
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
