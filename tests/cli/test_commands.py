"""The command line as seen from outside: speed, streams, exit codes, finding recipes, misuse."""

from __future__ import annotations

import errno
import json
import resource
import signal
import socket
import subprocess
import sys

import pytest
import torch
import yaml

from fuyou_cli.cli.app import app
from fuyou_cli.core import errors

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


def test_help_imports_nothing_heavy():
    """Of any command; nor does the version."""
    code = (
        "import sys\nfrom fuyou_cli.cli.app import main\n"
        "for words in (['--help'], ['finetune', '--help'], ['recipes', '--help'], ['--version']):\n"
        "    try:\n        main(words)\n    except SystemExit as end:\n"
        f"        print(end.code, sorted(set(sys.modules) & set({HEAVY})), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["0 []"] * 4 and done.stdout


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
    ("words", "instead"),
    [
        (["plan", "recipe.yaml", "-o", "plan.json"], "fuyou plan RECIPE --json"),
        (["plan", "recipe.yaml", "--out=plan.json"], "fuyou plan RECIPE --json"),
        (["plan", "recipe.yaml", "--compare"], "optimizer.state_dtype=int8"),
        (["plan", "recipe.yaml", "--calibrated"], "`fuyou bench` measures"),
        (["finetune", "recipe.yaml", "--calibrated"], "`fuyou bench` measures"),
        (["finetune", "recipe.yaml", "--plan", "plan.json"], "a run plans by itself"),
    ],
)
def test_a_removed_option_says_what_to_do_instead(fuyou, recipe, words, instead):
    done = fuyou(*words)
    assert (done.returncode, done.stdout) == (2, "") and "was removed" in done.stderr and instead in done.stderr
    assert "No such option" not in done.stderr and len(done.stderr.splitlines()) == 2


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


def test_the_device_of_tests_is_unknown_to_the_command(fuyou, recipe):
    """`tests/emulated.py` registers it in its own process alone, and this is another."""
    done = fuyou("plan", recipe, "offload.device=emulated", NO_COLOR="1")
    assert done.returncode == 2 and "only fuyou's tests have such a device" in done.stderr, done.stderr


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


@pytest.fixture
def failing(fuyou, monkeypatch):
    """Runs a command that raises an error."""

    def run(error):
        def fault():
            raise error

        monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
        app.command()(fault)
        return fuyou("fault")

    return run


CPU, GPU = "lower offload.max_memory.cpu", "lower offload.max_memory.gpu"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (errors.FuyouError("it broke", hint="mend it"), 1, "it broke\n  help: mend it"),
        (errors.UsageError("bad"), 2, "bad"),
        (errors.PlanError("too big"), 3, "too big"),
        (errors.OutOfSpaceError("full"), 4, "full"),
        (errors.Interrupted("saved"), 130, "saved"),
        (
            OSError(errno.EIO, "Input/output error", "/dev/x"),
            1,
            "Input/output error: /dev/x\n  help: the disk reported an error: look at `dmesg` and the drive's health",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            4,
            "No space left on device\n  help: free some space: `fuyou clean DIR` lists what old runs have left",
        ),
        (MemoryError(), 4, f"out of memory: no details\n  help: {CPU}; see `fuyou plan`"),
        (
            RuntimeError("[x] DefaultCPUAllocator: no memory"),
            4,
            f"out of memory: [x] DefaultCPUAllocator: no memory\n  help: {CPU}",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            4,
            f"out of memory: CUDA out of memory\n  help: {GPU}; see `fuyou plan`",
        ),
    ],
    ids=str,
)
def test_errors_become_exit_codes(failing, error, code, said):
    done = failing(error)
    assert (done.returncode, done.stdout) == (code, "") and done.stderr.startswith(f"error: {said}"), done.stderr
    assert failing(KeyboardInterrupt()).returncode == 130


@pytest.mark.parametrize("error", [RuntimeError("oops"), errors.UsageError("oops")], ids=str)
def test_tracebacks_only_when_asked_for(failing, error, monkeypatch):
    quiet = failing(error)
    monkeypatch.setenv("FUYOU_DEBUG", "1")
    loud = failing(error)
    assert quiet.returncode == loud.returncode != 0
    assert "Traceback" not in quiet.stderr and "oops" in quiet.stderr and "Traceback" in loud.stderr


def test_an_error_that_nobody_expects_is_told_in_short():
    """In a process of its own, whose hook it is."""
    code = "from fuyou_cli.cli.app import app, main\n@app.command()\ndef fault():\n    1 / 0\nmain(['fault'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "") and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: internal error: ZeroDivisionError: division by zero")


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
