"""Shows a run: at its end as the run itself knows it, later as its log has it. The page has the same rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fuyou_cli.core.json_files import one_line, printable
from fuyou_cli.core.units import brief, duration, gb, gib
from fuyou_cli.planner.ring import of_other_ranks
from fuyou_cli.training.report import Compared, EvalReport, RunReport, Spread, StepReport
from fuyou_cli.training.run_log import History
from fuyou_cli.training.state.resume import in_words

from .charts import Series, line_svg, shares_svg, show_loss, show_timeline, timeline_svg, waiting
from .theme import heading, pairs, percent, rate, ruled, say, show, some, speed, symbols, tera

Pairs = list[tuple[str, str]]
_SHOWN = 240  # characters of a prompt or a text
_RELATIVE = "{:.2f} x even".format
_TIERS = {"gpu": "GPU", "cpu": "RAM", "ssd": "ssd"}

# ---- at the end of a run -----------------------------------------------------------------------------------------------


def show_summary(console: Console, report: RunReport) -> None:
    """Prints the run's figures, predictions next to measurements, then the loss and a step's timeline."""
    shapes = symbols(console)
    heading(console, f"{some(report.steps, 'step')} in {duration(report.seconds)}")
    rows = [
        ("loss", from_to(report.losses, shapes.arrow)),
        ("speed", f"{speed(report.tokens_per_second)} tokens/s, {tera(report.tflops * 1e12)} TFLOPS (6N)"),
        ("waiting", f"{waiting(report.stalls)}, over all steps"),
        ("written", f"{gb(report.written_by_all)} to the ssd"),
        *([("attention", report.attention)] if report.attention else []),
        *([("best", report.best)] if report.best else []),
        ("output", report.output_dir),
    ]
    pairs(console, [*rows, *ranks(report)])
    show_compared(console, report)
    show_loss(console, report.losses)
    show_timeline(console, report.timeline)


def from_to(losses: Sequence[float], between: str = "to") -> str:
    """Names the first and the last loss of a run. Those that are not known (NaN) are left out, and steps told instead."""
    known = [(number, loss) for number, loss in enumerate(losses, 1) if not math.isnan(loss)]
    if not known:
        return "not known"
    ends = [
        f"{loss:.4f}" + ("" if number in (1, len(losses)) else f" (step {number})") for number, loss in (known[0], known[-1])
    ]
    return f" {between} ".join(ends)


def show_compared(console: Console, report: RunReport) -> None:
    """Prints a row per figure of the plan, next to the measurement."""
    note = typical(report) + ("; the plan's rates were assumed" if report.assumed else "")
    heading(console, "Predicted and measured", note)
    _table(console, ("what", "predicted", "measured", "difference"), compared_rows(report))
    over = report.ram_peak > report.ram_budget
    say(console, verdict(report), style="red" if over else "", indent=2)
    if report.assumed:
        say(console, "Run `fuyou bench RECIPE` to plan with measured rates next time.", style="dim", indent=2)


def verdict(report: RunReport) -> str:
    """Says whether the run stayed within its memory budget."""
    over = report.ram_peak > report.ram_budget
    return f"Peak RAM is {'over' if over else 'within'} the budget of {gib(report.ram_budget)}."


def compared_rows(report: RunReport) -> list[tuple[str, str, str, str]]:
    """Returns each figure's name, prediction, measurement and difference."""
    rows = []
    for line in report.compared:
        shown = gib if line.what.startswith("peak ") else gb if line.unit == "bytes" else brief
        rows.append((line.what, shown(line.predicted), shown(line.measured), _difference(line)))
    return rows


def typical(report: RunReport) -> str:
    """Says which steps the figures come from."""
    first = report.steps - report.settled if report.settled else min(1, report.steps - 1)
    without = "" if first < 1 else " without the first" if first == 1 else f" without the first {first}"
    return f"of one step, medians{without}"


def _difference(line: Compared) -> str:
    share = line.difference
    if share is None:
        return "not predicted"
    if share >= 10:  # such as with assumed rates: then percents are useless
        return f"{1 + share:,.0f} times"
    return "0%" if share == 0 else f"{100 * share:+.1f}%"


# ---- from a log -------------------------------------------------------------------------------------------------------


