"""The ranks that train one model together: how a process joins them, and how they agree, wait for one another and end.

A launcher (torchrun, `fuyou finetune --nproc`) gives each process its rank by five variables. What ranks tell one another
before the steps goes through the launcher's store, as JSON; what they tell in every step through gloo. Neither is encrypted.

Three things tell of a lost peer. Its connection closes when it dies: a thread waits for each peer's farewell. It writes why it
failed into the store, if it can. And it counts its heartbeats there: one that froze stops counting, and so does the store
where the launcher is gone. Then this process ends too, at the latest some seconds later: what is committed stays.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import FuyouError, Interrupted, PeerLost, UsageError
from ..core.json_files import from_json, one_line
from ..core.process import in_thread
from ..spec.hardware import Network
from ..spec.plan import Numerics, Plan

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..engine.ranks import Ranks

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_RANKED = _NAMES[:3]  # MASTER_ADDR alone may be a shell's
# Where each process of another tool finds how many there are, if they are more than one.
_STARTED_BY = {
    "SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun",
    "NNODES": "a script for torchrun",
}  # fmt: skip
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"  # in the environment of ranks that it has started
LAUNCHER = "FUYOU_LAUNCHER"  # in the environment of ranks that `--nproc` has started: its process
_LINE = (
    "let torchrun start it, on every box: torchrun --nnodes 2 --node-rank 0 (1 on the other) --nproc-per-node 1 "
    "--master-addr BOX1 --master-port 29500 -m fuyou_cli finetune RECIPE; on one box fuyou finetune RECIPE --nproc 2"
)
_LAST_PORT = (1 << 16) - 1
_FOREVER = timedelta(days=90)  # gloo's longest wait; frozen peers are found by their heartbeat
_JOINING = timedelta(minutes=10)  # in which all ranks have to be there and connected
_CONNECTING = timedelta(minutes=2)
_LATE = 10.0  # seconds of joining after which it is told
_BEAT = 1.0  # seconds between heartbeats
_SILENT = 3.0  # seconds without one, after which a rank that cannot connect takes a peer for ended
_LOOK = 0.01  # seconds between looks at the store
_NAMED = 0.002  # the same while a commit waits
_REASON = 0.5  # seconds that a failed peer has to write why
_LINGER = 1.0  # seconds that the first rank waits for the others once it has failed
_GRACE = 3.5  # seconds from a peer's loss until this process ends whatever it does


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Says which process this is, as its launcher has it. `local`: its number on its box."""

    rank: int
    count: int
    local: int
    address: str
    port: int


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Returns this process's place among several, or None where it is the only one. Raises UsageError for an environment that
    says only half of it, as other tools' do."""
    set_names = [name for name in _NAMES if environ.get(name)]
    if len(set_names) == len(_NAMES):
        return _place(environ)
    if ranked := [name for name in set_names if name in _RANKED]:
        missing = ", ".join(name for name in _NAMES if name not in set_names)
        raise UsageError(f"{', '.join(ranked)} set in the environment, but not {missing}", hint=_LINE)
    for name, tool in _STARTED_BY.items():
        if environ.get(name, "").isdecimal() and int(environ[name]) > 1:
            raise UsageError(f"{tool} has started {environ[name]} processes ({name}), but none has a RANK", hint=_LINE)
    return None


def has_launcher(environ: Mapping[str, str]) -> bool:
    """Tells whether a launcher has started this rank, which tells how each of them has ended."""
    return LAUNCHER in environ or _OF_TORCHRUN in environ


def is_shown_elsewhere(environ: Mapping[str, str]) -> bool:
    """Tells whether the first of several ranks, or who has started them, shows what all of them find in a recipe."""
    return LAUNCHER in environ or environ.get("RANK", "0") != "0"


