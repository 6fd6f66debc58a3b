"""Shows the results of `fuyou bench`: rates with their spread, and how the update scales over threads."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from fuyou_cli.core.units import duration, gb, gib
from fuyou_cli.machine.drives import endurance
from fuyou_cli.machine.measure.whole import BenchReport
from fuyou_cli.spec.hardware import HardwareProfile

from .theme import Symbols, column, heading, machine_in_words, pairs, ruled, say, show, symbols, tera

SCHEMA_VERSION = 2


def show_bench(console: Console, report: BenchReport) -> None:
    """Prints the machine, then every rate: median and range of the repeats."""
    shapes, profile = symbols(console), report.profile
    say(console, Text.assemble(("fuyou bench", "bold"), f"  {'quick' if report.quick else 'full'}"))
    pairs(console, _machine(profile, f" {shapes.dot} "))
    _rates(console, report, "Arithmetic", "FLOP/s", shapes)
    _rates(console, report, "Moving bytes", "B/s", shapes)
    if report.notes:
        heading(console, "Notes")
        for note in report.notes:
            say(console, f"- {note}", indent=2)
    console.print()
    say(console, f"{duration(report.seconds)}, {gb(report.written_bytes)} written, nothing left behind", style="dim")


def _machine(profile: HardwareProfile, dot: str) -> list[tuple[str, str]]:
    rows = [("machine", dot.join(machine_in_words(profile)))]
    if profile.pinnable:
        rows.append(("pinned", f"at most {gib(profile.pinnable)}: {profile.pinnable_why}"))
    rows += [("drive", f"{d.model}, {gb(d.capacity)}, {endurance(d)}") for d in profile.drives if d.model]
    rows.append(("process", f"{gib(profile.process_bytes)} with torch and transformers loaded, before the model"))
    if profile.device == "cpu":
        kept = f"compute keeps {profile.shared_compute:.0%} and the update {profile.shared_adamw:.0%} of its rate alone"
        rows.append(("at once", f"beside one update thread, {kept}"))
    return rows


def bench_json(report: BenchReport) -> dict[str, object]:
    """Returns the same as data: rates per second, and `profile` as `fuyou plan` reads it."""
    return {"schema_version": SCHEMA_VERSION, "digest": report.profile.digest(), **asdict(report)}


def _rates(console: Console, report: BenchReport, title: str, unit: str, shapes: Symbols) -> None:
    rates = [rate for rate in report.rates if rate.unit == unit]
    scale, name = (1, "TFLOPS") if unit == "FLOP/s" else (1000, "GB/s")
    least = min((rate.repeats for rate in rates), default=0)
    heading(console, f"{title} ({name})", f"median of at least {least} repeats (stages: mean), and their range")
    content = ruled(shapes)
    column(content, "what", wrap=True)
    column(content, "rate", right=True)
    column(content, "range", right=True)
    column(content, "measured on", wrap=True, style="dim")
    for rate in rates:
        value, low, high = (tera(one * scale) for one in (rate.value, rate.low, rate.high))
        content.add_row(Text(rate.name), Text(value, style="bold"), f"{low} to {high}", Text(rate.note))
    show(console, content, indent=2)
