"""scripts/gpu_check: its stages on the emulated device, what ends them, and what is kept; gaps and packs from made-up input."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gpu import card_stages, gaps, pack, profiled, runner
from gpu.card_runs import Case, write_recipe
from gpu.record import Record
from proof.verdicts import FAILED, HELD, NOT_SHOWN, ROOT

from fuyou_cli.core.errors import UsageError
from fuyou_cli.recipe.load import load_recipe

COMMAND = [sys.executable, str(ROOT / "scripts" / "gpu_check"), "--device", "emulated"]


def _check(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    command = [*COMMAND, "--out", str(folder / "out"), "--work", str(folder / "work"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (found,) = (folder / "out").glob("*.json")
    (text,) = (folder / "out").glob("*.txt")
    return done.returncode, json.loads(found.read_text()), text.read_text()


# ---- end to end ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute where the machine has nothing else to do
def test_stages_end_to_end_on_the_emulated_device(tmp_path: Path) -> None:
    limits = "pinning=200,8k=600"  # a machine that is loaded takes longer than a GPU would
    code, found, text = _check(tmp_path, "--only", "8k,pinning", "--minutes", "14", "--limit", limits)
    assert [stage["name"] for stage in found["stages"]] == ["pinning", "8k"]  # in their own order
    assert [stage["state"] for stage in found["stages"]] == ["passed"] * 2, text
    assert code == HELD
    rows = {row["what"]: row for stage in found["stages"] for row in stage["rows"]}
    loss = rows["a toy, 128 tokens a step: first loss, relative difference"]
    assert (loss["asked"], loss["verdict"]) == ("<= 0.002", "pass")
    assert float(rows["a toy, 128 tokens a step: speed, ours / plain PyTorch"]["measured"]) > 0
    assert rows["a toy, 128 tokens a step: step, measured / predicted"]["note"].startswith("predicted ")


@pytest.mark.slow
def test_the_gaps_of_a_run_are_told_with_who_submits_next(tmp_path: Path) -> None:
    code, found, text = _check(tmp_path, "--only", "profile")
    assert code == HELD, text
    busy = found["stages"][0]["values"]["gaps"]
    assert 0 < busy["busy"] <= 1 and busy["steps"] == 2 and len(busy["gaps"]) == 10
    assert any("fuyou_cli" in line or "engine/" in line for gap in busy["gaps"] for line in gap["stack"])
    assert "== profile (busy share and gaps): passed" in text and "gap 10, ms" in text and "idle before " in text
    assert json.loads(gzip.decompress((tmp_path / "work" / "trace.json.gz").read_bytes()))["samples"]


@pytest.mark.slow
def test_a_stage_that_hangs_is_ended_with_all_that_it_started_and_the_next_one_runs(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "models" / "1m").mkdir(parents=True)
    pipe = work / "text.jsonl"  # nobody writes to it: the stage waits for its text for ever
    os.mkfifo(pipe)
    code, found, text = _check(tmp_path, "--only", "8k,pinning", "--limit", "8k=6")
    states = {stage["name"]: stage["state"] for stage in found["stages"]}
    assert states == {"pinning": "passed", "8k": "timed out"}, text
    assert code == FAILED
    assert "8k (eight layers of Llama-8B, 8k tokens): timed out in" in text
    assert [line for line in processes() if str(work) in line] == []


@pytest.mark.slow
def test_what_was_done_is_kept_when_the_check_is_killed(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    os.mkfifo(work / "text.jsonl")
    command = [*COMMAND, "--out", str(out), "--work", str(work), "--only", "pinning,8k"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
        while not (work / "records" / "8k.json").exists():
            assert child.poll() is None
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
    (path,) = out.glob("*.json")
    found = json.loads(path.read_text())["stages"]
    assert child.returncode == 130
    assert [(stage["name"], stage["state"]) for stage in found] == [("pinning", "passed"), ("8k", "interrupted")]
    assert [row["what"] for row in found[0]["rows"]] == ["pinning 8 MiB", "pinning 64 MiB"]
    assert [line for line in processes() if str(work) in line] == []


def processes() -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # gone meanwhile
            continue
    return lines


def test_an_unknown_stage_is_one_clear_error(tmp_path: Path) -> None:
    command = [*COMMAND, "--out", str(tmp_path), "--work", str(tmp_path / "work"), "--only", "8k,9k"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --only: no stage is called 9k; there are doctor, pinning")
    command[-2:] = ["--limit", "8k=soon"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: --limit: STAGE=SECONDS,... is wanted, not 8k=soon\n")
    assert list(tmp_path.glob("*.json")) == []


def test_a_python_without_the_tools_of_tests_is_named_before_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TEST_TOOLS", ("pytest", "no-such-tool"))
    runner.need_test_tools(runner.chosen("bench,8k"))  # these need none
    with pytest.raises(UsageError, match="lacks no-such-tool, which the gpu tests need") as error:
        runner.need_test_tools(runner.chosen(None))
    assert "pip install no-such-tool" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["passed", "passed"], HELD),
        (["passed", "not shown"], NOT_SHOWN),
        (["passed", "not reached"], NOT_SHOWN),
        (["not shown", "failed"], FAILED),
        (["passed", "timed out"], FAILED),
    ],
)
def test_the_exit_code_says_whether_all_passed(states: list[runner.State], code: int) -> None:
    outcomes = [runner.Outcome(stage=card_stages.STAGES[0], state=state) for state in states]
    assert runner.code_of(outcomes) == code


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("device", ["cuda", "emulated"])
def test_recipes_are_ones_that_fuyou_takes(tmp_path: Path, device: str, clip: float | None) -> None:
    record = Record(tmp_path / "records" / "x.json")
    context = card_stages.Context(work=tmp_path, device=device, record=record)
    for shape in ("1m", context.scale.small):  # nothing is drawn: the checkpoint counts as made
        (tmp_path / "models" / shape).mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / shape / "made").touch()
    case = Case(shape=context.scale.small, rows=4, steps=3, clip=clip, on_ssd=True, gpu="24GB")
    loaded = load_recipe(write_recipe(context.place, case), [])
    assert (loaded.recipe.train.clip_grad_norm, loaded.recipe.offload.device) == (clip, device)


def test_a_test_that_hangs_is_named_with_its_stacks_and_what_passed_before_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hangs in a lock, or in a driver that does not return: Python's own handlers would not run there."""
    folder, began = tmp_path / "tests", tmp_path / "began"
    folder.mkdir()
    lines = ["import ctypes, pytest", "", "def test_emulated_first(): pass", "", "@pytest.mark.parametrize('x', ['a b, c'])"]
    lines += [
        "def test_emulated_hangs(x):",
        f"    open({str(began)!r}, 'w')",
        "    ctypes.PyDLL(None).sleep(600)",
        "# mark.gpu",
    ]
    (folder / "test_it.py").write_text("\n".join(lines))
    monkeypatch.setattr(card_stages, "ROOT", tmp_path)

    class Limited(subprocess.Popen):  # type: ignore[type-arg]
        """Reaches its limit when the second test hangs, however busy the machine is."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or began.exists():
                return super().wait(timeout)
            while not began.exists() and self.poll() is None:
                time.sleep(0.02)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Limited)
    record = Record(tmp_path / "records" / "tests.json")
    card_stages.tests(card_stages.Context(work=tmp_path, device="emulated", record=record, until=time.monotonic() + 600))
    (row,), kept = record.rows, record.values["gpu tests"]
    assert (row.verdict, row.measured) == ("FAIL", "1 passed, 1 failed, 0 skipped")
    assert row.note == "ended by the stage's limit; test_emulated_hangs[a b, c] did not end"
    assert "in test_emulated_hangs" in kept["end"]


def test_tests_of_several_processes_are_counted() -> None:
    output = """
