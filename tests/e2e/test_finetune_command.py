"""Tests `fuyou finetune`, interrupted by a real signal and run again, beside a run nobody interrupted; export and plan."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import quick_and_slow

from .conftest import NewProject, Project, ended

STEPS = 16
LONG = {"train.max_steps": STEPS}


@pytest.mark.slow
def test_interrupted_twice_is_the_same_run(new_project: NewProject) -> None:
    whole, broken = new_project("whole", LONG), new_project("broken", LONG)
    whole.done("finetune", whole.recipe)
    done = 0
    for step in (3, 9):
        stopped = broken.fuyou_doing(f"os.kill(os.getpid(), {signal.SIGINT:d})", step, "finetune", broken.recipe)
        assert stopped.returncode == 130, stopped.stderr
        assert f"of {STEPS}" in stopped.stderr
        assert "is saved in" in stopped.stderr
        assert "the same command continues from there" in stopped.stderr
        assert not (broken.out / "model").exists()
        assert sorted(broken.losses()) == [*range(1, step + 1)]
        done = step
    resumed = broken.done("finetune", broken.recipe)
    assert f"resuming after step {done}" in resumed.stderr
    assert broken.losses() == whole.losses()
    assert len(whole.losses()) == STEPS
    ours, theirs = broken.exported(), whole.exported()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert whole.losses()[STEPS] < whole.losses()[1] - 0.5
    _exports_again(whole, theirs)


def _exports_again(project: Project, expected: dict[str, Any]) -> None:
    """Checks that `fuyou export` gives what the end of the run gave, and from_pretrained takes it."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = project.folder / "again"
    project.done("export", project.recipe, target)
    again = {name: value for file in target.glob("*.safetensors") for name, value in load_file(file).items()}
    assert all(torch.equal(again[name], expected[name]) for name in expected) and again.keys() == expected.keys()
    model, problems = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(problems.values()), problems
    assert model.lm_head.weight is model.transformer.wte.weight
    assert AutoTokenizer.from_pretrained(target).eos_token == "<|end|>"


def test_plan_shows_and_writes_nothing_of_a_run(new_project: NewProject) -> None:
    project = new_project()
    shown = project.done("plan", project.recipe, "--json", "--dry-run")
    plan = json.loads(shown.stdout)
    assert plan["fits"] is True and plan["model"]["architecture"] == "GPT2LMHeadModel"
    assert {stage["weights"] for stage in plan["plan"]["stages"]} == {"ssd"}
    assert sorted(path.name for path in project.folder.iterdir()) == ["cache", "recipe.yaml"]  # the user's own cache


def test_a_run_that_does_not_fit_says_what_would(new_project: NewProject) -> None:
    project = new_project(changes={"offload.max_memory.cpu": "64MiB"})
    refused = project.fuyou("plan", project.recipe, "--dry-run")
    assert refused.returncode == 3, refused.stderr
    assert "does not fit" in refused.stdout and re.search(r"offload\.max_memory\.cpu=\d+MiB", refused.stdout)
    run = project.fuyou("finetune", project.recipe, "train.batch_size=8")
    said = " ".join(run.stderr.split())
    assert run.returncode == 3 and "the run needs at least" in said
    assert f"`fuyou plan {project.recipe} train.batch_size=8` finds the smallest changes that help" in said
    as_json = project.fuyou("plan", project.recipe, "--dry-run", "--json")
    data = json.loads(as_json.stdout)
    assert (as_json.returncode, data["fits"]) == (3, False) and "more than its budget" in data["problems"][0]
    assert data["plan"]["predicted"]["cpu_peaks"]["train"] > data["plan"]["cpu_budget"] == 64 << 20
    (least,) = (key for change in data["changes"] for key in change["overrides"] if key.endswith("MiB"))
    project.done("plan", project.recipe, "--dry-run", least)
    assert not Path(project.out).exists()


