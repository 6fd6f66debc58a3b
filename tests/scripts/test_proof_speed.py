"""scripts/prove_speed.py: what passes, what is only reported and what is neither, from runs that are made up; and what is in a
folder already that somebody names."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import prove_speed
import pytest
import yaml
from proof import both_sides
from proof.both_sides import Case, fresh, profile, write_recipe
from proof.setting import RunFailed, Setting
from proof.verdicts import EXIT_CODES, Progress, exit_code

from fuyou_cli.core.units import GiB

RATES = (600_000_000, 600_000_000)
LOOP = """import argparse, json
parser = argparse.ArgumentParser()
parser.add_argument("--out")
out = parser.parse_known_args()[0].out
with open(out, "w") as file:
    file.write(json.dumps({"step_s": 70.0, "cg_peak_gib": 7.0, "ds": "0"}) + chr(10))
"""


def _setting(work: Path, shape: str = "1.1b") -> Setting:
    (work / "models" / shape).mkdir(parents=True, exist_ok=True)
    (work / "models" / shape / "made").touch()
    return Setting(
        work=work, shape=shape, micro=4, text=work / "text", entry={"path": "rows.jsonl"}, text_name="text",
        progress=Progress(work / "state.jsonl"), results=work,
    )  # fmt: skip


def _ours(*, peak: int = 1 * GiB, seconds: float = 10.0, noisy: bool = False) -> dict[str, Any]:
    step = {
        "loss": 1.0, "seconds": seconds, "batch_tokens": 512, "ram_peak": peak, "read_bytes": 10**9, "written_bytes": 10**9,
        "update_cpu_seconds": 0.1, "io_cpu_seconds": 0.1, "stalls": {}, "busy": {}, "peak_resident": 0,
    }  # fmt: skip
    return {"plan": {"budget": 2 * GiB}, "warm_up": 1, "steps": [dict(step) for _ in range(4)], "noisy": noisy}


def _asked(rows: list[Any], words: str) -> list[str]:
    return [row.verdict for row in rows if words in row.what and row.asked != "-"]


def test_the_budget_is_asked_for_with_and_without_clipping() -> None:
    over = _ours()
    over["steps"][-1]["ram_peak"] = 2 * GiB + (64 << 20)
    assert prove_speed.memory_row("x", [_ours(), _ours(peak=2 * GiB)]).verdict == "pass"
    row = prove_speed.memory_row("x", [_ours(), over])
    assert (row.verdict, row.asked, row.measured) == ("FAIL", "<= 2", "2.062")
    for clip in (None, 1.0):
        rows = prove_speed.compute_rows("1.1b", clip, [over], [_ours(seconds=20.0)], "")
        assert _asked(rows, "peak memory") == ["FAIL"]


@pytest.mark.parametrize("part", ["ssd", "deepspeed"])
def test_each_case_of_a_part_asks_for_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(prove_speed, "mix", lambda *_, **__: {"read": RATES[0], "write": RATES[1]})
    monkeypatch.setattr(prove_speed, "our_run", lambda *_: _ours(peak=9 * GiB))
    monkeypatch.setattr(prove_speed, "in_memory_run", lambda *_, **__: _ours())
    monkeypatch.setattr(prove_speed, "on_measured_machine", lambda setting, case: case)
    options = argparse.Namespace(
        run="full", adapter=False, turns=1, measured=2, clipping="both", budget=2 * GiB, peers=None, rates=RATES
    )
    rows = getattr(prove_speed, part)(_setting(tmp_path), options)
    cases = 2 * (1 if part == "ssd" else len(prove_speed.FASTER))
    assert _asked(rows, "peak memory") == ["FAIL"] * cases


def _faster(peer: prove_speed.Peer, *, clip: float | None = None) -> Any:
    return prove_speed.faster_row("times DeepSpeed", 2.4, clip, [_ours()], peer)


def test_beside_deepspeed_only_a_quiet_run_of_today_passes_or_fails() -> None:
    today = {"step_s": 70.0, "noisy": False}
    assert _faster(prove_speed.Peer(seconds=70.0, source="", runs=[today])).verdict == "pass"
    assert _faster(prove_speed.Peer(seconds=20.0, source="", runs=[today])).verdict == "FAIL"
    assert _faster(prove_speed.Peer(seconds=70.0, source="", runs=[today, {**today, "noisy": True}])).verdict == "NOT QUIET"


@pytest.mark.parametrize("seconds", [70.0, 20.0])
def test_a_recorded_figure_is_reported_and_shows_nothing(seconds: float) -> None:
    row = _faster(prove_speed.Peer(seconds=seconds, source="recorded"))
    assert (row.verdict, row.asked, row.measured) == ("reported", ">= 2.4", f"{seconds / 10:.3f}")
    assert exit_code([row]) == 3


@pytest.fixture
def peer_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Runs DeepSpeed through a loop that only writes its record, on a disk that nobody holds."""
    folder = tmp_path / "peers"
    folder.mkdir()
    (folder / "ds_train.py").write_text(LOOP)
    limited = both_sides.limited
    monkeypatch.setattr(prove_speed, "unusable", lambda _: "")
    monkeypatch.setattr(prove_speed, "limited", lambda work, **_: limited(work, memory=None, throttle=None))

    def run() -> dict[str, Any]:
        record, why = prove_speed.deepspeed_run(_setting(tmp_path), folder, rows=1, micro=1, throttle=RATES, turn=0)
        assert not why
        return record

    return run


