"""The machine on paper, by hand: what one job takes, how several share, and that no time is lost or found."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.planner.simulate import JobParts, Resource, Sharing, VirtualMachine

from .models import HARDWARE

RATES = replace(
    HARDWARE, store_read=4.0, store_write=2.0, store_read_mixed=2.0, store_write_mixed=1.0, h2d=8.0, d2h=8.0
)  # bytes per second, small so that the arithmetic can be done in the head


NAMES: dict[str, Resource] = {
    "read": "ssd read", "write": "ssd write", "update": "update", "compute": "compute", "up": "h2d", "down": "d2h",
}  # fmt: skip


def job(**amounts: float) -> JobParts:
    return tuple((NAMES[name], amount) for name, amount in amounts.items())


def _machine(**sharing: float) -> VirtualMachine:
    return VirtualMachine(RATES, Sharing(**sharing))  # type: ignore[arg-type]


def _until(machine: VirtualMachine, *tickets: int) -> list[float]:
    """Returns when each of them was done."""
    ends = dict.fromkeys(tickets, 0.0)
    waiting = set(tickets)
    while waiting:
        for ticket in sorted(waiting):
            if machine.collect(ticket):
                waiting.discard(ticket)
                ends[ticket] = machine.now
        if waiting:
            machine.advance()
    return [ends[ticket] for ticket in tickets]


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (job(read=12), 3.0), (job(write=12), 6.0), (job(compute=5), 5.0), (job(update=5), 5.0), (job(up=16), 2.0),
        (job(down=4), 0.5), (job(), 0.0),
    ],
)  # fmt: skip
def test_alone_a_job_takes_its_amount_over_the_rate(work: JobParts, seconds: float) -> None:
    machine = _machine()
    assert _until(machine, machine.submit(work, what="x", stage=0)) == [seconds]


def test_the_parts_of_a_job_move_in_step() -> None:
    """Reads x in x/2 of its mixed rate, which leaves 2 - x/2 to writing: both go at 4/3."""
    machine = _machine()
    assert _until(machine, machine.submit(job(read=8, write=8, update=3), what="update", stage=0)) == [
        pytest.approx(6, rel=1e-3)
    ]
    assert machine.in_use["update"] == pytest.approx(3.0)


def test_a_reader_beside_a_writer_is_held_to_the_mixed_rate_and_no_longer() -> None:
    """Both for 4 s (8 read at 2, 4 written at 1); what is left of the read goes at 4."""
    machine = _machine()
    read, write = (machine.submit(work, what="x", stage=0) for work in (job(read=20), job(write=4)))
    assert _until(machine, read, write) == [4.0 + 12 / 4, 4.0]


def test_what_one_direction_leaves_the_other_gets_in_part() -> None:
    """Updates at half the mixed write rate: reading gets half of the way back from 2 to 4."""
    machine = _machine()
    slow = machine.submit(job(write=1, update=2), what="update", stage=0)
    read = machine.submit(job(read=100), what="fetch", stage=1)
    _until(machine, slow)
    assert machine.now == 2.0
    assert _until(machine, read) == [pytest.approx(2.0 + (100 - 2 * 3) / 4, rel=1e-3)]


def _with(**rates: float) -> VirtualMachine:
    return VirtualMachine(replace(RATES, **rates), Sharing())  # type: ignore[arg-type]


def test_copies_both_ways_get_in_each_others_way() -> None:
    """Copies up at 5 and down at 4 while both go, 8 alone: down is done at 2 with 10 of 20 gone up, the rest goes at 8."""
    machine = _with(h2d_mixed=5, d2h_mixed=4)
    up, down = (machine.submit(work, what="x", stage=0) for work in (job(up=20), job(down=8)))
    assert _until(machine, up, down) == [pytest.approx(2 + 10 / 8), pytest.approx(2)]
    assert _until(machine, machine.submit(job(up=16), what="x", stage=0)) == [pytest.approx(2 + 10 / 8 + 2)]


@given(st.integers(1, 50), st.integers(1, 50), st.booleans())
def test_a_mixed_rate_that_nobody_measured_is_the_rate_alone(one: int, other: int, copies: bool) -> None:
    works = (job(up=one), job(down=other)) if copies else (job(read=one), job(write=other))
    mixed = ("h2d_mixed", "d2h_mixed") if copies else ("store_read_mixed", "store_write_mixed")
    ends = []
    for rates in ((0.0, 0.0), (8.0, 8.0) if copies else (4.0, 2.0)):
        machine = _with(**dict(zip(mixed, rates, strict=True)))
        ends.append(_until(machine, *[machine.submit(work, what="x", stage=0) for work in works]))
    assert ends[0] == ends[1]


def test_work_at_a_rate_that_is_not_known_takes_no_time() -> None:
    """Leaves it out as the closed form does; the rest of the job takes what it takes."""
    machine = _with(store_read=0.0, store_read_mixed=0.0, h2d=0.0)
    assert _until(machine, machine.submit(job(read=7), what="x", stage=0)) == [0.0]
    assert _until(machine, machine.submit(job(up=7), what="x", stage=0)) == [0.0]
    assert _until(machine, machine.submit(job(read=100, write=4), what="x", stage=0)) == [2.0]


def test_priority_before_arrival() -> None:
    machine = _machine()
    late = machine.submit(job(read=4), what="update", stage=0, priority=9)
    first = machine.submit(job(read=4), what="fetch", stage=1, priority=0)
    second = machine.submit(job(read=4), what="fetch", stage=2, priority=0)
    assert _until(machine, late, first, second) == [3.0, 1.0, 2.0]


def test_updates_and_compute_share_cores() -> None:
    """Each at half its rate while both run: 2 s of update take 4 s, in which compute gets 2 of its 5 s done."""
    machine = _machine(compute_left=0.5, update_left=0.5)
    compute = machine.submit(job(compute=5), what="forward", stage=0)
    update = machine.submit(job(update=2), what="update", stage=0, priority=1)
    assert _until(machine, compute, update) == [7.0, 4.0]


def test_transfers_take_their_share_of_the_cores() -> None:
    machine = _machine(io_cores=0.1)  # 4 bytes a second take 0.4 of compute
    compute = machine.submit(job(compute=3), what="forward", stage=0)
    machine.submit(job(read=400), what="fetch", stage=0)
    assert _until(machine, compute) == [pytest.approx(5.0)]


def test_what_wants_more_than_the_memory_gives_is_slowed_down_alike() -> None:
    """Reads 4, copies 8 and updates 6 a second of 9: all at half speed until the copy is over, then 10 of 9."""
    machine = VirtualMachine(replace(RATES, dram=9.0), Sharing(update_bytes=6.0))
    read, up, update, compute = (
        machine.submit(work, what="x", stage=0) for work in (job(read=100), job(up=16), job(update=20), job(compute=4))
    )
    assert _until(machine, up, compute) == [4.0, 4.0]
    assert machine.in_use == {"ssd read": 2.0, "h2d": 2.0, "update": 4.0, "compute": 4.0, "dram": 4.0}
    assert _until(machine, update) == [pytest.approx(4.0 + (20 - 2) / 0.9)]
    assert _until(machine, read) == [pytest.approx(4.0 + 20 + (100 - 8 - 72) / 4)]


def test_waiting_for_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nothing moves"):
        _machine().advance()


works = st.one_of(
    st.builds(job, compute=st.integers(0, 5)),
    st.builds(
        job, read=st.integers(0, 50), write=st.integers(0, 50), update=st.integers(0, 5), up=st.integers(0, 50),
        down=st.integers(0, 50),
    ),
)  # fmt: skip


@given(st.lists(st.tuples(works, st.integers(0, 3)), min_size=1, max_size=8), st.sampled_from([1.0, 0.5, 0.25]))
def test_nothing_is_lost_or_found(jobs: list[tuple[JobParts, int]], share: float) -> None:
    """Everything ends, no resource is busy for longer than the time there was, and none does its work faster than alone."""
    machine = _machine(compute_left=share, update_left=share)
    tickets = [machine.submit(work, what="x", stage=i, priority=p) for i, (work, p) in enumerate(jobs)]
    _until(machine, *tickets)
    assert all(seconds <= machine.now * (1 + 1e-9) for seconds in machine.in_use.values())
    for name, rate in (("read", 4.0), ("write", 2.0), ("update", 1.0), ("compute", 1.0), ("up", 8.0), ("down", 8.0)):
        assert sum(dict(work).get(NAMES[name], 0) for work, _ in jobs) / rate <= machine.now * (1 + 1e-9) + 1e-9


@given(st.lists(st.tuples(works, st.integers(0, 3)), min_size=1, max_size=8))
def test_no_job_ends_earlier_with_less_memory_bandwidth(jobs: list[tuple[JobParts, int]]) -> None:
    """A memory that is never full changes nothing; every other one gives all the bytes there are."""
    ends = []
    for rate in (0.0, 1e6, 12.0, 5.0):
        machine = VirtualMachine(replace(RATES, dram=rate), Sharing(update_bytes=6.0))
        ends.append(_until(machine, *[machine.submit(work, what="x", stage=i, priority=p) for i, (work, p) in enumerate(jobs)]))
        moved = sum(amount * {"update": 6, "compute": 0}.get(name, 1) for work, _ in jobs for name, amount in work)
        assert machine.in_use.get("dram", 0.0) * rate == pytest.approx(moved * bool(rate))
    assert ends[0] == ends[1]
    for more, less in pairwise(ends):
        assert all(one <= other * (1 + 1e-9) for one, other in zip(more, less, strict=True))
