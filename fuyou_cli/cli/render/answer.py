"""Shows the first five lines of a plan: whether it fits, its step, what limits it, its wear, and what to do next."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fuyou_cli.advice.facts import RunFacts
from fuyou_cli.advice.planning import Outcome, altered, per_token
from fuyou_cli.core.printable import one_line
from fuyou_cli.core.units import brief, gb, gib
from fuyou_cli.machine.background_load import are_busy
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.state.resume import REFUSED

from .theme import Symbols, pairs, percent, say, some, speed
from .traffic import wear_in_brief

_BUSY = 0.9  # share of a step; with compute busy for more, little can be gained
_WAITING = 0.2  # share of a step; with longer waits a larger batch helps, because states move once a step


def show_answer(console: Console, facts: RunFacts, shapes: Symbols) -> None:
    """Prints five lines on a console of 100 columns, then further reasons why a run does not fit."""
    problems = facts.problems
    say(console, _verdict(facts, problems))
    rows = [
        ("step", _step(facts, shapes)),
        ("bottleneck", _bottleneck(facts.plan)),
        ("wear", wear_in_brief(facts)),
        ("next", _next(facts, fits=not problems)),
    ]
    if not problems and _advised(facts):
        rows += [("or", _changed(one, facts)) for one in _advised(facts)[1:]]
        rows += [("try", facts.faster_command), *([("run", f"{facts.command} (as planned here)")] if facts.command else [])]
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
    if rates:
        parts.append(f"at {', '.join(rates)} rates")
    return f" {shapes.dot} ".join(parts)


def _bottleneck(plan: Plan) -> str:
    predicted = plan.predicted
    name, step, stalls = predicted.bottleneck, predicted.step_seconds, predicted.stalls
    said, waits = f"{name}, {percent(predicted.seconds.get(name, 0.0), step)} of the step", sum(stalls.values())
    if not stalls:
        return said
    if waits < 0.001 * step:
        return f"{said}; compute hardly waits"
    who = "it" if name == "compute" else "compute"
    worst = max(stalls, key=lambda cause: stalls[cause])
    return f"{said}; {who} waits {brief(waits)} ({percent(waits, step)}), mostly for {worst}"


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
    asked = ((model.compute_dtype, model.hidden_size, stage.params, tokens) for stage in blocks)
    return all(facts.hardware.stage_rate("compiled block", *shape).kind == "compiled block" for shape in asked)


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