scheduling tests via LoadScheduling

tests/a.py::test_a[0]
tests/a.py::test_a[1, x]
[gw0] [ 14%] PASSED tests/a.py::test_a[0]
tests/a.py::test_b
[gw1] [ 28%] FAILED tests/a.py::test_a[1, x]
tests/b.py::test_c
[gw0] [ 42%] SKIPPED tests/b.py::test_c Fatal Python error: Aborted
"""
    counts = {"passed": 1, "failed": 2, "skipped": 1}
    assert card_stages.counted(output) == (counts, ["test_a[1, x]", "test_b did not end"])


# ---- gaps ------------------------------------------------------------------------------------------------------------


def _at(*pairs: tuple[float, float]) -> list[gaps.Interval]:
    return [gaps.Interval(begin=begin, end=end, name=f"k{number}") for number, (begin, end) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("found", "share"),
    [
        ([], 0.0),
        ([(0, 10)], 1.0),
        ([(-5, 2), (8, 20)], 0.4),  # cut to the window
        ([(1, 3), (2, 4), (2, 2.5)], 0.3),  # over one another: counted once
        ([(1, 2), (2, 3)], 0.2),
        ([(11, 12), (-2, -1)], 0.0),
    ],
)
def test_the_busy_share_of_a_window(found: list[tuple[float, float]], share: float) -> None:
    assert gaps.busy_share(_at(*found), (0.0, 10.0)) == pytest.approx(share)


def test_gaps_are_named_by_what_ends_before_and_begins_after_them() -> None:
    found = _at((1, 3), (2, 2.5), (6, 7), (7, 8))
    expected = [(3, 6, "k0", "k2"), (8, 10, "k3", ""), (0, 1, "", "k0")]
    assert [(gap.begin, gap.end, gap.after, gap.before) for gap in gaps.longest_gaps(found, (0.0, 10.0), 10)] == expected
    assert [gap.seconds for gap in gaps.longest_gaps(found, (0.0, 10.0), 1)] == [3]
    (whole,) = gaps.longest_gaps([], (0.0, 10.0), 3)
    assert (whole.begin, whole.end) == (0.0, 10.0)
    assert gaps.longest_gaps(_at((0, 10)), (0.0, 10.0), 3) == []


def test_busy_and_gaps_fill_the_window() -> None:
    found = _at((0.5, 1), (0.75, 2), (4, 5), (4, 4.5), (9.5, 12))
    idle = sum(gap.seconds for gap in gaps.longest_gaps(found, (0.0, 10.0), 99))
    assert gaps.busy_share(found, (0.0, 10.0)) * 10 + idle == pytest.approx(10)


def test_idle_time_is_summed_by_what_begins_after_it() -> None:
    names = ["mm", "adam", "mm", "mm"]
    found = [
        gaps.Interval(begin=begin, end=begin + 1, name=name) for begin, name in zip((1.5, 3.5, 5.5, 6.5), names, strict=True)
    ]
    whole = gaps.longest_gaps(found, (1.0, 9.5), None)
    assert gaps.idle_by_next(whole, 10) == [
        {"name": "", "milliseconds": 2000.0, "times": 1},
        {"name": "mm", "milliseconds": 1500.0, "times": 2},
        {"name": "adam", "milliseconds": 1000.0, "times": 1},
    ]
    assert [one["name"] for one in gaps.idle_by_next(whole, 2)] == ["", "mm"]


def test_a_gap_has_the_stack_seen_most_often_in_it() -> None:
    gap = gaps.Gap(begin=2.0, end=3.0, after="a", before="b")
    samples = [gaps.Sample(at=at, stack=(name,)) for at, name in ((1.9, "x"), (2.1, "y"), (2.2, "z"), (2.3, "z"), (3.1, "w"))]
    assert gaps.host_stack(gap, samples) == (("z",), 2, 3)
    assert gaps.host_stack(gap, [samples[0], samples[-1]]) == (("w",), 0, 0)
    assert gaps.host_stack(gap, samples[:1]) == ((), 0, 0)


def test_the_trace_is_put_on_the_hosts_clock_by_its_mark(tmp_path: Path) -> None:
    def event(name: str, begin: float, length: float, kind: str) -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": length}

    trace = [
        {"ph": "M", "name": "process_name"},
        event("at::cuda::spin_kernel(long)", 1_000_000, 10, "kernel"),
        event("matmul", 3_000_000, 1_000_000, "kernel"),
        event("Memcpy HtoD", 2_000_000, 1_500_000, "gpu_memcpy"),
        event("aten::mm", 2_000_000, 9_000_000, "cpu_op"),
        event("adam", 5_000_000, 1_000_000, "kernel"),
    ]
    samples = [gaps.Sample(at=103.5, stack=("streamed.py:1 wait",))]
    found = gaps.summary(trace, samples, marked_at=100.0, window=(101.0, 105.0), on_gpu=True)
    assert found["events"] == 2
    assert (found["busy"], found["copies"]) == (pytest.approx(0.5), pytest.approx(0.375))
    assert [(gap["milliseconds"], gap["after"], gap["before"]) for gap in found["gaps"]] == [
        (1000.0, "", "matmul"),
        (1000.0, "matmul", "adam"),
    ]
    assert (found["gaps"][1]["stack"], found["gaps"][1]["seen"]) == (["streamed.py:1 wait"], "1 of 1 samples")
    assert [gap["while"] for gap in found["gaps"]] == [[], ["streamed.py:1 wait"]]
    assert found["clock"] == "its mark"
    assert [(one["name"], one["milliseconds"]) for one in found["idle"]] == [("matmul", 1000.0), ("adam", 1000.0)]
    profiled.keep_trace(tmp_path / "kept", trace, samples, marked_at=100.0, window=(101.0, 105.0))
    kept = json.loads(gzip.decompress((tmp_path / "kept").read_bytes()))
    stacks = [gaps.Sample(at=at, stack=tuple(stack)) for at, stack in kept["samples"]]
    again = gaps.summary(kept["traceEvents"], stacks, marked_at=kept["marked_at"], window=tuple(kept["window"]), on_gpu=True)
    assert (again, kept["offset"]) == (found, 99.0)
    without = gaps.summary(trace[2:], samples, marked_at=100.0, window=(100.0, 104.0), on_gpu=True)
    assert (without["busy"], without["clock"]) == (found["busy"], "its first event, as it has no mark")
    with pytest.raises(ValueError, match="no event"):
        gaps.summary(trace[:1], samples, marked_at=100.0, window=(101.0, 105.0), on_gpu=True)


# ---- packs -----------------------------------------------------------------------------------------------------------

PROJECT = {
    "dependencies": ["torch>=2.10", "transformers>=5", "pyarrow", "typer>=0.26,<1", "rich", "cffi", "numpy"],
    "optional-dependencies": {"test": ["pytest", "ruff", "hypothesis"]},
}


def test_packed_is_what_torch_and_transformers_do_not_bring_or_what_we_ask_a_version_of() -> None:
    requires = {"torch": ["filelock"], "transformers": ["numpy>=2", "typer", "Hugging_Face.hub"], "typer": ["rich>=10"]}
    given = pack.closure(pack.GIVEN, lambda name: requires.get(name, []))
    assert given == {"torch", "transformers", "filelock", "numpy", "typer", "hugging-face-hub", "rich"}
    assert pack.wanted(PROJECT, given) == ["typer>=0.26,<1", "cffi", "pytest", "hypothesis"]


def _wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n\n")
    return path


def test_what_a_pack_lacks_is_named(tmp_path: Path) -> None:
    wheels = [
        _wheel(tmp_path, "typer", "0.29.0", "rich>=10", 'old; python_version < "3.12"', 'more; extra == "all"'),
        _wheel(tmp_path, "cffi", "1.0", "pycparser>=2"),
        _wheel(tmp_path, "pycparser", "1.5"),
    ]
    assert pack.missing(wheels, ["typer>=0.26", "cffi"], {"rich"}, "3.12") == ["pycparser>=2 (for cffi; packed is 1.5)"]
    assert pack.missing(wheels, ["typer>=0.30"], set(), "3.12") == ["typer>=0.30 (for fuyou; packed is 0.29.0)"]
    assert pack.missing(wheels, ["typer"], set(), "3.11") == [
        'old; python_version < "3.12" (for typer)',
        "rich>=10 (for typer)",
    ]


def test_wheels_for_another_machine_or_of_other_sources_are_refused(tmp_path: Path) -> None:
    def install(**label: str) -> None:
        (tmp_path / pack.LABEL).write_text(json.dumps(label))
        pack.install(tmp_path, tmp_path / "venv")

    with pytest.raises(pack.UsageError, match="was not filled by"):
        pack.install(tmp_path, tmp_path / "venv")
    here = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", "machine": pack.platform.machine()}
    with pytest.raises(pack.UsageError, match=r"packed for Python 3\.9 on"):
        install(**(here | {"python": "3.9"}))
    with pytest.raises(pack.UsageError, match="other C sources"):
        install(**here, sources="0")
    assert not (tmp_path / "venv").exists()


def test_a_folder_with_files_of_others_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(pack.UsageError, match="has other files in it"):
        pack.pack(tmp_path, "3.12")
    assert (tmp_path / "thesis.txt").exists()
