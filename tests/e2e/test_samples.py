"""Tests what a model writes after fixed prompts while it trains: transformers' greedy text, beside training that does not
notice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fuyou_cli.advice.facts import facts_of, room_of, with_evaluation
from fuyou_cli.core.errors import Interrupted, UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.adapting import configuration
from fuyou_cli.training.prepare import inspect, resolve
from fuyou_cli.training.report import SampleReport
from fuyou_cli.training.run import Run
from fuyou_cli.training.state.at_rest import saved_store
from fuyou_cli.training.state.kept_companions import keep_companions

from .conftest import CommandIn, NewProject, Project, WholeOf
from .running import STEPS, exported, loaded_run, prepared_run, run_of, silent, train
from .test_generate import in_memory, with_settings

PROMPTS = ["The road", "The road from the mill to the tower takes", "From"]
EXACT = {"train.max_steps": STEPS, "precision.compute": "float32"}
SAMPLED = {**EXACT, "eval": {"every_steps": 3, "samples": {"prompts": PROMPTS, "max_new_tokens": 6}}}


def sampled(project: Project) -> tuple[list[float], list[SampleReport]]:
    found: list[Any] = []
    with loaded_run(project) as run:
        run.train(lambda report: None, found.append)
        return run.losses, found


@pytest.mark.usefixtures("untuned", "worker")
def test_beside_training(new_project: NewProject, whole: WholeOf, command: CommandIn) -> None:
    """Writes at the start, between steps and at the end: in the log, on the terminal and in the report."""
    project = new_project(changes=SAMPLED)
    fuyou = command(project)
    code, _, err = fuyou("finetune", "recipe.yaml")
    assert code == 0, err
    assert list(project.losses().values()) == whole(EXACT).losses
    records = [json.loads(line) for line in (project.out / "log.jsonl").read_text().splitlines()]
    found = [record for record in records if record["event"] == "sample"]
    assert [(one["step"], one["prompt"]) for one in found] == [(step, prompt) for step in (0, 3, 6) for prompt in PROMPTS]
    for begin, model in ((0, project.materials / "model"), (6, project.out / "model")):
        assert [one["text"] for one in found[begin : begin + 3]] == in_memory(model, PROMPTS, 6)
    assert f"sample at step 3  {PROMPTS[1]}\n" in err and "samples" in err
    code, out, _ = fuyou("report", "out")
    assert code == 0 and f"\n  {PROMPTS[1]}\n    step 0" in out
    assert fuyou("report", "out", "--html", "page.html")[0] == 0
    assert f"<h3>{PROMPTS[1]}</h3>" in (project.folder / "page.html").read_text()


def test_the_plan_says_the_most_passes(new_project: NewProject, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the head has room for the logits of fewer rows than a batch has, too: here no gradient of it takes room."""
    frozen = {"model.name_or_path": str(llama), "adapter": {"r": 4}, "train.head_chunk_tokens": 1}
    changes = {**SAMPLED, **frozen, "train.max_steps": 3}
    ready, passes = prepared_run(new_project(changes=changes)), 0
    cost = with_evaluation(facts_of(ready.planned, room_of(ready.planned)), ready.planned, None).sampling
    with run_of(ready) as run:
        logits = run.executor.head.logits

        def counted(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal passes
            passes += 1
            return logits(hidden)

        monkeypatch.setattr(run.executor.head, "logits", counted)
        run.load(lambda count: None)
        run.train(lambda report: None)
    assert cost is not None and 2 * 6 < passes <= 2 * cost.passes == 2 * 6 * len(PROMPTS)


def test_stopped_and_asked_for_other_prompts(new_project: NewProject, whole: WholeOf) -> None:
    """Writes anew when a run is stopped while it writes; what it writes after may change, and its losses may not."""
    project, seen = new_project(changes=SAMPLED), list[int]()

    def stop(run: Run) -> None:
        if run.stopping.doing == "evaluating" and run.step == 3 and not seen:
            seen.append(run.step)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match=f"stopped after step 3 of {STEPS}"):
        train(project, stop)
    other = {"prompts": ["Another road"], "max_new_tokens": 3}
    project.write_recipe({**SAMPLED, "eval": {"every_steps": 3, "samples": other}})
    losses, found = sampled(project)
    assert losses == whole(EXACT).losses
    assert [(one.step, one.number, one.prompt) for one in found] == [(3, 1, "Another road"), (6, 1, "Another road")]


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": {"r": 4}},
        {"dataset.packing": "isolated", "train.head_chunk_vocab": 128, "offload.device": "emulated"},
        pytest.param({"train.batch_size": 2, "train.micro_batch_size": 1}, marks=pytest.mark.slow),  # prompts in two groups
    ],
    ids=str,
)
def test_other_runs(changes: dict[str, Any], new_project: NewProject, llama: Path, tmp_path: Path) -> None:
    asked = {"model.name_or_path": str(llama), **changes}
    project, plain = new_project(changes={**SAMPLED, **asked}), new_project("plain", {**EXACT, **asked})
    losses, found = sampled(project)
    expected, store = train(plain)
    assert losses == expected
    model = tmp_path / "model"
    if "adapter" in changes:
        from fuyou_cli.training.exporting import export_store

        made = prepared_run(plain).planned
        adapter = configuration(made.recipe, made.anatomy.model, made.model_dir)
        keep_companions(store, made.recipe.tokenizer, model_dir=llama, tokenizer_dir=llama, adapter=adapter)
        export_store(saved_store(store), model, dtype="float32", max_shard_size=1 << 30, merged=True)
    else:
        exported(store, model)
    assert [one.text for one in found[:3]] == in_memory(llama, PROMPTS, 6)
    assert [one.text for one in found[-3:]] == in_memory(model, PROMPTS, 6)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ({"prompts": ["word " * 40]}, "prompt 1 has .* tokens, and 6 follow"),
        ({"prompts": ["The road", ""]}, "prompts"),
        ({"prompts": ["The road"], "chat": True}, r"eval\.samples\.chat: .* has no chat template"),
    ],
)
def test_prompts_that_cannot_be_continued(samples: dict[str, Any], says: str, new_project: NewProject) -> None:
    """They are refused before any data is read."""
    project = new_project(changes={**EXACT, "eval": {"samples": {"max_new_tokens": 6, **samples}}})
    with pytest.raises(UsageError, match=says):
        inspect(resolve(load_recipe(project.recipe).recipe, say=silent), say=silent)


