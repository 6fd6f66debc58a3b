"""`fuyou bench`: rates with their spread, and how the update scales over threads."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from fuyou_cli.core.units import duration, gb, gib
from fuyou_cli.machine.measure.whole import BenchReport
from fuyou_cli.spec.hardware import HardwareProfile

from .theme import Symbols, column, heading, pairs, ruled, say, show, symbols

SCHEMA_VERSION = 2


def show_bench(console: Console, report: BenchReport) -> None:
    """Print the machine, then every rate: median and range of the repeats."""
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
    memory = f", {gib(profile.device_memory)}" if profile.device_memory else ""
    ram = f"{gib(profile.ram_total)} RAM, {gib(profile.ram_available)} available"
    rows = [
        ("device", f"{profile.device} ({profile.device_name}){memory}"),
        ("host", dot.join([f"{profile.cores} cores", ram, f"{gb(profile.disk_free)} of disk free"])),
    ]
    if profile.pinnable:
        rows.append(("pinned", f"at most {gib(profile.pinnable)}: {profile.pinnable_why}"))
    for drive in profile.drives:
        if drive.model:
            used = f", {gb(drive.used_bytes)} of that written" if drive.used_bytes else ""
            rated = f", rated for {gb(drive.rated_bytes)}{used}" if drive.rated_bytes else ""
            worn = f", {drive.percent_used} % of its endurance used" if drive.percent_used else ""
            rows.append(("drive", f"{drive.model}, {gb(drive.capacity)}{rated}{worn}"))
    rows.append(("process", f"{gib(profile.process_bytes)} with torch and transformers loaded, before the model"))
    if profile.device == "cpu":
        kept = f"compute keeps {profile.shared_compute:.0%}, the update {profile.shared_adamw:.0%} of its rate alone"
        rows.append(("at once", f"beside one update thread, {kept}"))
    return rows


def bench_json(report: BenchReport) -> dict[str, object]:
    """Return the same as data: rates per second, `profile` as `fuyou plan` takes it."""
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
    heading(console, f"{title} ({name})", f"median of at least {least} repeats (stages: mean), and their range")
    content = ruled(shapes)
    column(content, "what", wrap=True)
    column(content, "rate", right=True)
    column(content, "range", right=True)
    column(content, "measured on", wrap=True, style="dim")
    for rate in rates:
        value, low, high = (_number(one / factor) for one in (rate.value, rate.low, rate.high))
        content.add_row(Text(rate.name), Text(value, style="bold"), f"{low} to {high}", Text(rate.note))
    show(console, content, indent=2)


def _number(value: float) -> str:
    """Format with three digits: "0.861", "12.4", "989"."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
