"""Says how long a micro-batch of any shape takes, from a few shapes of the stage that were timed.

The seconds of one pass over a stage are `fixed + per_token * tokens + per_pair * tokens * width + per_row * rows`: what a
micro-batch costs however small it is (calls of small layers, the sum of the stage's gradients), its matrix products, its
attention, and what each row costs however short it is (where rows lie end to end, attention is called for each). So a list of
unlike micro-batches takes the sum over it (`Costs.micro_batch_seconds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from ..spec.hardware import StageRate

Pass = tuple[float, float]  # seconds and FLOPs of one pass over a micro-batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaped:
    """Holds an amount (seconds, or FLOPs) as a function of a micro-batch's shape."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0  # per token and token of its row
    per_row: float = 0.0

    def of(self, tokens: int, width: int, *, rows: int = 0, pieces: int = 1) -> float:
        """Returns the amount for so many tokens in rows of `width`, computed in so many pieces (of a head: several). `rows`: if
        they are not all as wide; `width` is then what a token attends to in the mean."""
        rows = rows or -(-tokens // width)
        return pieces * self.fixed + tokens * (self.per_token + self.per_pair * width) + rows * self.per_row


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTime:
    """Holds the seconds and the FLOPs of one pass over a stage, both by the micro-batch's shape."""

    seconds: Shaped
    flops: Shaped

    def rate(self, tokens: int, width: int, pieces: int = 1) -> float:
        """Returns FLOP/s at micro-batches of this shape."""
        seconds = self.seconds.of(tokens, width, pieces=pieces)
        return self.flops.of(tokens, width, pieces=pieces) / seconds if seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Holds what was timed of one stage: forward (of a head: its "logits" pass), backward with its recompute (of a head: its
    visit), and backward with every output kept that can be (None: none can)."""

    forward: PassTime
    backward: PassTime
    given: PassTime | None


def stage_times(own: Sequence[StageRate]) -> StageTimes | None:
    """Returns the times of a stage that was timed in these shapes (`HardwareProfile.own_rates`). None if there are none."""
    if not own:
        return None
    given = [rate for rate in own if rate.given and rate.given_flops]
    return StageTimes(
        forward=_pass_time(own, lambda rate: (rate.forward_flops / rate.forward, rate.forward_flops)),
        backward=_pass_time(own, lambda rate: (rate.backward_flops / rate.backward, rate.backward_flops)),
        given=_pass_time(given, lambda rate: (rate.given_flops / rate.given, rate.given_flops)) if given else None,
    )


def _pass_time(rates: Iterable[StageRate], found: Callable[[StageRate], Pass]) -> PassTime:
    shapes = [(rate.tokens, rate.width, *found(rate)) for rate in rates]
    return PassTime(
        seconds=fitted([(tokens, width, seconds) for tokens, width, seconds, _ in shapes]),
        flops=fitted([(tokens, width, flops) for tokens, width, _, flops in shapes]),
    )


def fitted(found: Sequence[tuple[int, int, float]]) -> Shaped:
    """Fits the amounts found at (tokens, width): the least sum of squared relative errors, where no part is negative. Of too
    few shapes to tell the parts apart, the amount is in proportion to tokens first, then has a fixed part."""
    columns: tuple[Callable[[int, int], float], ...] = (
        lambda tokens, _: float(tokens),
        lambda tokens, _: 1.0,
        lambda tokens, width: float(tokens * width),
        lambda tokens, width: tokens / width,
    )
    best, least = Shaped(), float("inf")
    most = min(len(columns), len({(tokens, width) for tokens, width, _ in found}))
    for count in range(1, most + 1):
        for chosen in combinations(range(len(columns)), count):
            # Divided by the amount, so that each shape's relative error counts alike: the wanted value of each is 1.
            rows = [[columns[column](tokens, width) / amount for column in chosen] for tokens, width, amount in found]
            parts = _least_squares(rows)
            if parts is None or 0 not in chosen:
                continue
            if min(parts) < 0:
                continue
            by_column = dict(zip(chosen, parts, strict=True))
            per_token, fixed, per_pair, per_row = (by_column.get(column, 0.0) for column in range(4))
            error = sum((sum(part * value for part, value in zip(parts, row, strict=True)) - 1) ** 2 for row in rows)
            if error < least - 1e-9:  # a part more has to explain something
                best, least = Shaped(fixed=fixed, per_token=per_token, per_pair=per_pair, per_row=per_row), error
    return best


def _least_squares(rows: Sequence[Sequence[float]]) -> tuple[float, ...] | None:
    """Returns the x that makes every row's product with it nearest to 1; None if there are several."""
    size = len(rows[0])
    scale = [max(abs(row[k]) for row in rows) for k in range(size)]
    scaled = [[value / unit for value, unit in zip(row, scale, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)] + [sum(row[i] for row in scaled)] for i in range(size)
    ]
    for k in range(size):  # Gauss and Jordan, with pivots
        pivot = max(range(k, size), key=lambda row: abs(matrix[row][k]))
        matrix[k], matrix[pivot] = matrix[pivot], matrix[k]
        if abs(matrix[k][k]) < 1e-12:
            return None
        matrix[k] = [value / matrix[k][k] for value in matrix[k]]
        for row in range(size):
            if row != k:
                matrix[row] = [value - matrix[row][k] * under for value, under in zip(matrix[row], matrix[k], strict=True)]
    return tuple(matrix[k][size] / scale[k] for k in range(size))
