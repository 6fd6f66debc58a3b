#!/usr/bin/env python3
"""Trains, evaluates and generates with rows of unlike length: each command inside its budget, and time that follows the tokens.

    sudo python scripts/prove_unlike_rows.py --work DIR --data gsm8k/train.jsonl --model DIR/smollm2-135m
    a 135 M model: about an hour on two quiet cores; --only memory or --only time for a part
    a model larger than memory: --shape 1.1b --budget 1.5GiB --only memory (10 minutes without the training: --steps 0)
    to try the script itself: --shape 1m --budget 640MiB --steps 20 --rows 40 --pairs 1

Memory: rows of 3 to `--length` tokens, in a memory group of exactly the budget that fuyou is told; and what the daemon reads of
a parameter in a pass of eval. Time: the rows of `--data` as they are beside the same tokens packed (`packing: concat`), turn
about, and `fuyou eval` beside transformers row by row.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.both_sides import FUYOU, end_of, limited, started
from proof.setting import Setting, parser, run_script, size
from proof.verdicts import Row, at_most, holds, missing

from fuyou_cli.core.units import MiB, gib
from fuyou_cli.training.run_log import read_log

MOST_TIME, MOST_EVAL_TIME = 1.15, 1.10  # of packed rows, of transformers row by row
BYTES = 2.1  # that eval reads of a parameter in a pass, in bfloat16
LORA = ("adapter.r=16", "adapter.lora_alpha=32", "adapter.target_modules=all-linear")
WARM = 3  # steps that do not count
PROMPTS = 50
MODES: dict[str, tuple[str, ...]] = {
    "bfloat16": ("precision.compute=bfloat16",),
    "float32": ("precision.compute=float32",),
    "isolated, bfloat16": ("precision.compute=bfloat16", "dataset.packing=isolated"),
    "isolated, float32": ("precision.compute=float32", "dataset.packing=isolated"),
}


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, help="a model's folder (default: one of --shape)")
    options.add_argument("--budget", type=size, default=900 * MiB, help="of each command (900MiB)")
    options.add_argument("--steps", type=int, default=200, help="of each training (200)")
    options.add_argument("--rows", type=int, default=500, help="rows to evaluate (500)")
    options.add_argument("--length", type=int, default=512, help="tokens of a row at most (512)")
    options.add_argument("--pairs", type=int, default=2, help="runs of each side whose times are compared (2)")
    options.add_argument("--timed", type=int, default=12, help="steps of a run that is timed (12)")
    options.add_argument("--only", choices=["memory", "time"])
    return options.parse_args()


class Place:
    """Holds the model, and files of rows whose lengths are spread over all of a row."""

    def __init__(self, setting: Setting, options: argparse.Namespace) -> None:
        self.setting, self.options = setting, options
        self.model = options.model or setting.model()
        self.spread = self._rows("spread.jsonl", max(options.rows, 2 * options.steps))
        self.held = self._rows("held.jsonl", options.rows)

    def _rows(self, name: str, count: int) -> Path:
        """Writes texts of lengths from three tokens up, made of the words of the data."""
        from transformers import AutoTokenizer

        path, draw = self.setting.work / name, random.Random(name)
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        text = self.setting.text.read_text(encoding="utf-8")[: 1 << 21]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with path.open("w", encoding="utf-8") as file:
            for _ in range(count):
                length = draw.randint(3, self.options.length - 12)
                begin = draw.randrange(len(ids) - length)
                file.write(json.dumps({"text": tokenizer.decode(ids[begin : begin + length])}) + "\n")
        return path

    def recipe(self, name: str, *, entry: dict[str, Any], steps: int, batch: int) -> Path:
        folder = self.setting.work / name
        folder.mkdir(exist_ok=True)
        recipe = {
            "version": 1,
            "output_dir": str(folder / "out"),
            "model": {"name_or_path": str(self.model)},
            "dataset": {"train": [entry], "max_seq_len": self.options.length},
            "train": {"max_steps": steps, "batch_size": batch},
            "offload": {"device": "cpu", "dir": str(folder / "store"), "measure": False},
            "export": {"at_end": False},
            "checkpoint": {"resume": "never"},
        }
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
        return path

    def run(self, name: str, words: list[str], memory: int | None) -> dict[str, Any]:
        """Runs a command of fuyou, in a group of this size if one can be made."""
        output = self.setting.work / f"{name.replace(' ', '-')}.txt"
        with limited(self.setting.work, memory=memory, throttle=None) as (held, why):
            with output.open("wb") as file, started([*FUYOU, *words], held, file) as child:
                code = child.wait()
            kills = held.kills() if held is not None else 0
        told = output.read_text(encoding="utf-8", errors="replace")
        failed = f"exit code {code}:\n{end_of(output)}" if code else ""
        return {"killed": kills, "not_enforced_because": why if memory else "", "told": told, "failed": failed}


# ---- memory ----------------------------------------------------------------------------------------------------------


def inside(what: str, memory: int, result: dict[str, Any], done: str, ok: bool) -> Row:
    what, asked = f"{what} inside {gib(memory)}", "not killed, exit code 0"
    if why := result["not_enforced_because"]:
        return missing(what, asked, f"no limit could be set: {why}")
    whole = ok and not result["failed"] and not result["killed"]
    return holds(what, asked, f"{result['killed']} killed; {done}", whole, note=result["failed"])


def trained(place: Place, mode: str, keys: tuple[str, ...]) -> Row:
    options = place.options
    entry = {"path": str(place.spread), "format": "text"}
    recipe = place.recipe("trained", entry=entry, steps=options.steps, batch=2)
    words = ["finetune", str(recipe), *keys, *LORA, f"offload.max_memory.cpu={options.budget // MiB}MiB"]

    def once() -> dict[str, Any]:
        result = place.run(f"trained {mode}", words, options.budget)
        log = recipe.parent / "out" / "log.jsonl"
        records = read_log(log) if log.exists() and not result["failed"] else []
        steps = [record for record in records if record["event"] == "step"][-options.steps :]
        plan = next((record for record in reversed(records) if record["event"] == "plan"), {})
        peaks = [step["ram_peak"] for step in steps]
        return {**result, "steps": len(steps), "peaks": peaks, "planned": plan.get("predicted_cpu_peak", 0)}

    result = place.setting.measure(f"trained {mode}, {options.steps} steps in {options.budget}", once)
    peak = max(result["peaks"], default=0)
    done = f"peak {gib(peak)}, planned {gib(result['planned'])}, {result['steps']} steps"
    within = result["steps"] == options.steps and 0 < peak <= options.budget
    return inside(f"{options.steps} steps with LoRA, {mode}", options.budget, result, done, within)


def evaluated(place: Place, dtype: str) -> Iterator[Row]:
    options = place.options
    recipe = place.recipe("evaluated", entry={"path": str(place.spread), "format": "text"}, steps=1, batch=2)
    held = f"dataset.eval=[{{path: {place.held}, format: text}}]"
    words = ["eval", str(place.model), str(recipe), held, f"precision.compute={dtype}", "--json"]
    words += [f"offload.max_memory.cpu={options.budget // MiB}MiB"]
    name = f"eval {dtype} of {options.rows} rows in {options.budget}"
    result = place.setting.measure(name, lambda: place.run(f"eval {dtype}", words, options.budget))
    found = {} if result["failed"] else json.loads(result["told"][result["told"].index("{") :])
    peak = found.get("memory", {}).get("peak", 0)
    done = f"peak {gib(peak)}, {found.get('passes', 0)} passes"
    yield inside(f"fuyou eval of {options.rows} rows, {dtype}", options.budget, result, done, 0 < peak <= options.budget)
    if found and dtype == "bfloat16":
        each = found["read_bytes"] / found["parameters"] / found["passes"]
        yield at_most("bytes that eval reads, of a parameter and pass", each, BYTES, values={"eval": found})


def scored(place: Place) -> Row:
    """Runs lm-evaluation-harness on a task of as many rows."""
    options, folder = place.options, place.setting.work / "task"
    folder.mkdir(exist_ok=True)
    rows = [json.loads(line)["text"] for line in place.held.read_text(encoding="utf-8").splitlines()]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"q": text, "a": " yes"}) + "\n" for text in rows), encoding="utf-8")
    task = {
        "task": "unlike", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": [" yes", " no"],
        "doc_to_target": 0, "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (folder / "unlike.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    given = f"pretrained={place.model},memory={options.budget // MiB}MiB,dtype=bfloat16"
    words = ["lm-eval", "--model_args", given, "--tasks", "unlike", "--include_path", str(folder)]
    result = place.setting.measure(f"lm-eval in {options.budget}", lambda: place.run("lm-eval", words, options.budget))
    return inside(f"fuyou lm-eval, {len(rows)} questions", options.budget, result, "ended", "acc" in result["told"])


def written(place: Place) -> Row:
    options, prompts = place.options, place.setting.work / "prompts.jsonl"
    texts = [json.loads(line)["text"] for line in place.spread.read_text(encoding="utf-8").splitlines()[:PROMPTS]]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    words = ["generate", str(place.model), "--file", str(prompts), "--max-new-tokens", "16", "--batch-size", "4"]
    words += ["--memory", f"{options.budget // MiB}MiB"]
    result = place.setting.measure(f"generate in {options.budget}", lambda: place.run("generate", words, options.budget))
    lines = [line for line in result["told"].splitlines() if line.startswith("{")]
    what = f"fuyou generate, {PROMPTS} prompts"
    return inside(what, options.budget, result, f"{len(lines)} texts", len(lines) == PROMPTS)


# ---- time ------------------------------------------------------------------------------------------------------------


def timed(place: Place, method: str) -> Row:
    """Compares tokens per second of rows as they are with those of packed ones, turn about."""
    options = place.options
    recipe = place.recipe("timed", entry=place.setting.entry, steps=WARM + options.timed, batch=16)
    sides: dict[str, list[float]] = {"false": [], "concat": []}
    for pair in range(options.pairs):
        for packing, found in sides.items():
            # As many tokens a step on both sides, about: rows of GSM8K take 150 of 512.
            batch = 16 if packing == "false" else 5
            keys = [f"dataset.packing={packing}", f"train.batch_size={batch}", "offload.max_memory.cpu=6GiB"]
            keys += LORA if method == "LoRA" else []

            def once(keys: list[str] = keys) -> dict[str, Any]:
                result = place.run(f"timed {method}", ["finetune", str(recipe), *keys], None)
                log = recipe.parent / "out" / "log.jsonl"
                steps = [record for record in read_log(log) if record["event"] == "step"][-options.timed :]
                tokens, seconds = (sum(step[name] for step in steps) for name in ("batch_tokens", "seconds"))
                return {"failed": result["failed"], "rate": tokens / seconds}

            result = place.setting.measure(f"timed {method}, packing {packing}, pair {pair}", once)
            found.append(result["rate"])
    plain, packed = (statistics.median(found) for found in sides.values())
    note = "; ".join(f"packing {name}: {', '.join(f'{one:.0f}' for one in found)} tokens/s" for name, found in sides.items())
    return at_most(f"{method}: time of a token, rows as they are over packed", packed / plain, MOST_TIME, note=note)


def timed_evaluation(place: Place) -> Row:
    """Compares `fuyou eval` of some rows with transformers' own forward, one row after the other."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line)["text"] for line in place.held.read_text(encoding="utf-8").splitlines()[:40]]
    some = place.setting.work / "some.jsonl"
    some.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows), encoding="utf-8")
    recipe = place.recipe("timed-eval", entry={"path": str(some), "format": "text"}, steps=1, batch=2)
    words = ["eval", str(place.model), str(recipe), f"dataset.eval=[{{path: {some}, format: text}}]", "--json"]
    words += ["offload.max_memory.cpu=6GiB"]
    tokenizer = AutoTokenizer.from_pretrained(place.model)
    model = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.bfloat16).eval()

    @torch.no_grad()
    def theirs() -> float:
        begin = time.monotonic()
        for text in rows:
            ids = torch.tensor([tokenizer(text)["input_ids"][: place.options.length]])
            model(input_ids=ids, labels=ids, use_cache=False)
        return time.monotonic() - begin

    theirs()
    ours_seconds, their_seconds = [], []
    for _ in range(place.options.pairs):
        result = place.run("timed eval", words, None)
        found = json.loads(result["told"][result["told"].index("{") :])
        ours_seconds.append(found["sets"][0]["seconds"])
        their_seconds.append(theirs())
    ours, other = statistics.median(ours_seconds), statistics.median(their_seconds)
    note = f"fuyou {', '.join(f'{one:.2f}' for one in ours_seconds)} s, transformers "
    note += f"{', '.join(f'{one:.2f}' for one in their_seconds)} s, {len(rows)} rows, bfloat16"
    return at_most("fuyou eval over transformers row by row", ours / other, MOST_EVAL_TIME, note=note)


def prove(setting: Setting, options: argparse.Namespace) -> int:
    place, rows = Place(setting, options), list[Row]()
    if options.only != "time":
        rows += [trained(place, mode, keys) for mode, keys in MODES.items() if options.steps]
        rows += [row for dtype in ("bfloat16", "float32") for row in evaluated(place, dtype)]
        rows += [scored(place), written(place)]
    if options.only != "memory":
        rows += [timed(place, "LoRA"), timed(place, "full"), timed_evaluation(place)]
    named = {"model": place.model.name, "budget": options.budget, "steps": options.steps, "rows": options.rows}
    return setting.conclude("prove_unlike_rows", rows, {**setting.described(), **named})


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