def _place(environ: Mapping[str, str]) -> Place | None:
    wrong = [name for name in _NAMES if name != "MASTER_ADDR" and not environ[name].isdecimal()]
    if wrong:
        raise UsageError(f"{wrong[0]} in the environment is no number: {one_line(environ[wrong[0]])}", hint=_LINE)
    rank, count, local, port = (int(environ[name]) for name in _NAMES if name != "MASTER_ADDR")
    if port > _LAST_PORT:
        raise UsageError(f"MASTER_PORT is {port}, and ports end at {_LAST_PORT}", hint=_LINE)
    if rank >= max(count, 1):
        raise UsageError(f"RANK is {rank}, but WORLD_SIZE is {count}", hint=_LINE)
    if count < 2:
        return None
    return Place(rank=rank, count=count, local=local, address=environ["MASTER_ADDR"], port=port)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alike:
    """Holds what the plans of all ranks have alike. Rank 0 chooses it, for the whole model."""

    numerics: Numerics
    sweeps: int
    norm_first: bool
    commit_every: int | None
    owners: tuple[int, ...]  # the rank of each stage

    @classmethod
    def of(cls, plan: Plan, owners: tuple[int, ...]) -> Alike:
        """Returns what rank 0's plan is to have alike with all others."""
        return cls(
            numerics=plan.numerics,
            sweeps=plan.sweeps,
            norm_first=plan.norm_first,
            commit_every=plan.commit_every,
            owners=owners,
        )