def show_report(console: Console, history: History) -> None:
    """Prints the log's figures: figures over the steps, predictions next to measurements, memory, the ssd, one step."""
    heading(console, "Run", str(history.log))
    pairs(console, about(history))
    show_loss(console, history.report.losses, first_step=history.steps[0].step)
    heading(console, "Over the steps")
    _table(console, COLUMNS, [series.row for series in series_of(history)])
    if history.evaluations:
        heading(console, "Evaluations", "mean loss of held-out tokens")
        _table(console, EVALUATED, evaluations(history))
    if rows := experts(history):
        assert history.sent is not None
        heading(console, "Experts", f"their shares of the tokens of step {history.sent.step:,}")
        _table(console, EXPERTS, rows)
    if history.samples:
        _samples(console, history)
    if history.report.compared:
        show_compared(console, history.report)
    if rows := memory(history):
        heading(console, "Memory", "as planned")
        _table(console, ("tier", "what", "size", "share"), rows, names=2)
    heading(console, "The ssd")
    pairs(console, [*store(history), *wear(history), *ranks(history.report)])
    show_timeline(console, history.report.timeline)


def _samples(console: Console, history: History) -> None:
    """Prints the first and the last text of each prompt; the page and the log have all."""
    heading(console, "Samples", "the likeliest tokens after fixed prompts, first and last")
    for prompt, rows in samples(history):
        say(console, _short(prompt), indent=2)
        shown = rows[:1] if len(rows) == 1 else [rows[0], rows[-1]]
        pairs(console, [(step, _short(text)) for step, text in shown], indent=4)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _table(console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> None:
    """Prints `names` columns on the left, figures on the right; the last column may hold text."""
    content = ruled(symbols(console), *titles, names=names)
    for row in rows:
        content.add_row(*map(Text, row))
    show(console, content, indent=2)


# ---- rows of text -----------------------------------------------------------------------------------------------------

COLUMNS = ("figure", "first", "last", "median", "least", "most")


def series_of(history: History) -> list[Series]:
    """Returns loss, rate, speed, memory and traffic over the steps, without figures that no step has. Losses of the first set
    that is evaluated are marks of the loss."""
    steps, budget = history.steps, history.plan.budget
    judged = history.evaluations[0].name if history.evaluations else ""
    marks = tuple((item.step, item.loss) for item in history.evaluations if item.name == judged and math.isfinite(item.loss))
    note = f"held-out loss of {judged}" if marks else ""

    def each(
        name: str, value: Callable[[StepReport], float | None], shown: Callable[[float], str], limit: float = 0.0
    ) -> Series:
        return Series(name=name, values=tuple(map(value, steps)), shown=shown, limit=limit)

    def per_second(amount: Callable[[StepReport], int]) -> Callable[[StepReport], float | None]:
        return lambda step: amount(step) / step.seconds if step.seconds else None

    figures = [
        Series(
            name="loss",
            values=tuple(step.loss if math.isfinite(step.loss) else None for step in steps),
            shown="{:.4g}".format,
            from_zero=False,
            marks=marks,
            note=note,
        ),
        each("learning rate", lambda step: step.lr, "{:.3g}".format),
        each("gradient norm", lambda step: step.grad_norm, "{:.3g}".format),
        each("tokens per second", per_second(lambda step: step.batch_tokens), speed),
        each("seconds per step", lambda step: step.seconds, brief),
        each("peak RAM so far", lambda step: step.ram_peak, gib, budget),
        each("read from the ssd", per_second(lambda step: step.read_bytes), rate),
        each("written to the ssd", per_second(lambda step: step.written_bytes), rate),
        each("experts without a token", _of_experts("unused"), "{:,.0f}".format),
        each("least share of an expert", _of_experts("least"), _RELATIVE),
        each("largest share of an expert", _of_experts("most"), _RELATIVE),
        each("entropy of routing", _of_experts("entropy"), "{:.1%}".format, 1.0),
        each("router auxiliary loss", lambda step: step.router_aux_loss, "{:.4g}".format),
    ]
    return [series for series in figures if any(value is not None for value in series.values)]


def _of_experts(name: str) -> Callable[[StepReport], float | None]:
    return lambda step: None if step.experts is None else getattr(step.experts, name)


EXPERTS = ("mixture", "experts", "without a token", "least share", "median", "largest", "entropy")


def experts(history: History) -> list[tuple[str, ...]]:
    """Returns for each mixture how the tokens of the last step with a record of it were spread over its experts."""
    rows = []
    for name, counts in history.sent.sent.items() if history.sent is not None else ():
        if not counts:
            continue
        spread = Spread.of({name: counts})
        middle = statistics.median(counts) * len(counts) / max(1, sum(counts))
        shares = (_RELATIVE(share) for share in (spread.least, middle, spread.most))
        rows.append((name, f"{len(counts):,}", f"{spread.unused:,}", *shares, f"{spread.entropy:.1%}"))
    return rows


def about(history: History) -> Pairs:
    """Says which run this is, and how far it came."""
    plan, report, last = history.plan, history.report, history.steps[-1].step
    total = max(plan.total_steps, last)
    state = "ended early" if last != total else "all steps are done"
    if not history.ended:
        state = "stopped" if history.stopped else "running, or killed"
    elif history.stopped:
        state = f"{state}, then stopped before the export"
    if history.failed:
        error = one_line(" ".join(history.failed.split()))
        state = f"{state}, then an error: {error}" if history.ended else f"ended with an error: {error}"
    frozen = plan.frozen_parameters
    trained = f"{plan.parameters - frozen:,} of {plan.parameters:,} parameters" if frozen else "all parameters"
    rows = [
        ("model", plan.model),
        ("trained", trained if plan.parameters else ""),
        ("machine", plan.device),
        ("last begun", _time(plan.began)),
        ("steps", f"{last:,} of {total:,}: {state}"),
        ("time", f"{brief(report.seconds)} in {some(report.steps, 'step')}, loading and saving not counted"),
        ("speed", f"{speed(report.tokens_per_second)} tokens/s, {tera(report.tflops * 1e12)} TFLOPS (6N)"),
        ("waiting", f"{waiting(report.stalls)}, over all steps"),
        ("placed", plan.choice),
    ]
    if (best := history.best) is not None:
        where = f": its weights were not kept: {best.problem}" if best.problem else f", kept in {best.folder}"
        rows.append(("best", f"loss {best.loss:.4f} after step {best.step:,}{where}"))
    rows += [("changed", f"after step {change.step:,}: {in_words([change])}") for change in history.changes]
    if skipped := sum(bool(step.skipped) for step in history.steps):
        rows.append(("skipped", f"{some(skipped, 'step')} updated nothing: their losses or gradients were not finite"))
    return [(name, text) for name, text in rows if text]


def _time(began: str) -> str:
    """Shows an ISO time without seconds; any other text as it is."""
    try:
        return f"{datetime.fromisoformat(began):%Y-%m-%d %H:%M %Z}"
    except ValueError:
        return began


EVALUATED = ("set", "first", "last", "least", "after step", "perplexity", "takes")


def evaluations(history: History) -> list[tuple[str, ...]]:
    """Returns for each set its first, last and least loss, the step of the least, the last perplexity, the median time."""
    rows, sets = [], dict[str, list[EvalReport]]()
    for evaluation in history.evaluations:
        sets.setdefault(evaluation.name, []).append(evaluation)
    for name, reports in sets.items():
        finite = [report for report in reports if math.isfinite(report.loss)]
        least = min(finite, key=lambda report: report.loss, default=None)
        ends = (reports[0], reports[-1], least)
        losses = (f"{report.loss:.4f}" if report is not None and math.isfinite(report.loss) else "?" for report in ends)
        perplexity = f"{reports[-1].perplexity:.4g}" if math.isfinite(reports[-1].perplexity) else "?"
        takes = brief(statistics.median(report.seconds for report in reports))
        rows.append((name, *losses, "?" if least is None else f"{least.step:,}", perplexity, takes))
    return rows


def samples(history: History) -> list[tuple[str, Pairs]]:
    """Returns each fixed prompt with what the model wrote after it, evaluation by evaluation."""
    by_prompt: dict[tuple[int, str], Pairs] = {}
    for sample in history.samples:
        text = sample.text + " ..." * (sample.ended == "length")
        by_prompt.setdefault((sample.number, sample.prompt), []).append((f"step {sample.step:,}", text))
    return [(prompt, rows) for (_, prompt), rows in sorted(by_prompt.items())]


def memory(history: History) -> list[tuple[str, ...]]:
    """Returns tier, content, size and comparison, with the sum of a tier first."""
    plan, report = history.plan, history.report
    gpu = next((line.measured for line in report.compared if line.what == "peak GPU memory"), 0)
    sums = {
        "gpu": (plan.predicted_gpu_peak, f"measured {gib(gpu)}" if gpu else ""),
        "cpu": (plan.predicted_cpu_peak, f"measured {gib(report.ram_peak)} of {gib(plan.budget)} allowed"),
        "ssd": (plan.predicted_ssd_bytes, ""),
    }
    rows = list[tuple[str, ...]]()
    for tier, (peak, note) in sums.items():
        places = [place for place in plan.memory if place.tier == tier and place.size]
        if peak or places:
            rows.append((_TIERS[tier], "planned peak" if tier != "ssd" else "store", gib(peak), note))
        rows += [("", place.what, gib(place.size), percent(place.size, peak)) for place in places]
    return rows


def store(history: History) -> Pairs:
    """Says how much a step moves to and from the ssd, and how fast."""
    report, rows = history.report, []
    for name, resource, size in (("read", "ssd read", report.read_per_step), ("written", "ssd write", report.written_per_step)):
        busy = report.busy.get(resource, 0.0)
        while_busy = f", {rate(size / busy)} during the {brief(busy)} of transfer" if busy and size else ""
        over = f", {rate(size / report.step_seconds)} over the whole step" if report.step_seconds and size else ""
        rows.append((name, f"{gb(size)} per step{while_busy}{over}"))
    return rows


def ranks(report: RunReport) -> Pairs:
    """Says of each of several ranks what it moved in a step, and how long it waited for others."""
    rows = []
    for number, rank in enumerate(report.ranks):
        others = sum(seconds for cause, seconds in rank.waits.items() if of_other_ranks(cause))
        moved = f"{gb(rank.read_per_step)} read and {gb(rank.written_per_step)} written per step"
        waited = f"compute waited {brief(others)} of each step for other ranks"
        planned = f", planned {gib(rank.ram_planned)}" if rank.ram_planned else ""
        rows.append((f"rank {number} on {rank.host}", f"{moved}, {waited}, peak RAM {gib(rank.ram_peak)}{planned}"))
    return rows


def wear(history: History) -> Pairs:
    """Says what the run wrote to its drives, and its share of their rated writes."""
    report, drives = history.report, history.plan.drives
    stores = f"the stores of {len(report.ranks)} ranks" if report.ranks else "the store"
    rows = [("in all", f"{gb(report.written_by_all)} written by {stores}, by this run and those it resumed")]
    on_box = [rank for rank in report.ranks if rank.host == report.ranks[0].host]  # whose drives these are
    per_step = sum(rank.written_per_step for rank in on_box) or report.written_per_step
    each = (sum(rank.written_total for rank in on_box) or report.written_total) / max(1, len(drives))
    for drive in drives:
        if not drive.rated_bytes:
            rows.append((drive.model or "drive", "its rated writes are not known"))
            continue
        left = (drive.rated_bytes - drive.used_bytes - each) / max(1.0, per_step / len(drives))
        more = f"; {left:,.0f} more such steps reach it" if 0 < left < 1e9 and per_step else ""
        share = f"{100 * each / drive.rated_bytes:.2g}% of its {gb(drive.rated_bytes)} of rated writes"
        rows.append((drive.model or "drive", share + more))
    return rows


# ---- the page --------------------------------------------------------------------------------------------------------


def page(history: History) -> str:
    """Returns one self-contained HTML page: no network, no script, light or dark as the system is. Text from the log is
    escaped, and its control characters are spelt out, but for newlines. The template is report.html."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def shown(value: object) -> object:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=shown)
    template = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    report, series = history.report, series_of(history)
    first, charted = history.steps[0].step, series if history.steps[1:] else []
    last = f"Step {history.steps[-1].step:,}"
    timeline = timeline_svg(report.timeline, title=last, stalls=report.timeline_stalls) if report.timeline else ""
    sent = () if history.sent is None else filter(None, history.sent.sent.values())  # tokens of each mixture's experts
    return template.render(
        model=history.plan.model,
        log=str(history.log),
        tiles=_tiles(history),
        about=about(history),
        charts=[(item.name, item.note, Markup(line_svg(item, first_step=first))) for item in charted],
        columns=COLUMNS,
        over=[item.row for item in series],
        evaluated=EVALUATED,
        evaluations=evaluations(history),
        mixtures=EXPERTS,
        experts=[(row, Markup(shares_svg(counts))) for row, counts in zip(experts(history), sent, strict=True)],
        sent_in=history.sent.step if history.sent is not None else 0,
        samples=samples(history),
        compared=compared_rows(report),
        typical=typical(report).removeprefix("of one step, "),
        verdict=verdict(report),
        memory=memory(history),
        ssd=[*store(history), *wear(history), *ranks(report)],
        timeline=Markup(timeline),
    )


def _tiles(history: History) -> list[tuple[str, str]]:
    """Returns the most wanted figures."""
    report, known = history.report, [step.loss for step in history.steps if math.isfinite(step.loss)]
    return [
        ("loss of the last step", f"{known[-1]:.4f}" if known else "?"),
        ("loss of the first step", f"{known[0]:.4f}" if known else "?"),
        ("tokens per second", speed(report.tokens_per_second)),
        ("one step", brief(report.step_seconds)),
        (f"peak RAM, {gib(report.ram_budget)} allowed", gib(report.ram_peak)),
        ("written to the ssd", gb(report.written_by_all)),
    ]
