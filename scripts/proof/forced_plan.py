#!/usr/bin/env python3
"""Runs a `fuyou` command with a given candidate in place of the planner's choice.

    python scripts/proof/forced_plan.py candidate.json finetune recipe.yaml

The file holds the fields of a `Candidate`. It is placed where a run would search, so in whatever memory this process leaves.
If it does not fit, nothing else is run. A candidate says nothing of the micro-batch: the recipe has to.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fuyou_cli.cli.app import main
from fuyou_cli.core.json_files import from_json
from fuyou_cli.planner.place import Candidate
from fuyou_cli.training import plan_step


def run_with(candidate: Candidate, words: list[str]) -> None:
    """Runs the command, and exits with its code."""
    forced = {name: partial(getattr(plan_step, name), candidate=candidate) for name in ("plan", "settle")}
    for name, function in forced.items():
        setattr(plan_step, name, function)
    main(words)


if __name__ == "__main__":
    run_with(from_json(Candidate, json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), sys.argv[2:])
