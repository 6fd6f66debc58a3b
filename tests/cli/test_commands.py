"""The command line as seen from outside: speed, streams, exit codes, finding recipes, misuse."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys

import pytest
import yaml
from drawn import every

from .conftest import ROOT, environment

# typer needs pydantic itself
HEAVY = ("torch", "transformers", "datasets", "rich", "omegaconf", "numpy", "yaml")


def test_help_answers_at_once():
    """Counts CPU time, so that a busy machine does not decide; takes the best of a few, so that a cold disk does not either."""
    best = float("inf")
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "fuyou_cli", "--help"], env=environment(), capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert best < 0.3


@pytest.mark.parametrize("arguments", [["--help"], ["finetune", "--help"], ["recipes", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys\nfrom fuyou_cli.cli.app import main\n"
        "try:\n    main(sys.argv[1:])\n"
        f"except SystemExit as end:\n    print(end.code, sorted(set(sys.modules) & set({HEAVY})), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "0 []"
    assert done.stdout


def test_commands_are_all_there(fuyou):
    text = fuyou("--help").stdout
    for name in ("finetune", "plan", "bench", "validate", "doctor", "export", "clean", "recipes"):
        assert f"\n  {name} " in text
    assert "..." not in text.partition("Commands:")[2]  # no summary is cut
    for variable in ("FUYOU_OFFLOAD_DIR", "FUYOU_DEBUG", "HF_TOKEN", "HF_HOME", "NO_COLOR", "CUDA_VISIBLE_DEVICES"):
        assert variable in text


def test_a_command_of_an_extra_says_how_to_install_it():
    code = "import sys\nsys.modules['lm_eval'] = None\nfrom fuyou_cli.cli.app import main\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", code, "lm-eval", "--tasks", "hellaswag"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "lm-evaluation-harness cannot be used" in done.stderr and 'pip install "fuyou[lm-eval]"' in done.stderr


def test_scoring_choices_is_a_task_of_the_harness(fuyou, recipe):
    done = fuyou("eval", "model", recipe, "--choices", "questions.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert "eval --choices is gone" in done.stderr and "fuyou lm-eval --model_args" in done.stderr


def test_validate_says_ok_on_stdout(fuyou, recipe):
    done = fuyou("validate", recipe, "train.batch_size=8")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{recipe}: ok\n", "")


def test_options_may_follow_overrides(fuyou, recipe):
    done = fuyou("validate", recipe.name, "train.batch_size=8", "seed=3", "--show-config")
    config = yaml.safe_load(done.stdout)
    assert (config["train"]["batch_size"], config["seed"]) == (8, 3)
    assert done.returncode == 0


def test_the_recipe_may_be_left_out(fuyou, recipe):
    assert fuyou("validate").returncode == 0
    done = fuyou("validate", "seed=7", "--show-config")
    assert yaml.safe_load(done.stdout)["seed"] == 7


def test_recipe_errors_are_on_stderr_and_exit_2(fuyou, recipe):
    for command in ("validate", "plan", "finetune"):
        done = fuyou(command, recipe, "train.epoch=3", "sed=1")
        assert (done.returncode, done.stdout) == (2, "")
        assert "did you mean `train.epochs`?" in done.stderr
        assert "Found 2 errors" in done.stderr
        assert "Traceback" not in done.stderr


def test_recipe_errors_as_json(fuyou, recipe):
    recipe.write_text(recipe.read_text() + "sede: 3\n")
    done = fuyou("validate", recipe, "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 2
    assert (result["schema_version"], result["valid"]) == (1, False)
    assert [(error["line"], error["column"], error["key"]) for error in result["errors"]] == [(4, 1, "sede")]
    assert json.loads(fuyou("validate", recipe.name, "--json", "sede=null").stdout)["valid"] is False


def test_valid_json_carries_the_configuration(fuyou, recipe):
    result = json.loads(fuyou("validate", recipe, "--json").stdout)
    assert result["valid"] is True
    assert result["config"]["export"]["max_shard_size"] == "5GB"


def test_without_a_recipe_the_shipped_ones_are_listed(fuyou):
    for arguments in (["plan"], ["validate"], ["plan", "seed=3"]):
        done = fuyou(*arguments)
        assert done.returncode == 2
        assert "./recipe.yaml does not exist" in done.stderr
        assert "llama31-8b-full-24gb" in done.stderr


def test_a_shipped_recipe_goes_by_its_name(fuyou):
    assert fuyou("validate", "quickstart").returncode == 0
    assert fuyou("validate", "quickstart.yaml").returncode == 0
    done = fuyou("validate", "quikstart")
    assert done.returncode == 2
    assert "did you mean `quickstart`?" in done.stderr


def test_recipes_ls_show_cp(fuyou, tmp_path):
    assert "qwen3-14b-full-24gb" in fuyou("recipes", "ls").stdout
    names = [entry["name"] for entry in json.loads(fuyou("recipes", "ls", "--json").stdout)["recipes"]]
    assert "quickstart" in names
    shown = fuyou("recipes", "show", "quickstart").stdout
    assert shown == (ROOT / "recipes" / "quickstart.yaml").read_text()
    assert fuyou("recipes", "cp", "quickstart").returncode == 0
    assert (tmp_path / "recipe.yaml").read_text() == shown
    again = fuyou("recipes", "cp", "quickstart")
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert fuyou("recipes", "show", "nothing").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["finetun"], "Did you mean 'finetune'?"),
        (["finetune"], "RECIPE"),
        (["finetune", "recipe.yaml", "--train.epochs=2"], "no dashes: train.epochs=2"),
        (["plan", "recipe.yaml", "--train.epochs", "2"], "no dashes: train.epochs=value"),
        (["plan", "--nope"], "--nope"),
        (["export", "one"], "OUT"),
        (["clean", "nowhere"], "not a folder"),
    ],
)
def test_misuse_is_explained_and_exits_2(fuyou, recipe, arguments, said):
    done = fuyou(*arguments)
    assert done.returncode == 2
    assert said.lower() in done.stderr.lower()
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_no_arguments_show_help_and_exit_2(fuyou):
    done = fuyou()
    assert done.returncode == 2
    assert "Commands:" in done.stderr


def test_a_terminal_that_is_not_utf8(fuyou, tmp_path):
    path = tmp_path / "wide.yaml"
    path.write_text("日本: 1\n", encoding="utf-8")
    done = fuyou("validate", path, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 2
    assert "unknown key `??`" in done.stderr


def test_a_reader_that_leaves_early(tmp_path):
    command = f"{sys.executable} -m fuyou_cli recipes show quickstart | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_ctrl_c_exits_130_without_a_traceback(recipe):
    """Asks a hub that never answers, and waits until the signal comes."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(60)
        asked = environment(
            HF_ENDPOINT=f"http://127.0.0.1:{hub.getsockname()[1]}", HF_HUB_OFFLINE="0", HF_HOME=str(recipe.parent)
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "fuyou_cli", "plan", str(recipe), "model.name_or_path=some/model", "--dry-run"],
            env=asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with hub.accept()[0]:
            process.send_signal(signal.SIGINT)
            _, said = process.communicate()
    assert (process.returncode, said.splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in said


def _main_with(fault: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """The real entry point, with a command that raises `fault` added."""
    code = (
        "import sys, errno\nfrom fuyou_cli.cli.app import app, main\nfrom fuyou_cli.core import errors\n"
        f"@app.command()\ndef fault():\n    raise {fault}\n"
        "main(['fault'])"
    )
    return subprocess.run([sys.executable, "-c", code], env=environment(**changes), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("errors.FuyouError('it broke', hint='mend it')", 1, "error: it broke\n  help: mend it\n"),
        ("errors.UsageError('bad')", 2, "error: bad\n"),
        ("errors.PlanError('too big')", 3, "error: too big\n"),
        ("errors.OutOfSpaceError('full')", 4, "error: full\n"),
        ("errors.Interrupted('saved')", 130, "error: saved\n"),
        (
            "OSError(errno.EIO, 'Input/output error', '/dev/x')",
            1,
            "error: Input/output error: /dev/x\n  help: the disk reported an error: look at `dmesg` and the drive's health\n",
        ),
        ("KeyboardInterrupt", 130, "interrupted\n"),
    ],
)
def test_errors_become_exit_codes(fault, code, said):
    done = _main_with(fault)
    assert (done.returncode, done.stderr, done.stdout) == (code, said, "")


@pytest.mark.parametrize(
    ("fault", "remedy"),
    every(
        2,
        [
            ("OSError(errno.ENOSPC, 'No space left on device')", "free some space"),
            ("MemoryError", "lower offload.max_memory.cpu"),
            (  # torch's
                "RuntimeError('[enforce fail at alloc_cpu.cpp:1] data. DefaultCPUAllocator: can not allocate memory')",
                "lower offload.max_memory.cpu",
            ),
            ("__import__('torch').OutOfMemoryError('CUDA out of memory')", "lower offload.max_memory.gpu"),
        ],
    ),
)
def test_running_out_exits_4(fault, remedy):
    done = _main_with(fault)
    assert done.returncode == 4 and remedy in done.stderr and "micro_batch_size" not in done.stderr


@pytest.mark.parametrize("fault", ["ZeroDivisionError('oops')", "RuntimeError('oops')", "errors.UsageError('oops')"])
def test_tracebacks_only_when_asked_for(fault):
    quiet, loud = _main_with(fault), _main_with(fault, FUYOU_DEBUG="1")
    assert quiet.returncode == loud.returncode != 0
    assert "Traceback" not in quiet.stderr
    assert "oops" in quiet.stderr
    assert "Traceback" in loud.stderr


def test_doctor_goes_on_without_the_extension(tmp_path):
    code = (
        "import sys\nsys.modules['fuyou_cli._native'] = None\n"  # what an import of it meets when it was never built
        "from fuyou_cli.cli.app import main\nmain(['doctor'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "cannot be loaded" in next(line for line in done.stdout.splitlines() if "native extension" in line)
    assert "scripts/build-native" in done.stdout and "free space" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["plan", "finetune"])
def test_the_quickstarts_recipe_before_the_quickstart(fuyou, command):
    done = fuyou(command, "quickstart")
    assert (done.returncode, done.stdout) == (2, "")
    assert "run `fuyou quickstart` first" in done.stderr
