"""The model for lm-evaluation-harness beside its own `hf` in memory: the same log-likelihoods and the same text.

Skipped where the extra is not installed: `pip install -e ".[test,lm-eval]"`, then `pytest tests/e2e/test_lm_eval.py`.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fuyou_cli.cli.app import main
from fuyou_cli.core.errors import UsageError
from fuyou_cli.training.run_log import JsonlLog

from .conftest import PLACES, Project, WholeOf
from .test_generate import alone

pytest.importorskip("lm_eval", reason='needs pip install "fuyou[lm-eval]"')

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from fuyou_cli.inference.lm_eval_model import StreamedLM

LENGTH = 40  # tokens, so that some pairs are cut and some texts have several windows
TASK = """
task: places
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def models(materials: Path) -> tuple[StreamedLM, HFLM]:
    """Makes our model and theirs, with at most three rows at once."""
    folder, same = str(materials / "model"), {"dtype": "float32", "device": "cpu", "max_length": LENGTH}
    return StreamedLM(folder, memory="4GiB", max_batch_size=3, **same), HFLM(folder, batch_size=3, **same)


def test_an_output_folder_whose_store_lies_elsewhere(whole: WholeOf, tmp_path: Path) -> None:
    store = whole({"precision.compute": "float32"}).store
    with JsonlLog(tmp_path / "log.jsonl") as log:
        log.write("plan", {"store": str(store)})
    one, other = (StreamedLM(str(folder), memory="4GiB", dtype="float32", device="cpu") for folder in (tmp_path, store))
    asked = [Instance(request_type="loglikelihood", doc={}, arguments=("The road", " to the mill"), idx=0)]
    assert one.loglikelihood(asked, disable_tqdm=True) == other.loglikelihood(asked, disable_tqdm=True)


def answers(models: tuple[StreamedLM, HFLM], kind: str, arguments: list[Any]) -> list[list[Any]]:
    asked = [Instance(request_type=kind, doc={}, arguments=one, idx=number) for number, one in enumerate(arguments)]
    return [getattr(model, kind)(asked, disable_tqdm=True) for model in models]


def test_likelihoods_are_those_of_hf(models: tuple[StreamedLM, HFLM]) -> None:
    pairs = [(f"The road from the {place}", f" to the {place} is {'long ' * n}") for n, place in enumerate(PLACES)]
    pairs += [("", "The mill"), ("minutes on foot. " * 12, " and back"), ("Ends in a space ", "tower")]
    favourite = models[1].tok_decode(
        [models[1].model(models[1].tokenizer("The", return_tensors="pt").input_ids).logits[0, -1].argmax()]
    )
    ours, theirs = answers(models, "loglikelihood", [*pairs, ("The", favourite)])
    assert [likeliest for _, likeliest in ours] == [likeliest for _, likeliest in theirs] and theirs[-1][1]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], rel=1e-6)
    ours, theirs = answers(models, "loglikelihood_rolling", [(" ".join(PLACES) * n,) for n in (1, 4, 2)])
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_text_is_that_of_hf(models: tuple[StreamedLM, HFLM]) -> None:
    asked = [(f"The road from the {place}", {"until": ["mill"], "max_gen_toks": 12}) for place in PLACES]
    ours, theirs = answers(
        models, "generate_until", [*asked, ("To", {"max_gen_toks": 5}), ("foot. " * 30, {"max_gen_toks": 7})]
    )
    assert ours == theirs and any(ours)


def test_positions_of_each_texts_own_length(longrope: Path) -> None:
    model = StreamedLM(str(longrope), memory="4GiB", dtype="float32", device="cpu")
    prompts = ["The", "The road from the mill", "The road from the", "mill tower " * 5, "The road from the mill takes " * 3]
    expected, _ = alone(longrope, prompts, 6)
    asked = [(prompt, {"until": ["\n\n"], "max_gen_toks": 6}) for prompt in prompts]
    instances = [Instance(request_type="generate_until", doc={}, arguments=one, idx=n) for n, one in enumerate(asked)]
    assert model.generate_until(instances, disable_tqdm=True) == expected


def test_what_cannot_be_is_said(models: tuple[StreamedLM, HFLM], materials: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="peft is not known"):
        StreamedLM(str(materials / "model"), peft="adapter")
    with pytest.raises(UsageError, match="names no model"):
        StreamedLM.create_from_arg_string("memory=8GiB")
    log = logging.getLogger(HFLM.__module__)
    level = log.level
    shutil.copy(materials / "model" / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(json.JSONDecodeError):
        StreamedLM(str(tmp_path))
    assert log.level == level
    with pytest.raises(UsageError, match="40 positions"):
        answers(models[:1], "generate_until", [("The", {"max_gen_toks": 40})])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="40 positions"):
        answers(models[:1], "loglikelihood", [("The", " mill" * 99)])  # type: ignore[arg-type]


def test_code_of_a_tokenizer_is_refused_whatever_the_harness_is_told(llama: Path, tmp_path: Path) -> None:
    model = shutil.copytree(llama, tmp_path / "own")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "own.py").write_text("raise SystemExit('own code was run')\nclass Own: pass\n")
    with pytest.raises(UsageError, match=r"own\.Own\), and code of a tokenizer is never run"):
        StreamedLM(str(model), trust_remote_code=True, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_what_the_harness_asks_for_is_the_cpu(models: tuple[StreamedLM, HFLM], materials: Path) -> None:
    """It asks for cuda:0 where nobody names a device, and its own model takes the CPU then."""
    folder, pair = str(materials / "model"), ("The road", " to the mill")
    asked = Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0)
    ((wanted, _),) = models[1].loglikelihood([asked], disable_tqdm=True)
    for device in (None, "cuda:0", "auto"):
        ((found, _),) = StreamedLM(folder, dtype="float32", device=device).loglikelihood([asked], disable_tqdm=True)
        assert found == pytest.approx(wanted, rel=1e-6)
    for device, why in (("cuda", "no GPU that torch can use"), ("cuda:1", "cannot compute on cuda:1"), ("mps", "on mps")):
        with pytest.raises(UsageError, match=why):
            StreamedLM(folder, dtype="float32", device=device)


@pytest.mark.slow  # the harness alone takes several seconds to start
def test_the_readmes_command_runs_a_task_of_a_file(new_project: Any, tmp_path: Path) -> None:
    project: Project = new_project()
    rows = [{"question": f"From the {place}", "choices": ["to the mill", "back"], "answer": 0} for place in PLACES]
    (project.folder / "rows.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project.folder / "places.yaml").write_text(TASK.replace("FILE", str(project.folder / "rows.json")))
    ran = project.fuyou(
        "lm-eval", "--model_args", f"pretrained={project.materials / 'model'}", "--tasks", "places",
        "--include_path", project.folder, "--output_path", project.folder / "found.json",
    )  # fmt: skip
    assert ran.returncode == 0 and "|places|" in ran.stdout, ran.stderr
    (written,) = project.folder.glob("found*.json")
    found = json.loads(written.read_text())
    assert found["config"]["model"] == "fuyou" and 0 <= found["results"]["places"]["acc,none"] <= 1


def test_a_task_that_there_is_not_is_a_mistake_of_the_command(materials: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lm-eval", "--model_args", f"pretrained={materials / 'model'},memory=4GiB", "--tasks", "nosuch"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "lm-evaluation-harness: Tasks not found: nosuch" in said, said
