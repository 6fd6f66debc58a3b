"""scripts/proof/verdicts.py: what was measured is kept, what failed or was disturbed is not; a failing line fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from proof import verdicts

CODE = ("fuyou_cli/a.py", "native/a.c", "scripts/proof/in_memory.py", "scripts/proof/shim_log.c", "scripts/prove_speed.py")


def test_a_finished_measurement_is_not_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    assert verdicts.Progress(path).measure("a", lambda: {"seconds": 1.5}) == {"seconds": 1.5}
    assert verdicts.Progress(path).measure("a", lambda: {"seconds": 9.0}) == {"seconds": 1.5}
    assert verdicts.Progress(path).measure("b", lambda: {"seconds": 9.0}) == {"seconds": 9.0}


@pytest.mark.parametrize("value", [{"failed": "exit code 1"}, {"noisy": True, "others_cores": 1.0}])
def test_what_failed_or_was_disturbed_is_taken_again(tmp_path: Path, value: dict[str, object]) -> None:
    path = tmp_path / "state.jsonl"
    assert verdicts.Progress(path).measure("a", lambda: value) == value
    assert verdicts.Progress(path).measure("a", lambda: {"seconds": 2.0}) == {"seconds": 2.0}


def test_what_other_code_measured_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.jsonl"
    verdicts.Progress(path).measure("a", lambda: {"seconds": 1.0})
    monkeypatch.setattr(verdicts, "code", lambda: "changed")
    assert verdicts.Progress(path).measure("a", lambda: {"seconds": 2.0}) == {"seconds": 2.0}


def test_a_line_cut_short_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    verdicts.Progress(path).measure("a", lambda: {"seconds": 1.0})
    with path.open("a") as file:
        file.write('{"key": "b", "val')
    again = verdicts.Progress(path)
    again.measure("b", lambda: {"seconds": 2.0})
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a", "b"]


def test_one_failing_line_fails_the_script_and_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [verdicts.at_least("rate", 0.94, 0.93), verdicts.at_most("peak", 1.2, 1.1, note="why"), verdicts.reported("x", "1")]
    assert [row.verdict for row in rows] == ["pass", "FAIL", "reported"]
    assert verdicts.conclude("one", rows, results=tmp_path, settings={}) == 1
    assert verdicts.conclude("two", rows[:1], results=tmp_path, settings={}) == 0
    printed = capsys.readouterr().out
    assert "1 of 3 lines FAILED" in printed and "    why" in printed
    written = json.loads((tmp_path / "one.json").read_text())
    assert [row["verdict"] for row in written["rows"]] == ["pass", "FAIL", "reported"]
    assert written["machine"]["cores"] >= 1 and "torch" in written["versions"]


def test_a_disturbed_line_neither_passes_nor_fails() -> None:
    row = verdicts.at_least("rate", 2.0, 0.93)
    assert verdicts.unless_noisy(row, [{"noisy": False}, {}]).verdict == "pass"
    assert verdicts.unless_noisy(row, [{"noisy": False}, {"noisy": True}]).verdict == "NOT QUIET"


HELD = verdicts.at_least("rate", 0.95, 0.93)
FAILED = verdicts.at_least("rate", 0.9, 0.93)
NOISY = verdicts.unless_noisy(FAILED, [{"noisy": True}])
MISSING = verdicts.missing("rate", ">= 0.93", "absent")
RECORDED = verdicts.unless_recorded(HELD, recorded=True)
REPORTED = verdicts.reported("x", "1")


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([HELD, REPORTED], 0),
        ([HELD, NOISY], 3),
        ([HELD, MISSING], 3),
        ([HELD, RECORDED], 3),
        ([HELD, NOISY, FAILED, MISSING], 1),
    ],
)
def test_one_line_that_passes_does_not_stand_for_those_that_were_not_shown(
    tmp_path: Path, rows: list[verdicts.Row], code: int
) -> None:
    assert verdicts.conclude("one", rows, results=tmp_path, settings={}) == code


@pytest.mark.parametrize(("codes", "code"), [([0, 0], 0), ([0, 3, 0], 3), ([3, 1, 0], 1), ([1, 3], 1)])
def test_of_several_proofs_a_failure_counts_most(codes: list[int], code: int) -> None:
    assert verdicts.worst(codes) == code


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a repository with a file of each kind that is measured or measures."""
    for name in (*CODE, "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    (tmp_path / "_native.so").write_text("one")
    monkeypatch.setattr(verdicts, "ROOT", tmp_path)
    monkeypatch.setattr(verdicts, "extension", lambda: [tmp_path / "_native.so"])
    return tmp_path


@pytest.mark.parametrize("name", [*CODE, "_native.so"])
def test_other_code_on_either_side_has_another_name(checkout: Path, name: str) -> None:
    before = verdicts.code()
    (checkout / "README.md").write_text("two")
    assert before and verdicts.code() == before
    (checkout / name).write_text("two")
    assert verdicts.code() != before


def test_the_extension_in_use_is_found() -> None:
    assert [path.name.partition(".")[0] for path in verdicts.extension()] == ["_native"]
