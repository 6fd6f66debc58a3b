"""From how many tokens per step on compute hides the store: weights and states move once a step whatever its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.errors import FuyouError
from fuyou_cli.planner.choice import Choice
from fuyou_cli.planner.commit_interval import COMMITS
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.spec.hardware import STORE_RATES, HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .planning import Elsewise, as_chosen_before

if TYPE_CHECKING:
    from fuyou_cli.training.prepare import Prepared

HIDDEN = 0.05  # of a step: compute that waits less is as good as never waiting
MOST_PLANS = 10  # in one direction
_CLOSE = 0.05  # of the answer
_AT_ONCE = 1e18  # bytes per second of a drive that takes no time


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakEven:
    """Of re-planned batches, in tokens per step (padding included)."""

    tokens: int | None  # the fewest that hide the store; None: `tried` do not
    tried: int  # the most that were planned
    limited: bool  # hardly more than `tried` fits
    now: int  # the recipe's
    on_ssd: bool = True  # whether the plan has anything there
    batch: int | None  # rows of `tokens`, or of `most`
    most: int | None = None  # where smaller batches hide it, as what they keep is not on the ssd: the most that do

    @property
    def below(self) -> bool:
        """Whether the recipe's batch leaves compute waiting."""
        return self.on_ssd and (self.tokens is None or self.now < self.tokens)


def hides_the_store(model: ModelSpec, hardware: HardwareProfile, plan: Plan) -> bool:
    """Whether compute waits little that it would not wait for without the store. A cause's name does not tell: an update is
    late for its states or for AdamW itself. So the plan's step is simulated once more with drives that take no time."""
    predicted = plan.predicted
    most = HIDDEN * predicted.step_seconds
    waited = sum(seconds for cause, seconds in predicted.stalls.items() if cause != COMMITS)  # these are few by themselves
    if not _is_on_ssd(plan) or waited <= most:
        return True
    at_once: dict[str, Any] = dict.fromkeys(STORE_RATES, _AT_ONCE)  # also what a drive that slows down sustains
    left = simulate(model, replace(hardware, **at_once), plan, plan_schedule(model, plan)).stalls
    return waited - sum(left.values()) <= most


def _is_on_ssd(plan: Plan) -> bool:
    return plan.predicted.read_per_step + plan.predicted.written_per_step > 0


def break_even(elsewise: Elsewise, choice: Choice) -> BreakEven:
    """Doubles (or halves) the recipe's batch until compute does (or no longer does) hide the store, then bisects. Every batch
    is placed anew and simulated, with the `choice` that is best for the recipe's."""
    choose = as_chosen_before(choice)
    numerics, train = elsewise.prepared.plan.numerics, elsewise.prepared.recipe.train
    micro = numerics.micro_batch_size

    def hidden(count: int) -> bool | None:
        """With this many micro-batches; None where that does not fit."""
        changed = train.model_copy(update={"batch_size": count * micro, "micro_batch_size": micro})
        try:
            outcome = elsewise.with_recipe(elsewise.prepared.recipe.model_copy(update={"train": changed}), choose=choose)
        except FuyouError:
            return None
        return None if outcome.problems else _hides(outcome.prepared)

    now = -(-numerics.batch_size // micro)
    if not _is_on_ssd(elsewise.prepared.plan):
        tokens = numerics.batch_size * numerics.max_seq_len
        return BreakEven(tokens=None, tried=tokens, limited=False, now=tokens, batch=None, on_ssd=False)
    found, tried, limited = fewest(hidden, now, hidden_now=_hides(elsewise.prepared))
    smaller = most_below(hidden, now) if found is None else None
    each, known = micro * numerics.max_seq_len, found if found is not None else smaller
    return BreakEven(
        tokens=None if found is None else found * each,
        tried=tried * each,
        limited=limited,
        now=numerics.batch_size * numerics.max_seq_len,
        batch=None if known is None else known * micro,
        most=None if smaller is None else smaller * each,
    )


def _hides(prepared: Prepared) -> bool:
    return hides_the_store(prepared.model, prepared.hardware, prepared.plan)


def fewest(hidden: Callable[[int], bool | None], now: int, *, hidden_now: bool) -> tuple[int | None, int, bool]:
    """The least count that is hidden (to within a twentieth), the greatest that was asked for, and whether
    hardly more fits. `hidden` of more is taken to be true where it is of less, None where it cannot be told; asked at most
    MOST_PLANS times."""
    left, low, high, above = MOST_PLANS, 0, 0, None
    if hidden_now:
        high = now
        while high > 1 and left > 0:
            left -= 1
            half = high // 2
            if not hidden(half):
                low = half
                break
            high = half
    else:
        low = now
        while left > MOST_PLANS // 3 and not high and above is None:
            left -= 1
            answer = hidden(2 * low)
            if answer is None:
                above = 2 * low
            elif answer:
                high = 2 * low
            else:
                low *= 2
    while left > 0 and (high or above or low) - low > max(1, _CLOSE * (high or above or low)):
        left -= 1
        middle = (low + (high or above or low)) // 2
        answer = hidden(middle)
        if answer is None and not high:
            above = middle
        elif answer:
            high = middle
        else:
            low = middle
    return (high, max(high, now), False) if high else (None, low, above is not None)


def most_below(hidden: Callable[[int], bool | None], now: int) -> int | None:
    """The greatest count below `now`, which is not hidden, that is: by halves, then nearer; None where none is. Asked at most
    MOST_PLANS times, once a turn."""
    low, high = 0, now  # the greatest that is hidden, 0 for none yet; the least that is not
    for left in range(MOST_PLANS, 0, -1):
        if high - low <= max(1, _CLOSE * high) or (low == 0 and left <= MOST_PLANS // 3):
            break
        middle = (low + high) // 2
        low, high = (middle, high) if hidden(middle) else (low, middle)
    return low or None