def test_a_plan_that_is_too_large_is_shown_and_exits_3(new_project: NewProject) -> None:
    project = new_project(changes={"offload.max_memory.ssd": "1MB"})
    refused = project.fuyou("finetune", project.recipe, "--dry-run")
    assert refused.returncode == 3, refused.stderr
    assert "Placement" in refused.stdout and "does not fit" in refused.stdout
    assert "offload.max_memory.ssd allows 1 MB" in refused.stdout
    emulated = ("offload.max_memory.ssd=auto", "offload.device=emulated", "offload.max_memory.gpu=64KiB")
    gpu = project.fuyou("plan", project.recipe, "--dry-run", *emulated)
    assert gpu.returncode == 3 and "offload.max_memory.gpu leaves" in " ".join(gpu.stdout.split())
    assert not Path(project.out).exists()
    assert project.fuyou("finetune", project.recipe).returncode == 3
    assert not (project.out / "store").exists()


def test_a_store_on_a_disk_it_fills_is_resumed(new_project: NewProject) -> None:
    """The store itself is no longer free space: only what is still to be written has to be free."""
    constant = {"lr_scheduler": {"name": "constant", "warmup_steps": 0}, "export.at_end": False}
    project = new_project(changes=constant)
    project.done("finetune", project.recipe, "train.max_steps=2")
    (store,) = (project.out / "store").glob("*/store.bin")
    size = store.stat().st_size
    resumed = project.fuyou_with_free(size // 3, "finetune", project.recipe, "train.max_steps=3")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step 2" in resumed.stderr and sorted(project.losses()) == [1, 2, 3]
    folders = f"offload.dir=[{project.folder}/a,{project.folder}/b]"  # either half would fit, both do not
    refused = project.fuyou_with_free(2 * size // 3, "plan", project.recipe, folders, "--dry-run")
    assert refused.returncode == 3, refused.stderr
    assert "the store needs" in refused.stdout and not (project.folder / "a").exists()


def test_the_loggers_a_recipe_names_are_the_ones_that_write(new_project: NewProject) -> None:
    project = new_project(changes={"train.max_steps": 2, "export.at_end": False, "checkpoint.resume": "never"})
    quiet = project.fuyou("finetune", project.recipe, "logging.backends=[jsonl]")
    assert quiet.returncode == 0 and sorted(project.losses()) == [1, 2]
    assert "step 1/2" not in quiet.stderr
    before = (project.out / "log.jsonl").read_bytes()
    shown = project.fuyou("finetune", project.recipe, "logging.backends=[console]")
    assert shown.returncode == 0 and "step 1/2" in shown.stderr
    assert (project.out / "log.jsonl").read_bytes() == before


def test_a_finished_run_again_and_its_store_cleaned(new_project: NewProject) -> None:
    project = new_project(changes={"train.max_steps": 2, "export.at_end": False})
    project.done("finetune", project.recipe)
    (store,) = (project.out / "store").glob("*/store.bin")
    drawing = (project.out / "timeline.svg").read_bytes()
    idle = project.fuyou("finetune", project.recipe)  # a finished run measures nothing, and draws nothing over
    assert idle.returncode == 0 and "the run is already finished: all 2 steps" in idle.stderr
    assert "-100" not in idle.stderr and (project.out / "timeline.svg").read_bytes() == drawing
    _exported_as_asked(project, store.parent)
    done = project.done("clean", project.out / "store", "--yes")
    assert str(store) in done.stdout and "removed" in done.stdout
    assert [path for path in store.parent.rglob("*") if path.is_file()] == []
    again = project.fuyou("finetune", project.recipe)  # nothing of the old run is left to go on from
    assert again.returncode == 0 and "resuming" not in again.stderr


def _exported_as_asked(project: Project, store: Path) -> None:
    """Checks --dtype, else the recipe's, else what the run computed in (bfloat16)."""
    for number, (arguments, dtype) in enumerate(
        [
            ((store,), "bfloat16"),
            ((store, "--dtype", "float32"), "float32"),
            ((project.recipe, "export.dtype=bfloat16"), "bfloat16"),
        ]
    ):
        target = project.folder / f"exported{number}"
        done = project.done("export", arguments[0], target, *arguments[1:])
        assert f"bytes of {dtype} weights" in done.stdout
        assert json.loads((target / "config.json").read_text())["dtype"] == dtype
    refused = project.fuyou("export", store, project.folder / "none", "seed=3")
    assert refused.returncode == 2 and "is not a recipe" in refused.stderr


@pytest.mark.parametrize("closed", [*(pytest.param(one, marks=pytest.mark.slow) for one in ([1], [2])), [0, 1, 2]], ids=str)
def test_a_run_with_closed_streams_goes_to_its_end(closed: list[int], new_project: NewProject) -> None:
    """As with `>&-`: whatever is printed goes to no file of the run."""
    project, names = new_project(changes={"train.max_steps": 3}), ("stdin", "stdout", "stderr")
    first = "import os, sys\n" + "".join(f"os.close({number})\nsys.{names[number]} = None\n" for number in closed)
    done = ended(project.begin("finetune", project.recipe, first=first))
    assert done.returncode == 0, done
    assert len(project.losses()) == 3 and project.exported()


AS_ANOTHER = ("--reuid=64321", "--regid=64321", "--clear-groups", "--inh-caps=+dac_override", "--ambient-caps=+dac_override")


@pytest.mark.parametrize(("most", "threads"), quick_and_slow([(1, 1), (3, 2), (2, 1), (4, 1), (4, 2), (5, 2)], lambda n: n < 2))
def test_a_limit_on_processes_is_told(most: int, threads: int, new_project: NewProject) -> None:
    """Runs as a user who has no other process: root's are not limited. With two threads OpenBLAS is the first without one."""
    limited = ["setpriv", *AS_ANOTHER, "prlimit", f"--nproc={most}"]
    if os.geteuid() != 0 or shutil.which("setpriv") is None or subprocess.run([*limited, "true"], check=False).returncode != 0:
        pytest.skip("needs root, setpriv and prlimit")
    with tempfile.TemporaryDirectory() as place:
        project = Project(folder=Path(place), materials=new_project().materials)
        project.write_recipe({"train.max_steps": 3, "dataset.cache_dir": f"{place}/tokenised"})
        words = [*limited, *project.command("finetune", project.recipe)]
        environment = {**project.environment(), "HOME": place, "OMP_NUM_THREADS": str(threads)}
        for path in (project.folder, *project.folder.rglob("*")):
            os.chown(path, 64321, 64321, follow_symlinks=False)
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if most < 4 else done.returncode) and done.returncode in (0, 1), done
    assert "ended by signal" not in done.stderr, done.stderr
    assert "internal error" not in done.stderr and "Traceback" not in done.stderr
    assert done.returncode == 0 or "ulimit -u" in " ".join(done.stderr.split()), done.stderr


def test_a_limit_on_open_files_is_told(new_project: NewProject) -> None:
    """Whichever file is one too many, of ours or of a library."""
    project, codes = new_project(changes={"train.max_steps": 3}), set[int]()
    for most in (12, 14, 18):
        words = ["prlimit", f"--nofile={most}", *project.command("finetune", project.recipe, "checkpoint.resume=never")]
        done = subprocess.run(words, env=project.environment(), capture_output=True, text=True, check=False)
        codes.add(done.returncode)
        assert "internal error" not in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert done.returncode == 0 or "help: raise `ulimit -n`" in done.stderr, (most, done.stderr)
    assert codes != {0}


@pytest.mark.slow
def test_names_that_the_locale_does_not_have(new_project: NewProject) -> None:
    """Runs in a folder of this name where Python takes names for ASCII, and in one whose name is no text at all."""
    for name in ("ünï", os.fsdecode(b"l\xfcx")):
        project = new_project(name, {"train.max_steps": 3, "offload.dir": "störe", "output_dir": "out"})
        environment = {**project.environment(), "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        for words in (("finetune", "recipe.yaml"), ("report", "out"), ("verify", "störe")):
            done = subprocess.run(
                project.command(*words), cwd=project.folder, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
        assert len(project.losses()) == 3 and (project.folder / "störe").is_dir()