def test_a_run_of_deepspeed_is_judged_like_ours_and_kept_when_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer_run: Callable[[], dict[str, Any]]
) -> None:
    monkeypatch.setattr(prove_speed, "NOISE_CORES", -1.0)
    assert peer_run()["noisy"] is True
    assert not (tmp_path / "state.jsonl").exists()
    monkeypatch.setattr(prove_speed, "NOISE_CORES", float(os.cpu_count() or 1) + 1)
    assert peer_run()["noisy"] is False
    monkeypatch.setattr(prove_speed, "NOISE_CORES", -1.0)
    assert peer_run()["noisy"] is False  # kept
    (tmp_path / "peers" / "ds_train.py").write_text(LOOP + "# another loop\n")
    assert peer_run()["noisy"] is True


def test_the_in_memory_side_has_huge_pages_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nfor last; do :; done; echo "$@" >"${0%/*}/asked"\n'
        'echo "{\\"tunables\\": \\"$GLIBC_TUNABLES\\"}" >"${0%/*}/in_memory.jsonl"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(both_sides.sys, "executable", str(python))
    case = both_sides.InMemory(shape="1m", rows=1, micro=1, steps=1, turn=0, clip=1.0, compute_alone=True)
    result = both_sides.in_memory_run(_setting(tmp_path, "1m"), case, rows_from=lambda: tmp_path / "rows")
    assert result["steps"] == [{"tunables": "glibc.malloc.hugetlb=1"}]
    asked = (tmp_path / "asked").read_text()
    assert "in_memory.py --model" in asked and "--compute-alone --clip 1.0" in asked and "--no-checkpointing" not in asked


def test_a_failed_part_is_not_hidden_by_one_that_was_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from proof.verdicts import at_least, missing

    options = argparse.Namespace(
        run="full",
        adapter=False,
        parts=["compute", "ssd"],
        turns=1,
        measured=2,
        budget=2 * GiB,
        peers=None,
        rates=RATES,
        checkout=None,
    )
    monkeypatch.setattr(prove_speed, "compute", lambda *_: [at_least("rate", 0.5, 0.9)])
    monkeypatch.setattr(prove_speed, "ssd", lambda *_: [missing("fio", ">= 0.97", "absent")])
    assert prove_speed.prove(_setting(tmp_path), options) == 1
    monkeypatch.setattr(prove_speed, "compute", lambda *_: [at_least("rate", 0.95, 0.9)])
    assert prove_speed.prove(_setting(tmp_path), options) == 3


def test_help_says_what_the_exit_codes_mean(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["prove_speed.py", "--help"])
    with pytest.raises(SystemExit):
        prove_speed.arguments()
    assert EXIT_CODES in capsys.readouterr().out


# ---- folders that somebody names -----------------------------------------------------------------------------------------


CASE = Case(shape="1m", budget=1 << 30, steps=1)


@pytest.mark.parametrize("name", ["run", "store"])
def test_a_folder_of_somebodys_is_refused(tmp_path: Path, name: str) -> None:
    precious = tmp_path / name / "precious"
    precious.parent.mkdir()
    precious.write_text("mine")
    with pytest.raises(RunFailed, match="was not made by these scripts"):
        write_recipe(_setting(tmp_path, "1m"), CASE)
    assert precious.read_text() == "mine"


def test_own_folders_are_emptied_and_a_recipe_beside_them_is_kept(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine")
    for _ in range(2):
        recipe = write_recipe(_setting(tmp_path, "1m"), CASE)
        left = tmp_path / "store" / "left"
        assert not left.exists()
        left.touch()
    assert yaml.safe_load(recipe.read_text())["train"]["max_steps"] == 1
    assert (tmp_path / "recipe.yaml").read_text() == "mine"
    assert sorted(path.name for path in fresh(tmp_path / "store").iterdir()) == [".fuyou-proof"]


def test_the_machine_is_measured_with_the_keys_of_the_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = "import sys; sys.exit(sys.argv[1:] != ['bench', 'recipe.yaml', 'adapter.r=8'])"
    monkeypatch.setattr(both_sides, "FUYOU", (sys.executable, "-c", takes))
    monkeypatch.setattr(both_sides, "NOISE_CORES", 1e9)
    with_keys = replace(CASE, overrides=("adapter.r=8",))
    assert "XDG_CACHE_HOME" in profile(_setting(tmp_path, "1m"), Path("recipe.yaml"), None, with_keys)
    with pytest.raises(RunFailed, match="fuyou bench failed"):
        profile(_setting(tmp_path, "1m"), Path("recipe.yaml"), None, CASE)
