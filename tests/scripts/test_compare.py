"""The scripts that compare: two checkouts, a rival's run (which itself needs DeepSpeed). Cases are recipes, and what is worse,
missing or other is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare_bits
import compare_plans
import pytest
from compare_faults import _compared, losses_of
from proof.nursery import Ended

from fuyou_cli.recipe.load import load_recipe

PLAN = {"name": "8B", "seconds": 10.0, "written": 10**9, "stored": 10**11, "search_seconds": 1.0, "longest_search": 0.5}
Recorded = Callable[..., Path]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    def record(*plans: dict[str, Any]) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps({"plans": plans}))
        return path

    return record


@pytest.mark.parametrize("name", compare_bits.CASES)
def test_every_case_is_a_recipe(name: str, tmp_path: Path) -> None:
    assert load_recipe(compare_bits.write_recipe(name, tmp_path / "run", tmp_path)).recipe.train.max_steps == compare_bits.STEPS


def test_every_difference_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "log.jsonl").write_text('{"step": 1, "loss": 2.0, "seconds": 3}\n{"step": 2, "loss": 1.5}\n')
    (folder / "model.safetensors").write_bytes(b"weights")
    expected = compare_bits.results(tmp_path)
    assert set(expected) == {"step 1 loss", "step 2 loss", "model.safetensors"}
    (folder / "log.jsonl").write_text('{"step": 1, "loss": 2.0000001}\n')
    (folder / "model.safetensors").write_bytes(b"weight5")
    differences = compare_bits.unequal(expected, compare_bits.results(tmp_path))
    assert [line.split(":")[0] for line in differences] == ["model.safetensors", "step 1 loss", "step 2 loss"]
    assert compare_bits.unequal(expected, expected) == []


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({}, 0, "in the mean +0.000 %"),
        ({"seconds": 9.0}, 0, "-10.00 %  8B"),
        ({"seconds": 10.02}, 1, "in the mean +0.200 %"),  # all together are worse
        ({"seconds": 10.04}, 1, "FAIL 8B: 0.40 % worse"),
        ({"written": 2 * 10**9}, 1, "FAIL 8B: 5.00 % worse"),  # written twice as much
        ({"written": 10**6}, 0, "in the mean +0.000 %"),  # below a hundredth of all weights and states nothing is spared
        ({"problem": "does not fit"}, 2, "FAIL 8B: no plan any more: does not fit"),
        ({"name": "9B"}, 2, "FAIL 9B: in one record alone"),
    ],
)
def test_one_objective_judges_both_sides(
    changes: dict[str, Any], code: int, said: str, recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare_plans.main([str(recorded(PLAN)), str(recorded({**PLAN, **changes}))]) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["one.json"], ["--sources", "."]])
def test_half_a_command_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare_plans.main(words)
    assert "name two records" in capsys.readouterr().err


# ---- rivals --------------------------------------------------------------------------------------------------------------


STEPS = range(1, 3)
TOLD = [{"deepspeed": "0"}, {"step": 1, "loss": 8.5}, {"step": 2, "loss": 8.25}, {"saved": "tag"}]


@pytest.mark.parametrize(
    ("found", "code", "good", "text"),
    [
        ({1: 8.5, 2: 8.25}, 0, True, "losses bitwise the same"),
        ({1: 8.5, 2: 8.5}, 0, False, "exit code 0, not a word; loss of step 2 is 8.5, 8.25 is right"),
        ({1: 8.5}, 0, False, "exit code 0, not a word; loss of step 2 is None, 8.25 is right"),
        ({1: 8.5}, 1, False, "exit code 1: FileExistsError: 'rank00'"),
        ({}, -6, False, "exit code -6: python: handle.cpp:34: no"),
    ],
)
def test_what_became_of_a_run(found: dict[int, float], code: int, good: bool, text: str) -> None:
    said = [{"error": "FileExistsError: '/a-b/c.d/rank00'"}] if code == 1 else []
    end = Ended(code=code, out="", err="first\npython: /opt/ds/csrc/handle.cpp:34: no\n\n", seconds=1.0)
    outcome = _compared(losses_of(TOLD), found, end, said, STEPS)
    assert (outcome.good, outcome.text) == (good, text)