class Peers:
    """One rank's view of all. Every rank calls the same methods in the same order. `peer_timeout`: seconds without a heartbeat
    after which a peer is lost; `are_replicas`: each computes the whole model, and the first one's store is the run's; `say`:
    gets what is waited for."""

    def __init__(self, place: Place, *, peer_timeout: int, are_replicas: bool = False, say: Callable[[str], None]) -> None:
        self.rank, self.count, self.are_replicas = place.rank, place.count, are_replicas
        self.is_first, self._meeting = place.rank == 0, f"{place.address}:{place.port}"
        self.alike: Alike | None = None  # once rank 0 has planned
        self.on_card = 1  # ranks that compute on the same GPU
        self.ends_together = False  # all ranks end now, so none is missed
        self._others = [rank for rank in range(place.count) if rank != place.rank]
        self._timeout, self._gathers, self._known = peer_timeout, 0, dict[str, Any]()
        self._lock, self._lost = threading.Lock(), list[FuyouError]()
        self._is_over = threading.Event()
        with _told_late(f"waiting for all {place.count} ranks at {self._meeting}", say if place.local == 0 else None):
            self._store = _joined_store(place)
            self._committing, self._beating = self._store.clone(), self._store.clone()  # one for each thread
            self.boxes: list[list[str]] = self.all_gather("box", _box(), within=_JOINING.total_seconds())
        self.hosts = [host for host, *_ in self.boxes]
        mates = [rank for rank, box in enumerate(self.boxes) if box == self.boxes[self.rank]]
        self.local_count, self._is_first_here = len(mates), mates[0] == self.rank
        self._answered = time.monotonic()  # when the store last answered
        # a rank may end while the others connect
        self._watches = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._watch_store)]
        for thread in self._watches:
            thread.start()
        try:
            self.ranks, self.exchange, self._farewells = _joined_gloo(
                place, self._store, self.hosts, one_box=self.local_count == self.count
            )
        except UsageError as error:
            self._check_hearts()  # boxes that do not reach one another fail in the same words
            self._say_why(error)  # to those that fail later, and find this rank silent
            time.sleep(_LINGER)  # this process may hold the store
            raise
        self.network = Network.between(self.boxes)  # what connects the ranks, as all of them take it to be
        self._partings = [threading.Thread(target=self._watch, args=(peer,), daemon=True) for peer in self._others]
        for thread in self._partings:
            thread.start()

    def measure_link(self) -> None:
        """Measures what connects the boxes, by which stages are dealt and steps predicted. All ranks call it. Raises
        PeerLost."""
        from ..engine.link_rates import measured_network

        self.network = measured_network(self.ranks, self.network)

    def share_card(self, card: str | None) -> None:
        """Learns how many ranks of this box compute on the same GPU. `card`: which one this rank has taken; None: none."""
        self.on_card = max(1, sum(other == card for other in self.gather_on_box("card", card) if card is not None))

    def named(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}"

    @property
    def is_copy(self) -> bool:
        """Tells whether this rank repeats what another one saves."""
        return self.are_replicas and not self.is_first

    # ---- before the steps ----------------------------------------------------------------------------------------

    def gather_on_box(self, what: str, value: Any) -> list[Any]:
        """Returns what every rank on this box tells of `what`, by rank. All ranks call it. Raises PeerLost."""
        mine = self.boxes[self.rank]
        return [value for value, box in zip(self.all_gather(what, value), self.boxes, strict=True) if box == mine]

    @contextmanager
    def one_of_a_box_first(self, what: str) -> Iterator[None]:
        """Lets one rank of each box do what is inside, and then the others, which find what it has made. All ranks call it.
        Raises PeerLost."""
        if not self._is_first_here:
            self.all_gather(what, None)
        yield
        if self._is_first_here:
            self.all_gather(what, None)

    def all_gather(self, what: str, value: Any, *, within: float = math.inf) -> list[Any]:
        """Returns what every rank tells of `what`, by rank. `within`: seconds after which a rank that has told nothing counts
        as lost. Raises PeerLost, and FuyouError if the others tell of something else: no rank then waits for ever."""
        self._gathers += 1
        keys = [f"{self._gathers}/{rank}" for rank in range(self.count)]
        until = time.monotonic() + within
        with self._naming_what_is_lost():
            self._store.set(keys[self.rank], json.dumps([what, value]))
            for rank, key in enumerate(keys):
                while not self._store.check([key]):
                    self.check()
                    if time.monotonic() > until:
                        raise PeerLost(rank, "another box", f"it has not joined within {within:g} s")
                    time.sleep(_LOOK)
            answers = [json.loads(self._store.get(key)) for key in keys]
        for rank, (theirs, _) in enumerate(answers):
            if theirs != what:
                raise FuyouError(
                    f"{self.named(rank)} is at {theirs!r}, and {self.named(self.rank)} at {what!r}",
                    hint="start every rank with the same recipe and the same version of fuyou",
                )
        return [value for _, value in answers]

    def of_first(self, what: str, make: Callable[[], Any]) -> Any:
        """Returns what rank 0 makes, once for the whole run."""
        if what not in self._known:
            self._known[what] = self.all_gather(what, make() if self.is_first else None)[0]
        return self._known[what]

    def choose_alike(self, plan: Plan | None, owners: tuple[int, ...] = ()) -> Alike:
        """Returns what all plans have alike. `plan`: rank 0's, and whom it gave each stage."""
        mine = None if plan is None else asdict(Alike.of(plan, owners))
        self.alike = from_json(Alike, self.of_first("what plans have alike", lambda: mine))
        return self.alike

    def refuse_unlike(self, what: str, mine: Mapping[str, Any]) -> None:
        """Raises UsageError on every rank if one has other values than rank 0, and names the first of them."""
        first, *others = self.all_gather(what, dict(mine))
        for rank, theirs in enumerate(others, start=1):
            for key in sorted({*first, *theirs}):
                if first.get(key) != theirs.get(key):
                    raise UsageError(
                        f"{self.named(rank)} has another {key} than {self.named(0)}: {_shown(theirs.get(key))}, "
                        f"not {_shown(first.get(key))}",
                        hint="start every rank with the same recipe, data, versions and kind of device; only offload.dir, "
                        "offload.max_memory, output_dir and the folders of caches may differ from box to box",
                    )

    # ---- between steps -------------------------------------------------------------------------------------------

    def asking(self, asks: bool, tells: Sequence[int] = ()) -> tuple[int | None, list[list[int]]]:
        """Returns the first rank that asks for something now, if any, and what each tells beside. Raises PeerLost."""
        self.check()
        answers = self.ranks.gather([asks, *tells])
        return next((rank for rank, one in enumerate(answers) if one[0]), None), [one[1:] for one in answers]

    def named_by_all(self, commit: int) -> None:
        """Returns when every rank has named the commit of this number. The thread of commits calls it."""
        key = f"commit {commit}"
        with self._naming_what_is_lost():
            self._committing.add(key, 1)
            while self._committing.add(key, 0) < self.count:
                self.check()
                time.sleep(_NAMED)

    # ---- losing a peer -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises an error if a peer is lost."""
        if self._lost:
            raise self._lost[0]

    @contextmanager
    def _naming_what_is_lost(self) -> Iterator[None]:
        """Raises what is lost in place of an error of the store, whose holder has ended."""
        try:
            yield
        except RuntimeError as error:
            until = time.monotonic() + 2 * _BEAT
            while not self._lost and time.monotonic() < until:
                time.sleep(_LOOK)
            self.check()
            raise self._meeting_lost() from error

    def explained(self, error: BaseException) -> BaseException:
        """Returns the error that ends this rank. For a connection that failed, and for a launcher's signal, it is why, as soon
        as that is known."""
        if self.ends_together or not isinstance(error, PeerLost | Interrupted | KeyboardInterrupt):
            return error
        until = time.monotonic() + 2 * _REASON
        while not self._lost and time.monotonic() < until:
            time.sleep(_LOOK)
        return self._lost[0] if self._lost else error

    def _watch(self, peer: int) -> None:
        """Waits until a peer says farewell, or its connection closes."""
        import torch
        import torch.distributed as dist

        try:
            dist.recv(torch.zeros(1, dtype=torch.uint8), src=peer, group=self._farewells)
        except RuntimeError:
            self._lose(self._error_of(peer, "its connection closed: it was killed, or its box went away"))

    def _beat(self) -> None:
        """Counts this rank's heartbeats, and looks at those of the others."""
        seen = {peer: (b"", time.monotonic()) for peer in self._others}
        beats = 0
        while not self._is_over.wait(_BEAT):
            beats += 1
            try:
                self._beating.set(f"beat {self.rank}", str(beats))
                counts = {
                    peer: self._beating.get(f"beat {peer}") for peer in self._others if self._beating.check([f"beat {peer}"])
                }
            except RuntimeError:
                self._lose(self._meeting_lost())
                return
            self._answered = time.monotonic()
            for peer, (count, since) in seen.items():
                if counts.get(peer, b"") != count:
                    seen[peer] = counts[peer], time.monotonic()
                elif time.monotonic() - since > self._timeout:
                    self._lose(self._error_of(peer, f"no sign of life for {self._timeout} s: train.peer_timeout"))
                    return

    def _check_hearts(self) -> None:
        """Raises an error if a peer, or who holds the store, has ended."""

        def counts() -> dict[int, bytes]:
            with self._naming_what_is_lost():
                keys = {peer: f"beat {peer}" for peer in self._others}
                return {peer: self._store.get(key) if self._store.check([key]) else b"" for peer, key in keys.items()}

        before = counts()
        time.sleep(_SILENT)
        for peer, count in counts().items():
            if count == before[peer]:
                raise self._error_of(peer, "it ended while the ranks connected")

    def _watch_store(self) -> None:
        """Looks whether the heartbeat still comes through: who holds the store, the launcher or rank 0, may be frozen."""
        while not self._is_over.wait(_BEAT):
            if time.monotonic() - self._answered > self._timeout:
                self._lose(self._meeting_lost(f"has not answered for {self._timeout} s (train.peer_timeout)"))
                return

    def _meeting_lost(self, how: str = "is gone") -> FuyouError:
        """Returns the error for the store in which ranks meet. Which peer holds it may be unknown, but its box is not."""
        what = f"the store on {self._meeting} in which ranks meet, which the launcher holds, or rank 0 without one, {how}"
        return FuyouError(what, hint="start all ranks again: they go on from the last commit")

    def _lose(self, error: FuyouError) -> None:
        """Notes the first loss, and ends this process if it has not ended by itself some seconds later."""
        with self._lock:
            if self._lost or self._is_over.is_set():
                return
            self._lost.append(error)
        threading.Thread(target=self._end_late, args=(error,), daemon=True).start()

    def _error_of(self, peer: int, how: str) -> FuyouError:
        """Returns the error for a lost peer: its own, if it had the time to write it into the store."""
        key, until = f"failed {peer}", time.monotonic() + _REASON
        with suppress(RuntimeError):
            store = self._store.clone()
            while not (is_written := store.check([key])) and time.monotonic() < until:
                time.sleep(_LOOK)
            if is_written:
                failure = json.loads(store.get(key))
                error = FuyouError(f"{self.named(peer)} has failed: {one_line(failure['message'])}", hint=failure["hint"])
                error.exit_code = int(failure["code"])
                return error
        return PeerLost(peer, self.hosts[peer], how)

    def _end_late(self, error: FuyouError) -> None:
        if not self._is_over.wait(_GRACE):
            os.write(2, f"error: {error.message}\n".encode(errors="replace"))
            os._exit(error.exit_code)

    # ---- the end -------------------------------------------------------------------------------------------------

    def part(self, error: BaseException | None) -> None:
        """Says farewell. A rank that has failed says why, and leaves its connections to the system: they close."""
        self._is_over.set()
        if error is not None and not self.ends_together:
            if error not in self._lost:
                self._say_why(error)
                self._linger()
            return
        import torch
        import torch.distributed as dist

        with suppress(RuntimeError):
            for peer in self._others:
                dist.send(torch.ones(1, dtype=torch.uint8), dst=peer, group=self._farewells)
        for thread in (*self._partings, *self._watches):
            thread.join(timeout=_GRACE)

    def _linger(self) -> None:
        """Gives the others the time to read what they have been told: the first rank may hold the store."""
        until = time.monotonic() + _LINGER
        for thread in self._partings if self.is_first else ():
            thread.join(timeout=max(0.0, until - time.monotonic()))

    def _say_why(self, error: BaseException) -> None:
        failure: dict[str, Any] = {"message": f"{type(error).__name__}: {error}", "hint": None, "code": 1}
        if isinstance(error, FuyouError):
            failure = {"message": error.message, "hint": error.hint, "code": error.exit_code}
        with suppress(RuntimeError):
            self._store.set(f"failed {self.rank}", json.dumps(failure))


