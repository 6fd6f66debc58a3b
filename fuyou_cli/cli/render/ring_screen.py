"""Shows the plan of several ranks, on the screen or as data: what a step of all takes beside one, what each rank holds, and the
whole plan of the rank that the others wait for most."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from rich.console import Console
from rich.text import Text

from fuyou_cli.advice.facts import USUAL, RunFacts
from fuyou_cli.advice.rings import Ring
from fuyou_cli.core.json_files import one_line
from fuyou_cli.core.units import brief, count, duration, gb, gib
from fuyou_cli.spec.model import ModelSpec, StageSpec
from fuyou_cli.training.prepare import Planned

from .plan_screen import SCHEMA_VERSION, WIDE, computed_per_step, model_json, plan_json, show_details
from .theme import Symbols, heading, pairs, percent, rate, ruled, say, show, some, speed, symbols

_NARROW = 6  # figures of a rank that a narrow console shows


def show_ring(console: Console, ring: Ring, facts: RunFacts, *, verbose: bool) -> None:
    """Prints the answer, the ranks, and the plan of one of them (`facts`)."""
    shapes = symbols(console)
    say(console, _verdict(ring))
    pairs(console, _answer(ring, facts, shapes))
    for problem in ring.problems[1:]:
        say(console, f"also: {problem}")
    _ranks(console, ring, shapes)
    heading(console, f"Plan of rank {ring.slowest}", "which others wait for most; its step is without waits for them")
    show_details(console, facts, shapes, verbose=verbose)


def _verdict(ring: Ring) -> Text:
    if problems := ring.problems:
        return Text.assemble(("does not fit", "bold red"), f": {one_line(problems[0])}")
    fullest = max(ring.ranks, key=lambda one: one.plan.predicted.cpu_peak / one.plan.cpu_budget)
    ram = f"RAM {gib(fullest.plan.predicted.cpu_peak)} of {gib(fullest.plan.cpu_budget)} for the fullest rank"
    return Text.assemble(("fits", "bold green"), f": {_machines(ring)}, {ram}")


def _machines(ring: Ring) -> str:
    network = ring.network
    where = "one box" if network.boxes == 1 else f"{network.boxes} boxes over {network.link_name}"
    return f"{some(network.ranks, 'rank')} on {where}"


def _answer(ring: Ring, facts: RunFacts, shapes: Symbols) -> list[tuple[str, str]]:
    network, step = ring.network, ring.step_seconds
    parts = [brief(step), f"{speed(ring.tokens_per_second)} tokens/s"]
    if ring.speed_up is not None and ring.alone_tokens_per_second is not None:
        parts.append(f"{ring.speed_up:.2g}x one such box with one rank ({speed(ring.alone_tokens_per_second)} tokens/s)")
    else:
        parts.append("one such box with one rank has no room for it")
    if facts.left:
        parts.append(f"{some(facts.left, 'step')} in {brief(facts.left * step)}")
    parts += [f"at {facts.hardware.measured} rates"] * (facts.hardware.measured in ("assumed", "described"))
    written = f"{gb(USUAL * ring.written_on_a_box())} written on the fullest box in {some(USUAL, 'step')}"
    if ring.alone is not None:
        written += f", {gb(USUAL * ring.alone.plan.predicted.written_per_step)} by one"
    waits = " to ".join(dict.fromkeys(brief(seconds) for seconds in (min(ring.waits), max(ring.waits))))
    idle = f"{percent(ring.idle, 1.0)} of the step: ranks wait for one another, {waits}"
    sent = f"{gb(max(ring.timeline.sent))} sent by a rank in a step"
    if network.boxes > 1:
        busy = percent(ring.timeline.link_seconds, step)
        sent = f"{network.link_name}, {rate(network.link)} each way, busy {brief(ring.timeline.link_seconds)} ({busy}); {sent}"
    return [
        ("step", f" {shapes.dot} ".join(parts)),
        ("idle", idle),
        ("link" if network.boxes > 1 else "sent", sent),
        ("commits", _commits(ring)),
        ("wear", written),
        *(("note", remark) for remark in ring.remarks()),
    ]


def _commits(ring: Ring) -> str:
    every = ring.ranks[0].plan.commit_every
    if ring.work_lost is None or every is None:
        return "only at the start and the end: a crash loses the whole run"
    if every == 1:
        return "every step; a crash loses only the running step"
    return f"every {every:,} steps: a crash loses at most {duration(ring.work_lost)}"


# ---- ranks -------------------------------------------------------------------------------------------------------------


def _ranks(console: Console, ring: Ring, shapes: Symbols) -> None:
    """Prints what each rank computes and holds, in columns where they differ, the first of them on a narrow console."""
    figures = _figures(ring)
    cells = {title: [of(rank) for rank in range(len(ring.ranks))] for title, of in figures.items()}
    differing = [title for title, values in cells.items() if len(set(values)) > 1]
    shown = differing if console.width >= WIDE else differing[:_NARROW]
    left_out = "what is alike for all is left out"
    if len(shown) < len(differing):
        left_out += f", and {' and '.join(differing[_NARROW:])} on a narrow console"
    heading(console, "Ranks", f"{left_out}; seconds are of a step")
    content = ruled(shapes, "rank", "stages", *shown, names=2)
    for rank, one in enumerate(ring.ranks):
        content.add_row(str(rank), Text(stages_in_words(one.model)), *(cells[title][rank] for title in shown))
    show(console, content, indent=2)


def _figures(ring: Ring) -> dict[str, Callable[[int], str]]:
    def of(figure: Callable[[Planned], str]) -> Callable[[int], str]:
        return lambda rank: figure(ring.ranks[rank])

    return {
        "params": of(lambda one: count(one.model.parameters)),
        "compute": of(lambda one: brief(one.plan.predicted.seconds.get("compute", one.plan.predicted.seconds.get("cpu", 0.0)))),
        "waits": lambda rank: brief(ring.waits[rank]),
        "RAM": of(lambda one: gib(one.plan.predicted.cpu_peak)),
        "GPU": of(lambda one: gib(one.plan.predicted.gpu_peak)),
        "store": of(lambda one: gb(one.plan.predicted.ssd_bytes)),
        "written": of(lambda one: gb(one.plan.predicted.written_per_step)),
        "sent": lambda rank: gb(ring.timeline.sent[rank]),
    }


def stages_in_words(model: ModelSpec) -> str:
    """Names the stages of a rank: "embedding, 17 blocks", or "8 blocks, head pieces 2 and 6" of a head that ranks share."""

    def kind(stage: StageSpec) -> str:
        return stage.kind

    def words(name: str) -> str:
        if name == "head" and model.head_is_shared:
            pieces = [stage.index for stage in model.stages if stage.kind == "head"]
            numbers = [str(pieces.index(stage.index) + 1) for stage in own if stage.kind == "head"]
            return f"head piece{'s' * (len(numbers) > 1)} {', '.join(numbers[:-1])}{' and ' * (len(numbers) > 1)}{numbers[-1]}"
        return some(counts[name], name) if name == "block" else name

    own = [stage for stage in model.stages if not stage.away and stage.expert_range is None]
    counts = {name: len(list(stages)) for name, stages in groupby(sorted(own, key=kind), key=kind)}
    order = [name for name in ("embedding", "block", "norm", "head") if name in counts]
    return ", ".join(map(words, order))


# ---- the same as data --------------------------------------------------------------------------------------------------


def ring_json(ring: Ring, facts: RunFacts) -> dict[str, object]:
    """Returns what all ranks do together, and under `slowest` the plan of the rank that others wait for most, as it would be
    without waits for them."""
    network = ring.network
    each = [
        {
            "rank": rank,
            "box": network.box(rank),
            "stages": [stage.index for stage in one.model.stages if not stage.away],
            "parameters": one.model.parameters,
            "waits": ring.waits[rank],
            "stalls": ring.timeline.ranks[rank].stalls,
            "sent": ring.timeline.sent[rank],
            "cpu_peak": one.plan.predicted.cpu_peak,
            "gpu_peak": one.plan.predicted.gpu_peak,
            "ssd_bytes": one.plan.predicted.ssd_bytes,
            "written_per_step": one.plan.predicted.written_per_step,
            "read_per_step": one.plan.predicted.read_per_step,
            "step_seconds_alone": one.plan.predicted.step_seconds,
        }
        for rank, one in enumerate(ring.ranks)
    ]
    first, plans = ring.ranks[0], [one.plan for one in ring.ranks]
    return {
        "schema_version": SCHEMA_VERSION,
        "fits": not ring.problems,
        "problems": ring.problems,
        "trainable": facts.refusal is None,
        "refusal": facts.refusal,
        "model": model_json(first.plan.model, first.whole),
        "steps": facts.steps,
        "done": facts.done,
        "run_seconds": None if facts.left is None else facts.left * ring.step_seconds,
        "tokens_per_step": first.plan.step_tokens,
        "computed_per_step": computed_per_step(first.plan),
        "tokens_per_second": ring.tokens_per_second,
        "tflops_6n": sum(plan.predicted.step_flops for plan in plans) / ring.step_seconds / 1e12,
        "commits": {"every_steps": first.plan.commit_every, "lost": ring.work_lost},
        "ring": {
            "boxes": network.boxes,
            "ranks_per_box": network.ranks_per_box,
            "link": network.link if network.boxes > 1 else None,
            "link_name": network.link_name or None,
            "latency": network.latency,
            "step_seconds": ring.step_seconds,
            "idle": ring.idle,
            "link_seconds": ring.timeline.link_seconds,
            "alone_tokens_per_second": ring.alone_tokens_per_second,
            "speed_up": ring.speed_up,
            "slowest": ring.slowest,
            "remarks": ring.remarks(),
            "ranks": each,
        },
        "slowest": plan_json(facts),
    }
