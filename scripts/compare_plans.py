#!/usr/bin/env python3
"""Makes about 150 plans with the sources of a checkout, or compares two such records.

    python scripts/compare_plans.py --sources DIR --out FILE [--only WORD]
    python scripts/compare_plans.py BEFORE AFTER
    needs no GPU and no drives; a quarter of an hour for a record on two cores

Plans are made by a process of its own, with that checkout's sources: the machines are described, the models configurations. The
cases are those of plan_table with its `--others` and `--mixtures`, the paper's settings on the shipped parts, the shipped
recipes, budgets of RAM where a processor computes, and cards of 8, 12 and 80 GB, for all weights, LoRA and QLoRA.

Both sides are scored by one objective: a step's seconds, and what it writes as `offload.wear: spare` counts it. No plan may be
more than 0.3 % worse, and all together not worse.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

WORSE = 0.003  # of the objective, at most
WORTH = 0.05  # share of the step that writing twice as much has to save, as `planner/search` has it
LEAST_WRITTEN = 0.01  # of all weights and states: fewer bytes need no sparing
ADAPTER = {"r": 16, "lora_alpha": 32}
METHODS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "full": ({}, ()),
    "LoRA": ({"adapter": ADAPTER}, ()),
    "nf4 LoRA": ({"adapter": ADAPTER}, ("model.quantize=nf4",)),
}
UNCLIPPED = "train.clip_grad_norm=null"
SHIPPED_ON = {  # the machine that a recipe is made for
    "llama31-8b-qlora-6gb": ("rtx4090,gen4,64GiB", "offload.max_memory.gpu=5.7GiB"),
    "llama31-8b-lora-8gb": ("rtx4090,gen4,64GiB", "offload.max_memory.gpu=7.6GiB"),
    "llama33-70b-lora-24gb": ("rtx4090,1xgen4,64GiB",),
    "llama31-405b-qlora-24gb": ("rtx4090,gen4,64GiB",),
    "qwen3-14b-lora-12gb": ("rtx4090,1xgen4,64GiB", "offload.max_memory.gpu=11.4GiB"),
    "llama31-8b-full-24gb": ("rtx4090,2xgen4,128GiB",),
    "qwen3-14b-full-24gb": ("rtx4090,2xgen4,128GiB",),
    "qwen3-30b-a3b-lora-24gb": ("rtx4090,gen4,64GiB",),
    "qwen3-30b-a3b-lora-12gb": ("rtx4090,gen4,32GiB", "offload.max_memory.gpu=11.4GiB"),
    "gpt-oss-20b-lora-16gb": ("rtx4080,gen4,32GiB",),
    "gpt-oss-120b-lora-24gb": ("rtx4090,gen4,64GiB",),
    "qwen3-30b-a3b-full-24gb": ("rtx4090,2xgen4,64GiB",),
    "llama31-70b-full-24gb": ("rtx4090,4xgen4,256GiB",),
}


def case(
    name: str, machine: str, config: Mapping[str, Any], *, method: str = "full", settings: Sequence[str] = (),
    rows: int = 8, length: int = 4096, clipped: bool = True, **sections: Any,
) -> dict[str, Any]:  # fmt: skip
    """Describes a plan in plain values, so that any checkout can make it. `sections`: of its recipe."""
    more, overrides = METHODS[method]
    recipe = {"dataset": {"max_seq_len": length}, "train": {"max_steps": 1000, "batch_size": rows}, **more, **sections}
    settings = [*settings, *overrides, *([] if clipped else [UNCLIPPED])]
    return {"name": name, "machine": machine, "config": config, "recipe": recipe, "settings": settings}


def cases() -> Iterator[dict[str, Any]]:
    import yaml
    from plan_table import MODELS, known_config, mixtures, others
    from plan_table import cases as table

    from fuyou_cli.recipe.named import shipped_recipes, shipped_shapes

    for of_table in (*table(), *others(), *mixtures()):
        config, differences = MODELS[of_table.model]
        yield case(
            f"{of_table.words}, {of_table.rows} rows", f"{of_table.gpu},{of_table.drives},{of_table.ram}",
            (known_config(config) if config else {}) | differences, method=of_table.method, settings=of_table.overrides,
            rows=of_table.rows, length=of_table.length, clipped=of_table.clipped,
        )  # fmt: skip
    yield from of_paper()
    for name, (machine, *settings) in SHIPPED_ON.items():
        recipe = yaml.safe_load(shipped_recipes()[name].read_text(encoding="utf-8"))
        shapes = shipped_shapes(recipe["model"]["name_or_path"])
        yield case(f"recipe {name}", machine, shapes or {}, settings=settings) | {"recipe": recipe}
    small, llama = known_config("llama-3.2-1b"), known_config("llama-3.1-8b")
    for ram, clipped in product((6, 8, 12, 16, 24, 32), (True, False)):
        words = f"1B on a processor, {ram} GiB, {'clipped' if clipped else 'no clipping'}"
        yield case(words, f"gen4,{ram}GiB", small, length=1024, clipped=clipped)
    for ram in (16, 32):
        yield case(f"1B, LoRA on a processor, {ram} GiB", f"gen4,{ram}GiB", small, length=1024, method="LoRA")
    cards = {"8 GB": ("rtx4090", "7.6GiB"), "12 GB": ("rtx4090", "11.4GiB"), "80 GB": ("h100", "79GiB")}
    for (card, (gpu, memory)), method, clipped in product(cards.items(), METHODS, (True, False)):
        words = f"8B, {method}, {card}, {'clipped' if clipped else 'no clipping'}"
        settings = [f"offload.max_memory.gpu={memory}"]
        yield case(words, f"{gpu},gen4,64GiB", llama, method=method, settings=settings, clipped=clipped)
    large = known_config("llama-3.1-405b")
    for machine, clipped in product(("h100,12xp5510,512GiB,2xgold5320", "h100,8xgen4,512GiB"), (True, False)):
        words = f"405B, {machine}, {'clipped' if clipped else 'no clipping'}"
        yield case(words, machine, large, rows=32, length=1024, clipped=clipped)


def of_paper() -> Iterator[dict[str, Any]]:
    """Yields every published setting once, on the shipped parts, without clipping or commits as there."""
    from paper import given, policy

    settings = {(row.model, row.batch, row.drives): None for row in given.PUBLISHED}
    for model, batch, drives in settings:
        config = json.loads(policy.config_of(model).to_json_string())
        machine = f"rtx4090,{drives}xp5510,768GiB,2xgold5320"
        words = f"paper {model}, {batch} sequences, {drives} P5510"
        once = {"commit_every_steps": None}
        yield case(words, machine, config, rows=batch, length=given.LENGTH, clipped=False, checkpoint=once)
    for ram, batch, clipped in product((64, 128), (32, 128, 512), (True, False)):
        config = json.loads(policy.config_of("13B").to_json_string())
        words = f"paper 13B, {batch} sequences, 2 gen4, {ram} GiB, {'clipped' if clipped else 'no clipping'}"
        yield case(words, f"rtx4090,2xgen4,{ram}GiB", config, rows=batch, length=given.LENGTH, clipped=clipped)


# ---- in the process with a checkout's sources -----------------------------------------------------------------------------


def plan_case(described: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of the plan, or why there is none. Imports nothing of this script's checkout."""
    import yaml

    from fuyou_cli.core.errors import FuyouError
    from fuyou_cli.machine.described import described as machine_of
    from fuyou_cli.recipe.load import load_recipe

    try:
        from fuyou_cli.advice.planning import plan_recipe
    except ImportError:  # a checkout of before it
        from fuyou_cli.advice.planned import planned_elsewhere as plan_recipe  # type: ignore[import-not-found, no-redef]
    spent = _count_searches()
    with tempfile.TemporaryDirectory() as folder:
        recipe = {"version": 1, **described["recipe"], "output_dir": f"{folder}/out"}
        recipe["model"] = {**recipe.get("model", {}), "name_or_path": folder}
        recipe["dataset"] = {**recipe["dataset"], "train": [{"path": f"{folder}/none.jsonl"}]}
        path = Path(folder, "recipe.yaml")
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        Path(folder, "config.json").write_text(json.dumps(described["config"]), encoding="utf-8")
        hardware = machine_of(described["machine"])
        try:
            planned = plan_recipe(load_recipe(path, described["settings"]), hardware, say=lambda text: None)
        except FuyouError as error:
            return {"problem": error.message}
    if not planned.fits_ram or not planned.request.has_room_for(planned.plan, hardware):
        return {"problem": "RAM, the device or the drives have no room"}
    plan = planned.plan
    return {
        "seconds": plan.predicted.step_seconds,
        "written": plan.predicted.written_per_step,
        "stored": sum(stage.weight_bytes + stage.state_bytes for stage in planned.model.stages),
        "cpu_peak": plan.predicted.cpu_peak,
        "gpu_peak": plan.predicted.gpu_peak,
        "micro_batch": plan.numerics.micro_batch_size,
        "commit_every": plan.commit_every,
        "bottleneck": plan.predicted.bottleneck,
        "candidate": "" if planned.found is None else str(planned.found.best.candidate),
        "searches": len(spent),
        "search_seconds": sum(spent),
        "longest_search": max(spent, default=0.0),
    }


