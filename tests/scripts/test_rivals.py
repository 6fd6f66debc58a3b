"""What scripts/compare_faults.py says of a rival's run. The runs themselves need DeepSpeed."""

from __future__ import annotations

import pytest
from compare_faults import _compared, losses_of
from proof.nursery import Ended

STEPS = range(1, 3)
TOLD = [{"deepspeed": "0"}, {"step": 1, "loss": 8.5}, {"step": 2, "loss": 8.25}, {"saved": "tag"}]


@pytest.mark.parametrize(
    ("found", "code", "good", "text"),
    [
        ({1: 8.5, 2: 8.25}, 0, True, "losses bitwise the same"),
        ({1: 8.5, 2: 8.5}, 0, False, "exit code 0, not a word; loss of step 2 is 8.5, 8.25 is right"),
        ({1: 8.5}, 0, False, "exit code 0, not a word; loss of step 2 is None, 8.25 is right"),
        ({1: 8.5}, 1, False, "exit code 1: FileExistsError: 'rank00'"),
        ({}, -6, False, "exit code -6: python: handle.cpp:34: no"),
    ],
)
def test_what_became_of_a_run(found: dict[int, float], code: int, good: bool, text: str) -> None:
    said = [{"error": "FileExistsError: '/a-b/c.d/rank00'"}] if code == 1 else []
    end = Ended(code=code, out="", err="first\npython: /opt/ds/csrc/handle.cpp:34: no\n\n", seconds=1.0)
    outcome = _compared(losses_of(TOLD), found, end, said, STEPS)
    assert (outcome.good, outcome.text) == (good, text)
