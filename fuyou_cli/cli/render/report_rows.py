"""Formats a run's history as rows of text, for the terminal and the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from fuyou_cli.core.printable import one_line
from fuyou_cli.core.units import GiB, MiB, brief, gb, gib
from fuyou_cli.training.report import EvalReport, Spread, StepReport
from fuyou_cli.training.run_log import History
from fuyou_cli.training.state.recipe_changes import in_words

from .plots import waiting
from .theme import percent, rate, some, speed, tera

Pairs = list[tuple[str, str]]
_RELATIVE = "{:.2f} x even".format
_TIERS = {"gpu": "GPU", "cpu": "RAM", "ssd": "ssd"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Holds one figure of every step: its values (None if unknown), and how to format one."""

    name: str
    values: tuple[float | None, ...]
    shown: Callable[[float], str]
    limit: float = 0.0  # a line is drawn here; 0: no line
    from_zero: bool = True
    marks: tuple[tuple[int, float], ...] = ()  # steps, and what was found after them; `note` says what it is
    note: str = ""

    @property
    def unit(self) -> int:
        """Returns the unit of which round values are multiples."""
        highest = max((value for value in self.values if value is not None), default=0.0)
        return 1 if self.shown is not gib else GiB if max(highest, self.limit) >= GiB else MiB

    @property
    def row(self) -> tuple[str, ...]:
        """Returns its name, its first and last value, the median, the least and the most."""
        known = [value for value in self.values if value is not None]
        if not known:
            return (self.name, *["?"] * 5)
        found = known[0], known[-1], statistics.median(known), min(known), max(known)
        return (self.name, *map(self.shown, found))


COLUMNS = ("figure", "first", "last", "median", "least", "most")


def series_of(history: History) -> list[Series]:
    """Returns loss, rate, speed, memory and traffic over the steps, without figures that no step has. Losses of the first set
    that is evaluated are marks of the loss."""
    steps, budget = history.steps, history.plan.budget
    judged = history.evaluations[0].name if history.evaluations else ""
    marks = tuple((one.step, one.loss) for one in history.evaluations if one.name == judged and math.isfinite(one.loss))
    note = f"held-out loss of {judged}" if marks else ""

    def each(
        name: str, value: Callable[[StepReport], float | None], shown: Callable[[float], str], limit: float = 0.0
    ) -> Series:
        return Series(name=name, values=tuple(map(value, steps)), shown=shown, limit=limit)

    def per_second(amount: Callable[[StepReport], int]) -> Callable[[StepReport], float | None]:
        return lambda step: amount(step) / step.seconds if step.seconds else None

    found = [
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
    return [series for series in found if any(value is not None for value in series.values)]


def _of_experts(name: str) -> Callable[[StepReport], float | None]:
    return lambda step: None if step.experts is None else getattr(step.experts, name)


EXPERTS = ("mixture", "experts", "without a token", "least share", "median", "largest", "entropy")


def experts(history: History) -> list[tuple[str, ...]]:
    """Returns for each mixture how the tokens of the last step that tells it were spread over its experts."""
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
    """Tells which run this is, and how far it came."""
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
        kept = f": its weights were not kept: {best.problem}" if best.problem else f", kept in {best.folder}"
        rows.append(("best", f"loss {best.loss:.4f} after step {best.step:,}{kept}"))
    rows += [("changed", f"after step {one.step:,}: {in_words([one])}") for one in history.changes]
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
    found: dict[tuple[int, str], Pairs] = {}
    for one in history.samples:
        text = one.text + " ..." * (one.ended == "length")
        found.setdefault((one.number, one.prompt), []).append((f"step {one.step:,}", text))
    return [(prompt, rows) for (_, prompt), rows in sorted(found.items())]


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
    """Tells how much a step moves to and from the ssd, and how fast."""
    report, rows = history.report, []
    for name, resource, size in (
        ("read", "ssd read", report.read_per_step),
        ("written", "ssd write", report.written_per_step),
    ):
        busy = report.busy.get(resource, 0.0)
        while_busy = f", {rate(size / busy)} during the {brief(busy)} of transfer" if busy and size else ""
        over = f", {rate(size / report.step_seconds)} over the whole step" if report.step_seconds and size else ""
        rows.append((name, f"{gb(size)} per step{while_busy}{over}"))
    return rows


def wear(history: History) -> Pairs:
    """Tells what the run wrote to its drives, and its share of their rated writes."""
    report, drives = history.report, history.plan.drives
    rows = [("in all", f"{gb(report.written_total)} written by the store, by this run and those it resumed")]
    each = report.written_total / max(1, len(drives))
    for drive in drives:
        if not drive.rated_bytes:
            rows.append((drive.model or "drive", "its rated writes are not known"))
            continue
        left = (drive.rated_bytes - drive.used_bytes - each) / max(1.0, report.written_per_step / len(drives))
        more = f"; {left:,.0f} more such steps reach it" if 0 < left < 1e9 and report.written_per_step else ""
        share = f"{100 * each / drive.rated_bytes:.2g}% of its {gb(drive.rated_bytes)} of rated writes"
        rows.append((drive.model or "drive", share + more))
    return rows
