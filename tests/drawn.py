"""How many examples a property draws, and what it is excused from."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EVERY = int(os.environ.get("FUYOU_EXAMPLES", "0"))  # of every property, whatever it asks for; 0: as many as it asks for
USUAL = 100
_SLOW = [HealthCheck.too_slow]  # says more of the machine than of the property
_SHARING = [*_SLOW, HealthCheck.function_scoped_fixture]


def load_profile() -> None:
    """What holds for every property that says nothing else."""
    settings.register_profile("fuyou", max_examples=EVERY or USUAL, deadline=None, suppress_health_check=_SLOW, print_blob=True)
    settings.load_profile("fuyou")


def examples(count: int = USUAL, *, share_fixtures: bool = False) -> settings:
    """So many instead of the usual number. `share_fixtures`: one folder, say, does for all examples of a property."""
    return settings(max_examples=EVERY or count, suppress_health_check=_SHARING if share_fixtures else _SLOW)
