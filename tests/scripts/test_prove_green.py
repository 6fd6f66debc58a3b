"""scripts/prove_green.py: what failed is kept and told, what passed is not run again, and a busy machine is busy."""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path
from typing import Any

import prove_green
import pytest
from proof import green, verdicts
from proof.green import load
from proof.verdicts import Progress

FOUND = """
from hypothesis import given, strategies as st
def test_fine(tmp_path): pass
def test_not_fine(): assert 1 == 2, "no luck"
@given(st.booleans())
def test_of_few(value): pass
"""


def test_what_failed_is_told_with_its_words(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(FOUND)
    outcome = green.run_tests([str(file)], work=tmp_path)
    assert (outcome.tests, outcome.skipped, len(outcome.failures)) == (3, 0, 1)
    ((name, said),) = outcome.failures.items()
    assert name.endswith("::test_not_fine") and "no luck" in said
    drawn = green.draw(f"{file}::test_of_few", 50, 1, tmp_path)
    assert (drawn.failures, drawn.drawn, drawn.exhausted) == ({}, 2, True)
    file.write_text("import os\ndef test_ends(): os._exit(3)\n")
    assert "3: " in next(iter(green.run_tests([str(file)], work=tmp_path).failures.values()))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("tests-")) == []


def test_files_of_one_process_have_outcomes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(green, "ROOT", tmp_path)
    for name, text in {
        "a/test_one.py": FOUND,
        "a/test_two.py": "def test_fine(): pass\n",
        "a/test_three.py": "1 / 0\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    one, two, three = ("a/test_one.py", "a/test_two.py", "a/test_three.py")
    found = green.run_files([one, two, three], work=tmp_path)
    assert {name: (outcome.tests, len(outcome.failures)) for name, outcome in found.items()} == {
        one: (3, 1),
        two: (1, 0),
        three: (1, 1),
    }
    (tmp_path / two).write_text("import os\ndef test_ends(): os._exit(3)\n")
    assert all(
        "3: " in next(iter(outcome.failures.values())) for outcome in green.run_files([one, two], work=tmp_path).values()
    )


TREE = {  # a small project: its files and what they say
    "tests/conftest.py": "import drawn",
    "tests/drawn.py": "",
    "tests/a/__init__.py": "",
    "tests/a/conftest.py": "",
    "tests/a/rig.py": "from .families import llama",
    "tests/a/families.py": "",
    "tests/a/test_one.py": "from . import rig\ndef test_it():\n    from proof.busy_machine import load",
    "scripts/proof/busy_machine.py": "",
    "tests/a/test_two.py": "import json",
    "tests/a/unused.py": "",
    "tests/a/golden/rows.json": "{}",
    "tests/b/conftest.py": "",
    "tests/b/test_three.py": "from fuyou_cli.planner import place",
    "tests/b/test_four.py": "def test_it():\n    import subprocess",
    "fuyou_cli/planner/__init__.py": "",
    "fuyou_cli/planner/place.py": "def plan():\n    from ..spec.model import ModelSpec",
    "fuyou_cli/spec/model.py": "",
    "fuyou_cli/cli/main.py": "",
}


def test_a_file_is_kept_until_what_it_imports_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what it imports at the top or in a function, what its conftest.py imports, scripts, the product and what lies
    beside it. Whoever starts programs depends on all code."""
    for module in (green, prove_green, verdicts):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    names = [name for name in TREE if "/test_" in name]
    before = prove_green.content(names)
    changed = dict[str, str]()
    for name, text in TREE.items():
        (tmp_path / name).write_text(f"{text}\n# changed")
        after = prove_green.content(names)
        changed[name] = " ".join(Path(one).stem.removeprefix("test_") for one in names if after[one] != before[one])
        (tmp_path / name).write_text(text)
    assert changed == {
        "tests/conftest.py": "one two three four",
        "tests/drawn.py": "one two three four",
        "tests/a/__init__.py": "one two",
        "tests/a/conftest.py": "one two",
        "tests/a/rig.py": "one",
        "tests/a/families.py": "one",
        "tests/a/test_one.py": "one",
        "scripts/proof/busy_machine.py": "one four",
        "tests/a/test_two.py": "two",
        "tests/a/unused.py": "",
        "tests/a/golden/rows.json": "one two",
        "tests/b/conftest.py": "three four",
        "tests/b/test_three.py": "three",
        "tests/b/test_four.py": "four",
        "fuyou_cli/planner/__init__.py": "three four",
        "fuyou_cli/planner/place.py": "three four",
        "fuyou_cli/spec/model.py": "three four",
        "fuyou_cli/cli/main.py": "four",
    }


def session(work: Path, names: list[str], **options: Any) -> prove_green.Session:
    asked = argparse.Namespace(side=1, deselect="", **options)
    progress = Progress(work / "progress")
    return prove_green.Session(
        options=asked, work=work, progress=progress, until=time.monotonic() + 60, tested=dict.fromkeys(names, "x")
    )


def test_short_files_share_a_process_and_are_kept_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"tests/a/1": 50.0, "tests/a/2": 9.0, "tests/a/3": 2.0, "tests/b/1": 1.0, "tests/b/2": 100.0, "tests/b/3": 1.0}
    ran: list[list[str]] = []

    def run_files(names: list[str], **_: Any) -> dict[str, green.Outcome]:
        ran.append(names)
        return {name: green.Outcome(tests=1, skipped=0, seconds=seconds[name]) for name in names}

    monkeypatch.setattr(prove_green.green, "run_files", run_files)
    asked = session(tmp_path, [*seconds])
    prove_green.run_all(asked, "runs", [*seconds], 2)
    assert ran[:2] == [
        ["tests/a/1", "tests/a/2", "tests/a/3"],
        ["tests/b/1", "tests/b/2", "tests/b/3"],
    ]  # nobody knows them yet
    assert ran[2:] == [["tests/a/1", "tests/a/2"], ["tests/a/3"], ["tests/b/1"], ["tests/b/2"], ["tests/b/3"]]
    (row, *_) = prove_green.judged(asked, "runs", [*seconds], 2)
    assert (row.verdict, row.measured) == ("pass", "2 of 2")
    again = session(tmp_path, [*seconds])
    prove_green.run_all(again, "runs", [*seconds], 2)
    assert len(ran) == 7


def test_files_of_more_risk_come_first() -> None:
    found = [green.name_of(path) for path in green.files([])]
    assert found[0].startswith("tests/e2e/") and "tests/unit/test_units.py" in found and len(found) == len(set(found))


def test_the_load_ends_with_its_context(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), load(tmp_path, cores=1, memory=1 << 20, file=1 << 20):
        while not (tmp_path / "load-1").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout
    assert left == ""
