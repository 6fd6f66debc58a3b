"""`fuyou bench`: rates with their spread, and how the update scales over threads."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from fuyou_cli.core.units import duration, gb, gib
from fuyou_cli.machine.measure.whole import BenchReport
from fuyou_cli.spec.hardware import HardwareProfile

from .theme import Symbols, bar, column, heading, pairs, ruled, say, show, symbols

SCHEMA_VERSION = 2
BAR_WIDTH = 120  # columns from which there is room for bars


def show_bench(console: Console, report: BenchReport) -> None:
    """The machine, then every rate: median, range of the repeats, and its share of the greatest of its unit."""
    shapes = symbols(console)
    profile = report.profile
    say(console, Text.assemble(("fuyou bench", "bold"), f"  {'quick' if report.quick else 'full'}"))
    device = f"{profile.device} ({profile.device_name})"
    if profile.device_memory:
        device += f", {gib(profile.device_memory)}"
    dot = f" {shapes.dot} "
    facts = (f"{profile.cores} cores", f"{gib(profile.ram_total)} RAM, {gib(profile.ram_available)} available")
    pairs(
        console,
        [
            ("device", device),
            ("host", dot.join([*facts, f"{gb(profile.disk_free)} of disk free"])),
            *([("pinned", f"at most {gib(profile.pinnable)}: {profile.pinnable_why}")] if profile.pinnable else []),
            *_drives(profile),
            ("process", f"{gib(profile.process_bytes)} with torch and transformers loaded, before any of the model"),
        ],
    )
    if profile.device == "cpu":
        kept = f"compute keeps {profile.shared_compute:.0%}, the update {profile.shared_adamw:.0%}"
        pairs(console, [("at once", f"beside one update thread {kept} of what each gets alone")])
    _rates(console, report, "Arithmetic", "FLOP/s", shapes)
    _rates(console, report, "Moving bytes", "B/s", shapes)
    if report.notes:
        heading(console, "Notes")
        for note in report.notes:
            say(console, f"- {note}", indent=2)
    console.print()
    say(console, f"{duration(report.seconds)}, {gb(report.written_bytes)} written, nothing left behind", style="dim")


def _drives(profile: HardwareProfile) -> list[tuple[str, str]]:
    """A line for each drive whose model is known."""
    found = []
    for drive in profile.drives:
        if drive.model:
            used = f" of which {gb(drive.used_bytes)} are written" if drive.used_bytes else ""
            rated = f", rated for {gb(drive.rated_bytes)}{used}" if drive.rated_bytes else ""
            worn = f", {drive.percent_used} % of its endurance used" if drive.percent_used else ""
            found.append(("drive", f"{drive.model}, {gb(drive.capacity)}{rated}{worn}"))
    return found


def bench_json(report: BenchReport) -> dict[str, object]:
    """The same as data: rates per second, `profile` as `fuyou plan` takes it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "quick": report.quick,
        "seconds": report.seconds,
        "written_bytes": report.written_bytes,
        "profile": asdict(report.profile),
        "digest": report.profile.digest(),
        "rates": [asdict(rate) for rate in report.rates],
        "notes": list(report.notes),
    }


def _rates(console: Console, report: BenchReport, title: str, unit: str, shapes: Symbols) -> None:
    rates = [rate for rate in report.rates if rate.unit == unit]
    factor, name = (1e12, "TFLOPS") if unit == "FLOP/s" else (1e9, "GB/s")
    least = min((rate.repeats for rate in rates), default=0)
    most = max((rate.value for rate in rates), default=0.0)
    heading(console, f"{title} ({name})", f"median of at least {least} repeats (stages: mean), and their range")
    content = ruled(shapes)
    column(content, "what", wrap=True)
    column(content, "rate", right=True)
    column(content, "range", right=True)
    bars = console.width >= BAR_WIDTH
    if bars:
        column(content)
    column(content, "measured on", wrap=True, style="dim")
    for rate in rates:
        row: list[Text | str] = [
            Text(rate.name),
            Text(_number(rate.value / factor), style="bold"),
            f"{_number(rate.low / factor)} to {_number(rate.high / factor)}",
        ]
        if bars:
            row.append(Text(bar(rate.value / most if most else 0, 16, shapes), style="cyan"))
        content.add_row(*row, Text(rate.note))
    show(console, content, indent=2)


def _number(value: float) -> str:
    """Three digits: "0.861", "12.4", "989"."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
