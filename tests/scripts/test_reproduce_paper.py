"""scripts/reproduce_paper.py: what is asked of it holds, and nothing goes into part 1 but what it lists."""

from __future__ import annotations

import ast
import json
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import reproduce_paper
from paper import given, ours, policy
from paper.policy import Reproduced
from proof import verdicts
from rich.console import Console

from fuyou_cli.cli import app
from fuyou_cli.machine.described import described

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SOLVER = {"MEDIAN", "WORST", "CLOSE", "BATCHES"}  # bars, how closely a rate is looked for, and what is only printed


def _lines() -> tuple[given.Listed, ...]:
    """All that goes into part 1, as it is printed."""
    return tuple(line for lines in given.listed().values() for line in lines)


@pytest.fixture(scope="module")
def found() -> Reproduced:
    return policy.reproduced()


# ---- part 1 ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
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
    assert len(given.constants()) <= 4
    listed = {name for line in _lines() for name in line.names}
    numbers = {name for path in ("given.py", "policy.py") for name in _named_numbers(SCRIPTS / "paper" / path)}
    assert numbers - SOLVER == listed
    assert all(line.value and line.source for line in _lines())
    assert _numbers_in_functions(SCRIPTS / "paper" / "policy.py") <= {0, 1, 2, 3}  # counts and indices


