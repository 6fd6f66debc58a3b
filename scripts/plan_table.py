#!/usr/bin/env python3
"""Shows what plans promise on an RTX 4090: seconds of a step, tokens per second, TB written in 1,000 steps.

    python scripts/plan_table.py [--beside FILE] [--checkout DIR] [--results DIR]
    needs no GPU and no drives; a few minutes
    to try the script itself: --quick, one plan; --readme also writes the clipped ones into the README's table; --others instead

The plans are of 8B, 14B, 32B and 70B with 64 and 128 GiB of RAM, one and two gen4 drives, with and without clipping, 8 rows of
4,096 tokens a step, 1,000 steps, and defaults for the rest. Shapes are in tests/engine/configs; 32B is 14B with the differences
listed here. `--checkout` plans with the sources of another checkout whose C extension is built. `--beside` prints the figures
of an earlier result below each line. `--others` plans what other trainers have published of an RTX 4090: 512 rows of 1,024
tokens a step. Their figures were measured, ours are predicted. fuyou is exact: weights, what float32 masters add to them, and
float32 moments take 12 bytes per parameter, and gradients 4 more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

# Whose sources are imported below.
sys.path.insert(0, sys.argv[sys.argv.index("--checkout") + 1] if "--checkout" in sys.argv else str(Path(__file__).parents[1]))

from proof.on_paper import known_config, recipe_of
from proof.verdicts import FAIL, ROOT, Row, commit, conclude, holds, missing, plain_parser, reported, say, show_command

from fuyou_cli.advice.planned import planned_elsewhere
from fuyou_cli.cli.console import write_status
from fuyou_cli.core.errors import FuyouError
from fuyou_cli.machine.described import described as machine_of
from fuyou_cli.planner.place import too_small
from fuyou_cli.spec.plan import Plan

QWEN_32B = {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_hidden_layers": 64}
QWEN_32B |= {"num_key_value_heads": 8, "max_window_layers": 64}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "8B": ("llama-3.1-8b", {}),
    "14B": ("qwen3-14b", {}),
    "32B": ("qwen3-14b", QWEN_32B),
    "70B": ("llama-3.1-70b", {}),
    "7B": ("qwen2.5-7b", {}),
}
IN_TABLE = ("8B", "14B", "32B", "70B")
RAM, DRIVES = ("64GiB", "128GiB"), ("gen4", "2xgen4")
STEPS, ROWS, LENGTH = 1000, 8, 4096
# Tokens/s as published; bytes of weights, masters and moments per parameter. LLM.Q has all in bfloat16, rounded at random. ZeRO
# has masters and moments in float32 beside weights in bfloat16.
PUBLISHED = {
    "7B": {"LLM.Q, 6 bytes": 2777, "LLaMA-Factory, ZeRO-3 offload, 14 bytes": 2523},
    "14B": {"LLM.Q, 6 bytes": 1348, "LLaMA-Factory, ZeRO-3 offload, 14 bytes": 1135},
}
THEIR_ROWS, THEIR_LENGTH = 512, 1024
README_BEGIN, README_END = "<!-- plan table -->", "<!-- end of plan table -->"
MOST_OF_COMPUTE = 1.15  # 8B with 128 GiB, clipped as by default


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    model: str
    ram: str
    drives: str
    clipped: bool
    rows: int = ROWS
    length: int = LENGTH

    @property
    def words(self) -> str:
        return f"{self.model}, {self.ram}, {self.drives}, {'clipped' if self.clipped else 'no clipping'}"

    @property
    def has_bar(self) -> bool:
        return self.model == "8B" and self.ram == "128GiB" and self.clipped


def cases() -> Iterator[Case]:
    for model, ram, drives, clipped in product(IN_TABLE, RAM, DRIVES, (True, False)):
        yield Case(model=model, ram=ram, drives=drives, clipped=clipped)


def others() -> Iterator[Case]:
    for model, ram in product(PUBLISHED, ("64GiB", "128GiB", "256GiB")):
        yield Case(model=model, ram=ram, drives="2xgen4", clipped=True, rows=THEIR_ROWS, length=THEIR_LENGTH)


def figures_of(case: Case) -> dict[str, Any] | str:
    """Returns the figures of its plan, or why there is none."""
    name, differences = MODELS[case.model]
    overrides = [] if case.clipped else ["train.clip_grad_norm=null"]
    hardware = machine_of(f"rtx4090,{case.drives},{case.ram}")
    train = {"max_steps": STEPS, "batch_size": case.rows}
    with recipe_of(known_config(name) | differences, length=case.length, train=train, overrides=overrides) as loaded:
        try:
            planned = planned_elsewhere(loaded, hardware, say=write_status)
        except FuyouError as error:
            return error.message
    if not planned.fits_ram:
        return too_small(planned.model, hardware, planned.request).message
    if not planned.request.has_room_for(planned.plan, hardware):
        return "the device or the drives have no room for it"
    return figures(planned.plan, case.rows * case.length)


def figures(plan: Plan, tokens: int) -> dict[str, Any]:
    predicted, every = plan.predicted, plan.commit_every
    return {
        "step_seconds": predicted.step_seconds,
        "tokens_per_second": tokens / predicted.step_seconds,
        "written_per_step": predicted.written_per_step,
        "compute_seconds": predicted.seconds["compute"],
        "stalls": predicted.stalls,
        "commit_every": every,
        "commit_seconds": getattr(predicted, "commit_seconds", 0.0),  # an earlier checkout's plans have none
        "sustained": plan.sustained,
    }


def in_words(values: Mapping[str, Any]) -> str:
    terabytes = values["written_per_step"] * STEPS / 1e12
    commits = values["commit_every"]
    often = "each step" if commits == 1 else f"every {commits} steps"
    return (
        f"{values['step_seconds']:7.2f} s  {values['tokens_per_second']:6,.0f} tokens/s  {terabytes:6.1f} TB  committed {often}"
    )


def row_of(case: Case, values: dict[str, Any] | str, before: Mapping[str, Any] | None) -> Row:
    if isinstance(values, str):
        return missing(case.words, "a plan", values)
    ratio = values["step_seconds"] / values["compute_seconds"]
    note = f"{ratio:.2f} of its compute"
    if case.rows == THEIR_ROWS:
        note += "".join(f"; {who}: {speed:,} tokens/s" for who, speed in PUBLISHED[case.model].items())
    if before:
        note += f"; before: {' '.join(in_words(before).split())}"
    if not case.has_bar:
        return reported(case.words, in_words(values), note=note, values=values)
    bar = f"<= {MOST_OF_COMPUTE} of its compute"
    return holds(case.words, bar, in_words(values), ratio <= MOST_OF_COMPUTE, note=note, values=values)


def kept(path: Path | None) -> dict[str, Mapping[str, Any]]:
    """Returns the figures of an earlier result, by line."""
    if path is None:
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {row["what"]: row["values"] for row in rows if row["values"]}


def for_readme(rows: Sequence[Row]) -> str:
    """Returns a line per machine and a column per model, in Markdown."""
    found = {row.what: row.values for row in rows}
    lines = ["| GPU | RAM | drives | " + " | ".join(IN_TABLE) + " |", "| --- " * (3 + len(IN_TABLE)) + "|"]
    for ram, drives in product(RAM, DRIVES):
        cells = [_cell(found.get(Case(model=m, ram=ram, drives=drives, clipped=True).words)) for m in IN_TABLE]
        amount = ram.replace("GiB", " GiB")
        lines.append(f"| RTX 4090 | {amount} | {'2' if drives.startswith('2') else '1'} x gen4 | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(values: Mapping[str, Any] | None) -> str:
    if not values:
        return "does not fit"
    written = values["written_per_step"] * STEPS / 1e12
    return f"{values['tokens_per_second']:,.0f} tokens/s, {written:,.{int(written < 10)}f} TB"


def write_readme(table: str) -> None:
    path = ROOT / "README.md"
    before, _, rest = path.read_text(encoding="utf-8").partition(README_BEGIN)
    _, _, after = rest.partition(README_END)
    path.write_text(f"{before}{README_BEGIN}\n{table}\n{README_END}{after}", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    options = plain_parser(__doc__)
    options.add_argument("--quick", action="store_true", help="one plan: tries the script")
    options.add_argument("--others", action="store_true", help="what others have published, instead")
    options.add_argument("--readme", action="store_true", help="write the table of the README")
    options.add_argument("--beside", type=Path, help="an earlier result of this script")
    options.add_argument("--checkout", type=Path, default=ROOT, help="whose sources plan (default: this one)")
    options.add_argument("--name", default="plan_table", help="of the result")
    asked = options.parse_args(words)
    planned_by = Path(str(sys.modules["fuyou_cli.planner.place"].__file__))
    if not planned_by.is_relative_to(asked.checkout.resolve()):  # an editable install comes before sys.path
        raise SystemExit(f"--checkout: this Python plans with {planned_by}; use that checkout's own interpreter")
    show_command("scripts/plan_table.py", words)
    before, rows = kept(asked.beside), []
    for case in list(others() if asked.others else cases())[: 1 if asked.quick else None]:
        rows.append(row_of(case, figures_of(case), before.get(case.words)))
        say(f"{case.words}: {rows[-1].measured}{' FAIL' if rows[-1].verdict == FAIL else ''}")
    if asked.readme:
        write_readme(for_readme(rows))
    tokens = THEIR_ROWS * THEIR_LENGTH if asked.others else ROWS * LENGTH
    settings = {"tokens_per_step": tokens, "steps": STEPS, "sources": commit(asked.checkout)}
    return conclude(asked.name, rows, results=asked.results, settings=settings)


if __name__ == "__main__":
    sys.exit(main())
