"""Finds copies and compute that a GPU may run in the wrong order, whatever order they had here.

A GPU orders two things only if they are on one stream, if one waits for the other's event, or if the host knew that the first
had ended when it asked for the second. `OrderedDevice` notes that for every copy, every operator of torch that reads or writes
memory of the device or the arena, and every request to the daemon. Two uses of the same bytes, of which one writes, without
such an order are a race. The emulated device alone computes before a call returns, so it cannot show what overtakes compute.

    device = OrderedDevice()
    with Rig(subject, folder, device="emulated", opened=device, through=device.watched) as rig, device.watching():
        rig.run(3)
    assert device.races == []
"""

from __future__ import annotations

import traceback
import weakref
from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fuyou_cli.engine.devices.base import Event, Moment, Squares, ValueRun
from fuyou_cli.spec.model import ITEM_SIZE
from fuyou_cli.swap.daemon import Update
from tests.emulated import EmulatedDevice

Clock = dict[str, int]  # by stream: how many of its operations have ended
_ENGINE = str(Path(__file__).resolve().parents[1] / "fuyou_cli")
_PAGE = 12  # bits of an address
COMPUTE = "compute"
BEHIND = 8  # times that the host is told that something has not ended


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


@dataclass(frozen=True, slots=True)
class _Use:
    begin: int
    end: int
    stream: str
    number: int
    writes: bool
    what: str


class _Passed(Event):
    """An event of the emulated device, and what has ended when it passes."""

    def __init__(self, device: OrderedDevice, event: Event, clock: Mapping[str, int]) -> None:
        self._device, self.event, self.clock, self._asked = device, event, dict(clock), 0

    def wait(self) -> None:
        self.event.wait()
        _join(self._device.clocks[COMPUTE], self.clock)

    def synchronize(self) -> None:
        self.event.synchronize()
        _join(self._device.known, self.clock)

    def done(self) -> bool:
        """Says no at first, as a GPU that is behind."""
        self._asked += 1
        if is_over := self._asked > BEHIND and self.event.done():
            _join(self._device.known, self.clock)
        return is_over


class _Sums:
    def __init__(self, device: OrderedDevice, sums: Squares) -> None:
        self._sums, self._passed = sums, _Passed(device, Event(), device.clocks[COMPUTE])

    def done(self) -> bool:
        return self._sums.done() and self._passed.done()

    def result(self) -> list[float]:
        self._passed.synchronize()
        return self._sums.result()


