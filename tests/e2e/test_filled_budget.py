"""Tests that a process whose plan fills its budget stays within what the plan predicts, sampled from outside as it runs."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fuyou_cli.core.units import MiB

from .conftest import NewProject, Project

SPARE = 128 * MiB  # that a budget lacks to hold everything
OFTEN = 0.004  # seconds between looks


@pytest.fixture
def project(new_project: NewProject, materials: Path, tmp_path: Path) -> Project:
    """Makes a small Llama of 32,000 words, tied to nothing: its head's logits are mapped, all else is in the heap. Two
    micro-batches of four rows, clipped. In bfloat16 where the processor has fast products for it: without them this takes ten
    minutes."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=256, intermediate_size=640, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(4)
    model = tmp_path / "wide"
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).write_bytes((materials / "model" / file).read_bytes())
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes((materials / "rows.jsonl").read_bytes() * 12)
    project = new_project(
        changes={
            "model.name_or_path": str(model),
            "precision.compute": "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32",
            "dataset.train": [{"path": str(rows), "format": "text"}],
            "dataset.packing": "concat",
            "dataset.max_seq_len": 512,
            "train.batch_size": 8,
            "train.micro_batch_size": 4,
            "train.max_steps": 2,
            "train.clip_grad_norm": 1.0,
        }
    )
    content = yaml.safe_load(project.recipe.read_text())
    for placed in ("weights", "optimizer_states", "gradients", "boundaries"):
        content["offload"][placed] = "auto"
    project.recipe.write_text(yaml.safe_dump(content))
    return project


def _peak_of_all_in_memory(project: Project) -> int:
    done = project.fuyou("plan", "--dry-run", "--json", project.recipe)
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["cpu_peak"])


def _sizes(process: subprocess.Popen[str]) -> Iterator[int]:
    """Samples anonymous bytes and those of page tables, as often as it goes."""
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            return
        yield 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "VmPTE:")))
        time.sleep(OFTEN)


def _started(project: Project, budget: int) -> dict[str, Any]:
    records = [json.loads(line) for line in (project.out / "log.jsonl").read_text().splitlines()]
    (start,) = (record for record in records if "predicted_cpu_peak" in record)
    assert 0.95 * budget < start["predicted_cpu_peak"] <= budget
    return start


@pytest.mark.slow
def test_a_run_that_fills_its_budget_stays_within_it(project: Project) -> None:
    budget = _peak_of_all_in_memory(project) - SPARE
    command = project.command("finetune", project.recipe, f"offload.max_memory.cpu={budget}")
    with (project.folder / "said").open("w") as said:
        process = subprocess.Popen(
            command, cwd=project.folder, env=project.environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            text=True,
        )  # fmt: skip
        sizes = list(_sizes(process))
    assert process.wait() == 0, (project.folder / "said").read_text()
    predicted = _started(project, budget)["predicted_cpu_peak"]
    print(f"{max(sizes) / MiB:.0f} of {predicted / MiB:.0f} MiB, {len(sizes)} looks")
    assert max(sizes) <= predicted
    assert max(sizes) > 0.85 * predicted
