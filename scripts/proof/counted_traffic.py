"""Counts bytes of a run's steps as the daemon and the kernel see them, in the terms of its plan."""

from __future__ import annotations

import statistics
from typing import Any

WARM_UP = 2  # steps, where a run logs no sums: after them every step reads states


def counted(result: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns bytes per step (read, written) by the plan, the kernel and the daemon.

    Over the whole run the kernel and the daemon lack the states that the first update did not read. They also count weights
    that the first step read and later ones found in their slots, those that the last of the deferred updates (with clipping
    all) fetched for themselves, and what saving wrote. Without these, all three speak of the same step."""
    plan, steps = result["plan"], result["steps"]
    unread = plan["predicted_read_by"].get("states", 0)
    unread -= plan["deferred_weights"] + plan["weights_left"]
    sums = {"kernel": result["kernel_whole"], "daemon": result["daemon_whole"]}
    by = {"plan": (plan["predicted_read_per_step"], plan["predicted_written_per_step"])}
    for who, whole in sums.items():
        if whole is None:  # a run that logs its steps only: what is in flight at a step's end blurs these
            counting = steps[WARM_UP:-1]
            by[who] = (
                statistics.mean(step["read_bytes"] for step in counting),
                statistics.mean(step["written_bytes"] for step in counting),
            )
        else:
            by[who] = ((whole[0] + unread) / len(steps), (whole[1] - result["saved"]) / len(steps))
    return by