def _count_searches() -> list[float]:
    """Notes the processor's seconds of every search from now on."""
    from fuyou_cli.planner import search

    try:
        from fuyou_cli.planner import run_planner as caller  # a checkout that has it
    except ImportError:
        caller = search
    spent, search_timed = list[float](), search.search_timed

    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.process_time()
        try:
            return search_timed(*arguments, **named)
        finally:
            spent.append(time.process_time() - began)

    vars(caller)["search_timed"] = timed
    return spent


def make_plans(path: Path) -> None:
    """Plans the cases of a file of JSON lines, and prints a line of JSON for each."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for described, figures in zip(lines, pool.map(plan_case, lines), strict=True):
            print(json.dumps({"name": described["name"], **figures}), flush=True)


# ---- comparing ------------------------------------------------------------------------------------------------------------


def record(checkout: Path, out: Path, only: str) -> int:
    chosen = [described for described in cases() if only in described["name"]]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder, "cases.jsonl")
        described.write_text("".join(json.dumps(each) + "\n" for each in chosen), encoding="utf-8")
        command = [sys.executable, str(Path(__file__).resolve()), "--make", str(described)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
            assert process.stdout is not None
            for line in process.stdout:
                rows.append(row := json.loads(line))
                out.write_text(json.dumps({"plans": rows}, indent=0) + "\n", encoding="utf-8")
                print(f"{len(rows)}/{len(chosen)} {row['name']}: {row.get('seconds', row.get('problem'))}", flush=True)
    if process.returncode or len(rows) != len(chosen):
        print("error: the process that plans has ended early", file=sys.stderr)
        return 2
    return 0


def objective(plan: Mapping[str, Any], least_written: float) -> float:
    """Returns a step's seconds, longer by WORTH where it writes twice `least_written`, and by at most twice that."""
    excess = 1 - least_written / max(plan["written"], least_written)
    return float(plan["seconds"] * (1 + 2 * WORTH * excess))


