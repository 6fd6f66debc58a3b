"""scripts/reproduce_paper.py: what is asked of it holds, and nothing goes into part 1 but what it lists."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from paper import given, ours, policy
from paper.policy import Reproduced

from fuyou_cli.cli.profile import described

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SOLVER = {"MEDIAN", "WORST", "CLOSE", "BATCHES"}  # bars, how closely a rate is looked for, and what is only printed


@pytest.fixture(scope="module")
def found() -> Reproduced:
    return policy.reproduced()


# ---- part 1 ----------------------------------------------------------------------------------------------------------


def test_the_paper_is_reproduced(found: Reproduced) -> None:
    assert found.median <= 0.10 and found.worst <= 0.25
    assert found.holds and len(found.errors) == 22


def test_every_row_that_is_asked_is_there_and_counts_once() -> None:
    by_role = {role: [row for row in given.PUBLISHED if row.role == role] for role in ("predicted", "fitted")}
    settings = {(row.model, row.batch, row.drives) for row in by_role["predicted"]}
    table = {("13B", batch, drives) for batch in (48, 64) for drives in (1, 2, 3, 6, 12)}
    sweep = {("13B", batch, 12) for batch in (8, 16, 64, 128)}
    large = {("70B", 32, 12), ("175B", 8, 12), ("175B", 16, 12), *(("135B", 24, drives) for drives in (2, 3, 6, 12))}
    assert settings == table | sweep | large
    assert [(row.model, row.batch, row.drives) for row in by_role["fitted"]] == [("13B", 32, n) for n in (1, 2, 3, 6, 12)]


def test_seconds_are_those_that_the_paper_s_tflops_mean() -> None:
    table = {
        batch: [round(row.seconds, 1) for row in given.PUBLISHED if row.batch == batch and row.tflops] for batch in (32, 64)
    }
    assert table == {32: [90.9, 53.0, 42.0, 28.0, 24.0], 64: [97.0, 61.0, 50.0, 45.0, 46.0]}
    again = next(row for row in given.PUBLISHED if row.role == "again")
    assert replace(again, figure=143.1, tflops=True).seconds == pytest.approx(again.seconds, rel=1e-3)


def test_four_constants_and_no_number_beside_what_is_listed() -> None:
    assert len(given.CONSTANTS) <= 4
    listed = {name for line in (*given.CONSTANTS, *given.HARDWARE, *given.POLICY) for name in line.names}
    numbers = {name for path in ("given.py", "policy.py") for name in _named_numbers(SCRIPTS / "paper" / path)}
    assert numbers - SOLVER == listed
    assert all(line.value and line.source for line in (*given.CONSTANTS, *given.HARDWARE, *given.POLICY))
    assert _numbers_in_functions(SCRIPTS / "paper" / "policy.py") <= {0, 1, 2, 3}  # counts and indices


def test_the_rates_are_fitted_on_one_row_each(found: Reproduced, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever all other rows say."""
    changed = [
        row if row.role == "fitted" else replace(row, figure=row.figure * 3)
        for row in given.PUBLISHED
        if row.drives == 12 or row.role != "fitted"
    ]
    monkeypatch.setattr(given, "PUBLISHED", tuple(changed))
    assert policy.fitted_rates() == {12: found.rates[12]}


def test_the_fitted_rows_come_out(found: Reproduced) -> None:
    errors = [row.error for row in found.rows if row.published.role == "fitted"]
    assert len(errors) == 5 and max(map(abs, errors)) < 0.01


def test_a_step_moves_thirty_bytes_per_parameter() -> None:
    step = policy.paper_step("13B", 8, policy.machine(12, 19e9))
    params = policy.specification("13B", 8).stored_parameters
    assert step.written == pytest.approx(14 * params)
    # Blocks that are still there when forward turns are not read again, of 40 some: 2 bytes of each.
    assert 16 - 2 * (2 * given.IN_FLIGHT) / 40 <= step.read / params <= 16


def test_the_batch_of_135b_is_what_one_drive_says(found: Reproduced) -> None:
    implied = policy.one_drive_batch(found.rates)
    assert min((16, 24, 32), key=lambda batch: abs(batch - implied)) == given.BATCH_135B
    assert sorted({row.batch for row in given.PUBLISHED if row.model == "135B"}) == [given.BATCH_135B]


def _named_numbers(path: Path) -> set[str]:
    """Names without an underscore that a file gives a value with a number in it, but for its lists of lines."""
    named = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and _numbers(node.value):
            named |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return {name for name in named if not name.startswith("_")}


def _numbers_in_functions(path: Path) -> set[float]:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return {number for function in functions for number in _numbers(function)}


def _numbers(tree: ast.AST) -> set[float]:
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)
    }


# ---- part 2 ----------------------------------------------------------------------------------------------------------


def test_175b_keeps_the_gpu_as_busy_as_asked(found: Reproduced) -> None:
    case = ours.large_cases(found.rates)[0]
    assert (case.model, case.batch * given.LENGTH, case.settings) == ("175B", 32768, ("train.clip_grad_norm=null",))
    assert len(case.hardware.drives) == 12 and case.hardware.ram_total == 256 * 2**30
    best = ours.plan_of(case)
    assert not best.problem and best.sums == "float32"
    assert best.counted >= 0.85
    paper = next(row for row in given.PUBLISHED if (row.model, row.batch) == ("175B", 16))
    beside = replace(best, tokens=paper.batch * given.LENGTH / paper.seconds)
    assert beside.counted == pytest.approx(0.53, abs=0.01)  # as the paper counts itself


def test_ours_is_what_the_command_plans(tmp_path: Path) -> None:
    policy.config_of("13B").save_pretrained(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output_dir: {tmp_path}/out\nmodel: {{name_or_path: {tmp_path}}}\ntrain: {{max_steps: 9, batch_size: 8}}\n"
        f"dataset: {{train: [{{path: {tmp_path}/none.jsonl}}], max_seq_len: 1024}}\n"
    )
    text = "rtx4090,2xgen4,64GiB"
    command = [sys.executable, "-m", "fuyou_cli", "plan", str(recipe), "--hardware", text, "--dry-run", "--json"]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    mine = ours.plan_of(ours.Case(model="13B", batch=8, where="", hardware=described(text), settings=()))
    assert said["plan"]["predicted"]["step_seconds"] == mine.seconds


def test_a_sustained_machine_writes_no_faster_than_that() -> None:
    burst, late = (ours.consumer_machine(64, sustained=sustained) for sustained in (False, True))
    there = described("rtx4090,2xgen4,64GiB")
    assert (late.store_write, late.store_write_mixed) == (there.sustained_write, there.sustained_write_mixed)
    assert (burst.store_write, burst.store_write_mixed) == (there.store_write, there.store_write_mixed)
    assert burst.store_read == late.store_read and late.store_write < burst.store_write / 4
