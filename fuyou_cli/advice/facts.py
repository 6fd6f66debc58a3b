"""What a plan's screen says beside the plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fuyou_cli.advice.break_even import BreakEven
from fuyou_cli.advice.compare import Comparison
from fuyou_cli.advice.endings import Ending
from fuyou_cli.advice.planning import Outcome
from fuyou_cli.advice.wear import Spared
from fuyou_cli.planner.lasting import FastRegion
from fuyou_cli.planner.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What belongs on the screen and is no part of a plan."""

    steps: int | None = None  # of the whole run; None where the data decides
    done: int | None = None  # of these, by the saved run that is gone on from; None of a new one
    io_uring: bool = True  # whether this build has it
    folder: Path = Path()  # whose drive the store would be on
    command: str = "fuyou finetune recipe.yaml"  # to run what fits; empty where it cannot be run
    refusal: str | None = None  # why the model cannot be trained yet
    even: BreakEven | None = None
    compared: Comparison | None = None
    changes: tuple[Outcome, ...] | None = None  # that help; None where none are needed
    tried: int = 0  # plans made to find them
    advice: str = ""  # what to do where nobody has looked for such changes
    region: FastRegion | None = None  # of the drives; None where they are not known to slow down
    endings: tuple[Ending, ...] = ()  # before the last step, by limits of the recipe
    step: Timeline | None = None  # with its memory; None where nobody asked for that
    spared: Spared | None = None  # by `offload.wear`
    notes: tuple[str, ...] = ()  # what was noticed while it was planned

    @property
    def left(self) -> int | None:
        """Steps that are still to be done."""
        return None if self.steps is None else max(0, self.steps - (self.done or 0))
