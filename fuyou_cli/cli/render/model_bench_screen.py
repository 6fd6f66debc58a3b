"""Shows the results of `fuyou bench --model`: a row per batch size, what limits it, and how extrapolated figures were found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from fuyou_cli.core.units import count, duration
from fuyou_cli.training.modelbench.sweep import AGREE, Point

from .theme import column, heading, ordered, percent, ruled, say, show, some, speed, symbols, tera

SCHEMA_VERSION = 1
_TOO_FAST = "overlap above 100%: the machine's rates were measured too low; run `fuyou bench` while it is idle"


def show_model_bench(console: Console, model: str, points: Sequence[Point]) -> None:
    """Prints the results. Extrapolated figures have a star."""
    first, shapes = points[0], symbols(console)
    frozen = f", {count(first.frozen_parameters)} frozen" if first.frozen_parameters else ""
    size = f"{count(first.parameters)} parameters{frozen}, random weights and tokens"
    say(console, Text.assemble((f"fuyou bench --model {model}", "bold"), f"  {size}"))
    heading(console, "Training", f"the device measures {tera(first.device_flops)} TFLOPS")
    content = ruled(shapes)
    titles = ("batch", "tokens", "step", "tokens/s", "TFLOPS 6N", "8N", "device", "overlap", "PyTorch")
    for title in titles:
        column(content, title, right=True)
    for point in points:
        star, beside = "*" if point.estimates else "", point.in_memory
        content.add_row(
            str(point.batch_size),
            f"{point.tokens:,}",
            duration(point.step_seconds) + star,
            Text(speed(point.tokens_per_second) + star, style="bold"),
            tera(point.flops(6)),
            tera(point.flops(8)),
            percent(point.device_share, 1),
            percent(point.overlap, 1),
            "" if beside is None else f"{point.tokens_per_second / beside:.2f}x",
        )
    show(console, content, indent=2)
    _show_busy(console, points)
    _show_notes(console, points)


def _show_busy(console: Console, points: Sequence[Point]) -> None:
    """Prints the share of the step in which each resource was busy."""
    heading(console, "Busy", "share of the step")
    content = ruled(symbols(console))
    names = ordered(list(dict.fromkeys(name for point in points for name in point.busy)))
    column(content, "batch", right=True)
    for name in names:
        column(content, name, right=True)
    for point in points:
        content.add_row(str(point.batch_size), *(percent(point.busy.get(name, 0.0), 1) for name in names))
    show(console, content, indent=2)


def _show_notes(console: Console, points: Sequence[Point]) -> None:
    heading(console, "Notes")
    lines = [
        "device: 6N as a share of the device's measured rate; overlap: the least time this plan can take / measured",
        *([_TOO_FAST] if any(point.overlap > 1 for point in points) else []),
        *(_placed(point) for point in points),
        *(line for point in points for line in _extrapolated(point)),
        *dict.fromkeys(f"PyTorch: {point.in_memory_why}" for point in points if point.in_memory_why),
    ]
    for line in lines:
        say(console, f"- {line}", indent=2)


def _placed(point: Point) -> str:
    homes = ", ".join(f"{name.replace('_', ' ')} on {home}" for name, home in point.homes.items())
    predicted = f"predicted {duration(point.predicted_seconds)} a step"
    return f"batch {point.batch_size}: micro-batches of {point.micro_batch_size}, {predicted}; most blocks: {homes}"


def _extrapolated(point: Point) -> list[str]:
    """Tells how each sample gives the whole, and whether the samples agree."""
    if not point.estimates:
        return []
    samples = "; ".join(
        f"{some(one.blocks, 'block')} take {duration(one.measured_seconds)}, of it {duration(one.block_seconds)} each, "
        f"so the whole {duration(one.step_seconds)}"
        for one in point.estimates
    )
    verdict = "agree" if point.agrees else "DO NOT AGREE"
    apart = f"the two {verdict}: {point.apart:.1%} apart (at most {AGREE:.0%})"
    return [f"* batch {point.batch_size} is extrapolated: {samples}; {apart}. Busy shares are of the larger sample"]


def model_bench_json(model: str, points: Sequence[Point]) -> dict[str, object]:
    """Returns the same as data: seconds, FLOP/s, shares of one."""
    return {"schema_version": SCHEMA_VERSION, "model": model, "points": [_record(point) for point in points]}


def _record(point: Point) -> dict[str, object]:
    beside = point.in_memory
    return asdict(point) | {
        "tokens_per_second": point.tokens_per_second,
        "flops_6n": point.flops(6),
        "flops_8n": point.flops(8),
        "device_share": point.device_share,
        "overlap": point.overlap,
        "extrapolated": bool(point.estimates),
        "apart": point.apart if point.estimates else None,
        "agrees": point.agrees if point.estimates else None,
        "of_in_memory": None if beside is None else point.tokens_per_second / beside,
    }