def change(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """Returns by how much the objective is worse, as a share."""
    least = max(min(before["written"], after["written"]), LEAST_WRITTEN * before["stored"], 1)
    return objective(after, least) / objective(before, least) - 1


def compare(before: Path, after: Path) -> int:
    sides = [{row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["plans"]} for path in (before, after)]
    changes, failed = dict[str, float](), [f"{name}: in one record alone" for name in sorted(sides[0].keys() ^ sides[1].keys())]
    for name in sorted(sides[0].keys() & sides[1].keys()):
        old, new = sides[0][name], sides[1][name]
        if "problem" in old or "problem" in new:
            if "problem" in new and "problem" not in old:
                failed.append(f"{name}: no plan any more: {new['problem']}")
            continue
        changes[name] = change(old, new)
    for name, worse in sorted(changes.items(), key=lambda pair: pair[1]):
        old, new = sides[0][name], sides[1][name]
        if abs(worse) > WORSE / 3:
            print(
                f"{100 * worse:+7.2f} %  {name}: {old['seconds']:.3f} -> {new['seconds']:.3f} s, "
                f"{old['written'] / 1e9:.2f} -> {new['written'] / 1e9:.2f} GB, search {new['search_seconds']:.2f} s"
            )
        if worse > WORSE:
            failed.append(f"{name}: {100 * worse:.2f} % worse")
    if not changes:
        print("".join(f"FAIL {line}\n" for line in failed) + "the records have no plan in common")
        return 2
    total, both = sum(changes.values()), len(changes)
    longest = [max((side[name]["longest_search"], name) for name in changes) for side in sides]
    spent = [sum(side[name]["search_seconds"] for name in changes) for side in sides]
    print(f"{both} plans of both, in the mean {100 * total / both:+.3f} %; searches {spent[0]:.0f} -> {spent[1]:.0f} s")
    print(f"longest search {longest[0][0]:.2f} s ({longest[0][1]}) -> {longest[1][0]:.2f} s ({longest[1][1]})")
    for line in failed:
        print(f"FAIL {line}")
    return int(bool(failed) or total > 0)


def main(words: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("records", type=Path, nargs="*", help="two records to compare")
    options.add_argument("--sources", type=Path, help="whose sources plan; its C extension is built")
    options.add_argument("--out", type=Path, help="where the record goes")
    options.add_argument("--only", default="", help="cases with this in their names")
    options.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args(words)
    if given.make:
        make_plans(given.make)
        return 0
    if given.sources and given.out:
        return record(given.sources, given.out, given.only)
    if given.sources or len(given.records) != 2:
        options.error("name two records, or --sources and --out")
    return compare(*given.records)


if __name__ == "__main__":
    sys.exit(main())