def test_settings_of_the_model(new_project: NewProject, materials: Path, tmp_path: Path) -> None:
    """Follows stop strings from the first sample on, and names the file of settings that transformers refuses."""
    begun = in_memory(materials / "model", PROMPTS[:1], 6)[0]
    folder = with_settings(materials, tmp_path / "model", {"stop_strings": begun[3:6]})
    asked = {**SAMPLED, "model.name_or_path": str(folder)}
    _, found = sampled(new_project(changes=asked))
    assert found[0].text == in_memory(folder, PROMPTS[:1], 6)[0] != begun and found[0].ended == "end"
    (folder / "generation_config.json").write_text(json.dumps({"bad_words_ids": [[-1]]}))
    with pytest.raises(UsageError, match=r"generation_config\.json: bad_words_ids cannot be used: "):
        inspect(resolve(load_recipe(new_project("other", asked).recipe).recipe, say=silent), say=silent)


def test_a_plan_says_that_a_run_would_refuse_its_prompts(new_project: NewProject, command: CommandIn) -> None:
    asked = {"prompts": ["The road"], "max_new_tokens": 6, "chat": True}
    project = new_project(changes={**EXACT, "eval": {"samples": asked}})
    code, out, err = command(project)("plan", "recipe.yaml")
    assert code == 0, err
    shown = " ".join(out.split())
    assert "eval.samples.chat: the tokenizer in" in shown and "eval.samples.chat=false, or tokenizer.chat_template" in shown
