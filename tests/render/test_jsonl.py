"""The step log: whole lines only, numbers JSON knows, appended to on resume."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.training.report import Busy, StepReport
from fuyou_cli.training.run_log import JsonlLog, read_log
from tests.step_reports import step_report


def report(step: int, loss: float = 2.0) -> StepReport:
    forward = [Busy(resource="compute", label="forward", begin=begin, end=end) for begin, end in ((0.0, 1.0), (0.5, 1.25))]
    return step_report(
        step, total_steps=9, loss=loss, seconds=1.5, tflops=math.inf, read_bytes=3, written_bytes=4, update_cpu_seconds=0.5,
        io_cpu_seconds=0.2, stalls={"ssd read": 0.25}, timeline=tuple(forward), busy={"compute": 1.25},
    )  # fmt: skip


def test_records_are_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "steps.jsonl"
    with JsonlLog(path) as log:
        log.step(report(1))
        log.step(report(2, loss=math.nan))
        log.write("saved", {"path": "outputs/é"})
    lines = path.read_text().splitlines()
    assert len(lines) == 3 and "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    first, second, third = map(json.loads, lines)
    assert first["schema_version"] == 1 and first["event"] == "step" and first["step"] == 1
    assert first["loss"] == 2.0 and first["tflops"] is None and first["grad_norm"] is None
    assert first["busy"] == {"compute": 1.25} and "timeline" not in first
    assert second["loss"] is None
    assert third == {"schema_version": 1, "event": "saved", "path": "outputs/é"}
    assert read_log(path) == [first, second, third]


@pytest.mark.parametrize("keep", [1, 40, 150_000])
def test_a_torn_line_is_dropped_on_resume(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "steps.jsonl"
    with JsonlLog(path) as log:
        log.step(report(1))
    whole = path.read_bytes()
    path.write_bytes(whole + (b'{"schema_version":1,"event":"step",' + b"x" * 200_000)[:keep])
    assert [record["step"] for record in read_log(path)] == [1]
    with JsonlLog(path) as log:
        log.step(report(2))
    assert path.read_bytes().startswith(whole)
    assert [record["step"] for record in read_log(path)] == [1, 2]


def test_a_file_of_one_torn_line_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"schema')
    JsonlLog(path).close()
    assert path.read_bytes() == b""


def test_nothing_else_is_cut_or_written(tmp_path: Path) -> None:
    other, link, pipe = tmp_path / "precious.txt", tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    other.write_text("no line end")
    link.symlink_to(other)
    os.mkfifo(pipe)
    for path, why in ((link, "it is a symbolic link"), (pipe, "it is not a plain file")):
        with pytest.raises(UsageError, match=f"cannot open the log .*: {why}"):
            JsonlLog(path)
    assert other.read_text() == "no line end"


def test_errors_are_for_people(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot open the log"):
        JsonlLog(tmp_path)
    log = JsonlLog(tmp_path / "a.jsonl")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.step(report(1))