def box_sums(boxes: Sequence[object], of_ranks: Sequence[Sequence[int]]) -> list[tuple[int | None, int, int, int]]:
    """Returns of each box its limit of bytes to write (None: there is none), and the sums of what its ranks tell behind theirs:
    bytes written, those once another step is over, and those of a step. `boxes`: of all ranks."""
    sums = []
    for first, box in enumerate(boxes):
        if boxes.index(box) == first:
            on_box = [one for one, other in zip(of_ranks, boxes, strict=True) if other == box]
            written, due, step = (sum(one[number] for one in on_box) for number in (1, 2, 3))
            sums.append((of_ranks[first][0] or None, written, due, step))
    return sums


def _shown(value: Any) -> str:
    text = one_line(json.dumps(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- joining -----------------------------------------------------------------------------------------------------------


@contextmanager
def _told_late(text: str, say: Callable[[str], None] | None) -> Iterator[None]:
    """Says what is waited for inside, if that takes long."""
    timer = threading.Timer(_LATE, say or (lambda text: None), [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def watched_launcher(environ: Mapping[str, str]) -> Callable[[], None]:
    """Returns what raises FuyouError once the launcher of this rank is gone, which nobody else would notice before ranks are
    connected: of `--nproc`, or torchrun. Whoever starts a rank by hand may leave it alone."""
    launcher = environ.get(LAUNCHER) or (str(os.getppid()) if _OF_TORCHRUN in environ else None)

    def look() -> None:
        if launcher is not None and launcher != str(os.getppid()):
            raise FuyouError("the launcher of this rank is gone", hint="start all ranks again: they go on from the last commit")

    return look


def _joined_store(place: Place) -> Any:
    """Returns the store that all ranks meet in. Raises UsageError if they do not come."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    look = watched_launcher(os.environ)
    try:
        store, _, _ = in_thread(lambda: next(rendezvous("env://", timeout=_JOINING)), look=look)
        name = _meeting_of(place, store, look)
    except (RuntimeError, OSError) as error:
        raise UsageError(
            f"rank {place.rank} of {place.count} cannot join at {place.address}:{place.port}: {one_line(str(error))}",
            hint="start all ranks, and let the boxes reach that port",
        ) from error
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _meeting_of(place: Place, store: Any, look: Callable[[], None]) -> str:
    """Returns a name that only these processes know, for what they tell in the store: a launcher that starts ranks again may
    keep its store, with what the ranks before have told. Each rank tells a word of its own, and takes the name that rank 0
    gives for that word."""

    def until_there(keys: list[str], work: Callable[[], None] = lambda: None) -> None:
        until = time.monotonic() + _JOINING.total_seconds()
        while not store.check(keys):
            look()
            work()
            if time.monotonic() > until:
                raise RuntimeError(f"not all have joined within {_JOINING.total_seconds():g} s")
            time.sleep(_LOOK)

    word = os.urandom(8).hex()
    if place.rank == 0:
        words = dict[int, str]()

        def give_name() -> None:
            for rank in range(1, place.count):
                if store.check([f"word {rank}"]) and (other := store.get(f"word {rank}").decode()) != words.get(rank):
                    words[rank] = other
                    store.set(f"name for {other}", word)

        until_there([f"{word} {rank}" for rank in range(1, place.count)], give_name)
        return word
    store.set(f"word {place.rank}", word)
    until_there([f"name for {word}"])
    name: str = store.get(f"name for {word}").decode()
    store.set(f"{name} {place.rank}", "")
    return name


def _box() -> list[str]:
    """Returns the name of this box, and what tells it from another of this name. Ranks on one box share its memory, drives and
    network. Containers beside one another are boxes of their own."""
    names = [socket.gethostname()]
    for path, read in (("/proc/sys/kernel/random/boot_id", Path.read_text), ("/proc/self/ns/net", os.readlink)):
        with suppress(OSError):
            names.append(str(read(Path(path))).strip())
    return names


def _joined_gloo(place: Place, store: Any, hosts: Sequence[str], *, one_box: bool) -> tuple[Ranks, Ranks, dist.ProcessGroup]:
    """Connects every rank with every other one. Returns what they compute a step by, what they exchange gradients by beside it,
    and the group in which they say farewell."""
    import torch.distributed as dist

    from ..engine.ranks import Ranks

    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := _interface(place, one_box=one_box)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    look = watched_launcher(os.environ)
    try:
        # nothing goes through the first group: it finds out in time whether the boxes reach one another
        in_thread(
            lambda: dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.count, timeout=_CONNECTING),
            look=look,
        )
        of_steps, beside, farewells = in_thread(
            lambda: [dist.new_group(backend="gloo", timeout=_FOREVER) for _ in range(3)], look=look
        )
        return Ranks(of_steps, hosts), Ranks(beside, hosts), farewells
    except RuntimeError as error:
        raise UsageError(
            f"rank {place.rank} on {hosts[place.rank]} cannot connect with the others: {one_line(str(error))}",
            hint="GLOO_SOCKET_IFNAME names the network interface that the boxes reach one another by",
        ) from error


def _interface(place: Place, *, one_box: bool) -> str:
    """Returns the network interface that the route to the master begins at, or an empty string. gloo would take the one of the
    host's own name, which many a box has on its loopback. `one_box`: all ranks are on this box."""
    if one_box:
        return "lo"
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place.address, place.port))  # sends nothing
        if (name := _interface_of(probe, probe.getsockname()[0])) != "lo":
            return name
        probe.connect(("192.0.2.1", 9))  # an address of nobody: the way out of this box
        return _interface_of(probe, probe.getsockname()[0])
    return ""


def _interface_of(probe: socket.socket, address: str) -> str:
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # it has no address
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