@pytest.mark.slow
def test_the_rates_are_fitted_on_one_row_each(found: Reproduced, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits them whatever all other rows say."""
    changed = [
        row if row.role == "fitted" else replace(row, figure=row.figure * 3)
        for row in given.PUBLISHED
        if row.drives == 12 or row.role != "fitted"
    ]
    monkeypatch.setattr(given, "PUBLISHED", tuple(changed))
    assert policy.fitted_rates() == {12: found.rates[12]}


@pytest.mark.slow
def test_the_fitted_rows_come_out(found: Reproduced) -> None:
    errors = [row.error for row in found.rows if row.published.role == "fitted"]
    assert len(errors) == 5 and max(map(abs, errors)) < 0.01


def test_a_step_moves_thirty_bytes_per_parameter() -> None:
    step = policy.paper_step("13B", 8, policy.machine(12, 19e9))
    params = policy.specification("13B", 8).stored_parameters
    assert step.written == pytest.approx(14 * params)
    # Stages that are still there when a pass turns round are not read again, of 40 blocks some: 2 bytes of each.
    assert 16 - 2 * (2 * (given.IN_FLIGHT + 2)) / 40 <= step.read / params <= 16


@pytest.mark.slow
def test_the_batch_of_135b_is_what_one_drive_says(found: Reproduced) -> None:
    implied = policy.one_drive_batch(found.rates)
    assert min((16, 24, 32), key=lambda batch: abs(batch - implied)) == given.BATCH_135B
    assert sorted({row.batch for row in given.PUBLISHED if row.model == "135B"}) == [given.BATCH_135B]


@pytest.mark.parametrize("name", [name for line in _lines() for name in line.names])
def test_what_is_printed_is_what_is_computed_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints another value as another text, of its own line alone."""
    before, value = _lines(), getattr(given, name)
    other = {"13B": (1, 2, 3)} if isinstance(value, dict) else 2 * value
    monkeypatch.setattr(given, name, other)
    assert [new.names for new, old in zip(_lines(), before, strict=True) if new != old] == [
        line.names for line in before if name in line.names
    ]


@pytest.mark.slow
def test_the_table_prints_the_constants(found: Reproduced, monkeypatch: pytest.MonkeyPatch) -> None:
    said = _printed(reproduce_paper.show_reproduced, found)
    assert "162 TFLOPS" in said and "8 blocks on their way" in said and "30 bytes per parameter" in said
    moved = [row.moved for row in found.rows]
    assert f"{min(moved):.1f} to {max(moved):.1f}, of 30" in said
    monkeypatch.setattr(given, "GPU_FLOPS", 111e12)
    monkeypatch.setattr(given, "BATCH_135B", 16)
    changed = _printed(
        reproduce_paper.show_reproduced, replace(found, rows=tuple(replace(row, moved=12.5) for row in found.rows))
    )
    assert "111 TFLOPS" in changed and "162 TFLOPS" not in changed
    assert "12.5 to 12.5, of 30" in changed
    assert "16 sequences at 135B" in changed and "at 24 the errors" in changed and "at 24 the errors" not in said


def test_a_number_may_be_set_for_part_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPU_FLOPS", "BATCH_135B", "FITTED_BATCH", "ALL_DRIVES", "PUBLISHED"):
        monkeypatch.setattr(given, name, getattr(given, name))  # as they were, afterwards
    reproduce_paper.set_given("GPU_FLOPS=150e12")
    reproduce_paper.set_given("BATCH_135B=16")
    assert (given.GPU_FLOPS, given.BATCH_135B, policy.one_drive_row().batch) == (150e12, 16, 16)
    assert policy.machine(12, 19e9).matmul_flops == 150e12
    for text, said in (
        ("SHAPES=1", "none of FITTED_BATCH, GPU_FLOPS, IN_FLIGHT"),
        ("IN_FLIGHT=2.5", "a whole number is wanted, such as IN_FLIGHT=8"),
        ("PCIE", "a number is wanted, such as PCIE=2.1e"),
        ("FITTED_BATCH=7", "no published row gives the rate of 1, 2, 3, 6, 12 drives"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            reproduce_paper.set_given(text)
    given.FITTED_BATCH = 32
    with pytest.raises(ValueError, match="the rate of 5 drives"):
        reproduce_paper.set_given("ALL_DRIVES=5")


def test_what_is_said_of_its_buffers() -> None:
    """Says 700M elements each, as given.py does: two blocks at 13B, less than half of one at 175B."""
    blocks = {name: max(stage.params for stage in policy.specification(name, 8).stages[1:-1]) for name in ("13B", "175B")}
    assert 2 <= 700e6 / blocks["13B"] < 3 and 700e6 / blocks["175B"] < 0.5
    said = next(line.source for line in given.constants() if "IN_FLIGHT" in line.names)
    assert "700M elements" in said and "two blocks at 13B" in said and "less than half of one at 175B" in said


def test_its_output_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "commit", lambda: "1234567890")
    command, origin = _printed(reproduce_paper.show_origin, ["--part", "1"]).splitlines()[:2]
    assert command == "python scripts/reproduce_paper.py --part 1"
    assert "commit 1234567890, " in origin and f"python {platform.python_version()}" in origin and "transformers " in origin


def _printed(show: Callable[[Console, Any], object], what: object) -> str:
    said = StringIO()
    show(Console(file=said, width=1000), what)
    return said.getvalue()


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


@pytest.mark.slow
def test_175b_keeps_the_gpu_as_busy_as_asked(found: Reproduced) -> None:
    case = ours.large_cases(found.rates)[0]
    assert (case.model, case.batch * given.LENGTH, case.settings) == ("175B", 32768, ("train.clip_grad_norm=null",))
    assert len(case.hardware.drives) == 12 and case.hardware.ram_total == 256 * 2**30
    best = ours.plan_of(case, alone=True)
    assert not best.problem and best.sums == "float32"
    assert best.counted >= 0.85
    paper = next(row for row in given.PUBLISHED if (row.model, row.batch) == ("175B", 16))
    beside = replace(best, tokens=paper.batch * given.LENGTH / paper.seconds)
    assert beside.counted == pytest.approx(0.53, abs=0.01)  # as the paper counts itself


@pytest.mark.slow
def test_ours_is_what_the_command_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy.config_of("13B").save_pretrained(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output_dir: {tmp_path}/out\nmodel: {{name_or_path: {tmp_path}}}\ntrain: {{max_steps: 9, batch_size: 8}}\n"
        f"dataset: {{train: [{{path: {tmp_path}/none.jsonl}}], max_seq_len: 1024}}\n"
        "checkpoint: {commit_every_steps: null}\n"  # nobody there commits anything
    )
    text = "rtx4090,2xgen4,64GiB"
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the command sets its own
    with pytest.raises(SystemExit) as end:
        app.main(["plan", str(recipe), "--hardware", text, "--dry-run", "--json"])
    assert end.value.code == 0
    said = json.loads(capsys.readouterr().out)
    mine = ours.plan_of(ours.Case(model="13B", batch=8, where="", hardware=described(text), settings=()), alone=True)
    assert said["plan"]["predicted"]["step_seconds"] == mine.seconds


def test_a_sustained_machine_writes_no_faster_than_that() -> None:
    burst, late = (ours.consumer_machine(64, sustained=sustained) for sustained in (False, True))
    there = described("rtx4090,2xgen4,64GiB")
    assert (late.store_write, late.store_write_mixed) == (there.sustained_write, there.sustained_write_mixed)
    assert (burst.store_write, burst.store_write_mixed) == (there.store_write, there.store_write_mixed)
    assert burst.store_read == late.store_read and late.store_write < burst.store_write / 4


OURS = ours.Ours(
    model="175B", where="there", batch=32, settings=(), paper=62.1, micro=4, sums="float32", ram=600 * 2**30, seconds=100.0,
    tokens=120.0, clipped=80.0, committed=90.0, busy=0.9, written=10**12, rated=10**16,
)  # fmt: skip


def test_what_is_said_beside_the_plans_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [OURS, replace(OURS, micro=2)]
    said = _printed(reproduce_paper.show_beside, rows)
    assert "plans may take 600.00 GiB, sums are float32, micro-batches of 2, 4 rows" in said and "162 TFLOPS" in said
    large = _printed(reproduce_paper.show_large, [OURS])
    assert "paper's 53.7% at 16,384 tokens" in large and "rtx4090,12xp5510,256GiB,2xgold5320" in large
    monkeypatch.setattr(given, "GPU_FLOPS", 81e12)
    monkeypatch.setattr(ours, "LARGE", ("175B", 32, 128))
    assert "81 TFLOPS" in _printed(reproduce_paper.show_beside, rows)
    large = _printed(reproduce_paper.show_large, [OURS])
    assert "paper's 107.3% at 16,384 tokens" in large and "rtx4090,12xp5510,128GiB,2xgold5320" in large


def test_what_is_said_of_the_consumer_drives_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _printed(reproduce_paper.show_consumers, [OURS])
    assert "2 x Samsung SSD 990 PRO 2TB (2 TB)" in said and "(226 GB each)" in said and "of 1,200 TB per drive" in said
    assert "after 0.5 steps at the latest" in said  # two regions of 226 GB, a TB a step
    monkeypatch.setattr(ours, "consumer_parts", lambda ram: f"rtx4090,p5510,{ram}GiB")
    other = _printed(reproduce_paper.show_consumers, [OURS])
    assert "1 x SOLIDIGM SSDPF2KX038TZ (4 TB)" in other and "(0 GB each)" in other and "of 7,008 TB per drive" in other


def test_weights_on_the_gpu_are_in_ram_too() -> None:
    """Writes their copy there by updates, where states are in RAM: what a plan calls at home on the GPU takes RAM all the
    same."""
    settings, hardware = ("offload.optimizer_states=cpu",), described("rtx4090,2xgen4,768GiB")
    found = ours.plan_of(ours.Case(model="13B", batch=8, where="", hardware=hardware, settings=settings), alone=True)
    assert found.weights_in_ram == pytest.approx(1.0) and found.states_in_ram == pytest.approx(1.0)