class OrderedDevice(EmulatedDevice):
    """`races`: what was found. `known`: what the host knows to have ended."""

    def __init__(self, **kind: Any) -> None:
        super().__init__(**kind)
        self.races: list[str] = []
        self.known: Clock = {}
        self.clocks = defaultdict[str, Clock](dict)
        self._uses = defaultdict[int, list[_Use]](list)  # by page; what the host knows to have ended is left out
        self._memories: list[tuple[int, int]] = []  # of the device: first address, one past the last
        self._given_back = deque[tuple[int, int]]()  # also by threads that copy
        self._arena = (0, 0)

    # ---- memory --------------------------------------------------------------------------------------------------

    def empty(self, size: int) -> torch.Tensor:
        return self._noted(super().empty(size))

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return self._noted(super().empty_like(host))

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        place = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        self._forget()
        if place[0] < place[1]:
            insort(self._memories, place)
            weakref.finalize(storage, self._given_back.append, place).atexit = False
        return tensor

    def _forget(self) -> None:
        """Forgets memory that was let go of: a GPU's allocator gives it to nobody before its copies have ended."""
        while self._given_back:
            begin, end = place = self._given_back.popleft()
            self._memories.remove(place)
            for page in range(begin >> _PAGE, ((end - 1) >> _PAGE) + 1):
                self._uses[page] = [use for use in self._uses[page] if not (use.begin < end and begin < use.end)]

    def pin(self, host: torch.Tensor) -> None:
        self._arena = _extent(host)

    # ---- copies and points of compute --------------------------------------------------------------------------------

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event | None = None, bulk: bool = False) -> Event:
        passed = self.compute_end() if after is None else after
        assert isinstance(passed, _Passed)
        with _disable_current_modes():
            event = super().upload(host, device, after=passed.event, bulk=bulk)
        return self._copied("bulk up" if bulk else "up", event, passed.clock, [(host, device)])

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> Event:
        with _disable_current_modes():
            event = super().download(device, host, bulk=bulk)
        return self._copied("bulk down" if bulk else "down", event, self.clocks[COMPUTE], [(device, host)])

    def download_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        with _disable_current_modes():
            events = EmulatedDevice.download_all(self, pairs)
        return [self._copied("down", event, self.clocks[COMPUTE], pairs) for event in events]

    def upload_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        with _disable_current_modes():
            events = EmulatedDevice.upload_all(self, pairs)
        return [self._copied("up", event, self.clocks[COMPUTE], pairs) for event in events]

    def _copied(
        self, stream: str, event: Event, after: Mapping[str, int], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Event:  # fmt: skip
        uses = [(tensor, tensor is target) for source, target in pairs for tensor in (source, target)]
        self._run(stream, after, uses, f"copy {stream}")
        return _Passed(self, event, self.clocks[stream])

    def compute_end(self) -> Event:
        return _Passed(self, super().compute_end(), self.clocks[COMPUTE])

    def mark(self) -> Moment:
        moment, passed = super().mark(), _Passed(self, Event(), self.clocks[COMPUTE])

        def read() -> float:
            passed.synchronize()
            return moment()

        return read

    def squares(self, flat: torch.Tensor, runs: Sequence[ValueRun], lanes: torch.Tensor) -> Squares:
        self._run(COMPUTE, {}, [(flat, False)], "squares")
        return _Sums(self, super().squares(flat, runs, lanes))

    def numbers(self, values: torch.Tensor) -> Squares:
        return _Sums(self, super().numbers(values))

    def synchronize(self) -> None:
        super().synchronize()
        for clock in self.clocks.values():
            _join(self.known, clock)

    # ---- what else uses memory -----------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes what torch's operators use, inside the context."""
        with _Watching(self):
            yield

    def watched(self, daemon: Any) -> Any:
        """Returns the daemon, whose requests are noted."""
        return _WatchedDaemon(self, daemon)

    def computed(self, uses: Sequence[tuple[torch.Tensor, bool]], what: str) -> None:
        """Notes an operator. `uses`: tensors, and whether they are written."""
        on_device, on_host = list[tuple[torch.Tensor, bool]](), list[tuple[torch.Tensor, bool]]()
        self._forget()
        for tensor, writes in uses:
            address = tensor.data_ptr()
            number = bisect_right(self._memories, (address, 1 << 63)) - 1
            if number >= 0 and address < self._memories[number][1]:
                on_device.append((tensor, writes))
            elif self._arena[0] <= address < self._arena[1]:
                on_host.append((tensor, writes))
        if on_device and on_host:
            self._found(f"{what} computes with memory of the device and of the host")
        if on_device:
            self._run(COMPUTE, {}, on_device, what)
        for tensor, writes in on_host:
            self._use(*_extent(tensor), "host", self.known, writes, what)

    def requested(self, ticket: str, uses: Sequence[tuple[int, int, bool]], what: str) -> None:
        """Notes what a thread of the daemon uses until its ticket is done: offset in the arena, bytes, whether it writes."""
        clock = self.clocks[ticket] = {**self.known, ticket: 1}
        for offset, size, writes in uses:
            begin = self._arena[0] + offset
            self._use(begin, begin + size, ticket, clock, writes, what)

    def _run(
        self, stream: str, after: Mapping[str, int], uses: Sequence[tuple[torch.Tensor, bool]], what: str
    ) -> None:  # fmt: skip
        clock = self.clocks[stream]
        _join(clock, self.known)
        _join(clock, after)
        clock[stream] = clock.get(stream, 0) + 1
        for tensor, writes in uses:
            self._use(*_extent(tensor), stream, clock, writes, what)

    def _use(self, begin: int, end: int, stream: str, clock: Mapping[str, int], writes: bool, what: str) -> None:
        new = _Use(begin, end, stream, clock.get(stream, 0), writes, what)
        for page in range(begin >> _PAGE, ((end - 1) >> _PAGE) + 1) if begin < end else ():
            kept = list[_Use]()
            for use in self._uses[page]:
                if use.number <= self.known.get(use.stream, 0):
                    continue
                if use.begin < end and begin < use.end and (writes or use.writes) and use.number > clock.get(use.stream, 0):
                    self._found(f"{what} may overtake {use.what}")
                if (use.begin, use.end, use.stream, use.writes) != (begin, end, stream, writes):
                    kept.append(use)
            self._uses[page] = kept if stream == "host" else [*kept, new]

    def _found(self, race: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_ENGINE)]
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-6:]))
        if (text := f"{race}: {where}") not in self.races:
            self.races.append(text)


class _Watching(TorchDispatchMode):
    def __init__(self, device: OrderedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema
        if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
            return out  # a view
        written = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
        given = [*zip((argument.name for argument in schema.arguments), args, strict=False), *kwargs.items()]
        uses = [(leaf, name in written) for name, value in given for leaf in tree_leaves(value)]
        uses += [(leaf, True) for leaf in tree_leaves(out)] if not written else []
        self._device.computed([use for use in uses if type(use[0]) in _PLAIN and use[0].device.type == "cpu"], str(func))
        return out


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _WatchedDaemon:
    def __init__(self, device: OrderedDevice, daemon: Any) -> None:
        self._device, self._daemon = device, daemon

    def __getattr__(self, name: str) -> Any:
        return getattr(self._daemon, name)

    def read(self, arena_offset: int, store_offset: int, size: int, **how: Any) -> int:
        ticket: int = self._daemon.read(arena_offset, store_offset, size, **how)
        self._device.requested(str(ticket), [(arena_offset, size, True)], "a read from the store")
        return ticket

    def write(self, arena_offset: int, store_offset: int, size: int, **how: Any) -> int:
        ticket: int = self._daemon.write(arena_offset, store_offset, size, **how)
        self._device.requested(str(ticket), [(arena_offset, size, False)], "a write to the store")
        return ticket

    def update(self, request: Update) -> int:
        ticket: int = self._daemon.update(request)
        uses = [(request.weights, request.params * ITEM_SIZE[request.weights_dtype], True)]
        if request.gradients is not None:
            uses.append((request.gradients, request.params * ITEM_SIZE[request.gradients_dtype], False))
        self._device.requested(str(ticket), uses, "an update")
        return ticket

    def poll(self, ticket: int) -> Any:
        result = self._daemon.poll(ticket)
        if result is not None:
            self._ended(ticket)
        return result

    def wait(self, ticket: int) -> Any:
        result = self._daemon.wait(ticket)
        self._ended(ticket)
        return result

    def _ended(self, ticket: int) -> None:
        self._device.known[str(ticket)] = 1
        self._device.clocks.pop(str(ticket), None)


def _join(clock: Clock, other: Mapping[str, int]) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number
