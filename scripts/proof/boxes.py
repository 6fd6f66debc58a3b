"""Makes two boxes of one machine: each has a network, a host name, a memory group and processor cores of its own, and the link
between them is held at a rate. It needs root; LimitsUnavailable says so."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .both_sides import child_environment
from .control_groups import Group, LimitsUnavailable, group
from .watch import MEMORY_SECONDS, memory_of

PORT = 29517
RANKED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Box:
    """Holds one box's host name, the address that the other reaches it by, and its end of the link."""

    name: str
    address: str
    interface: str


BOXES = (Box("fuyou-box0", "10.213.77.1", "fuyou-link0"), Box("fuyou-box1", "10.213.77.2", "fuyou-link1"))


class Link:
    """Controls what connects the boxes."""

    def hold(self, rate: float | None) -> None:
        """Lets at most `rate` bytes a second pass each way; None: as many as can."""
        for box in BOXES:
            _inside(box, "ip", "link", "set", box.interface, "up")
            _inside(box, "tc", "qdisc", "del", "dev", box.interface, "root", check=False)
            if rate is not None:
                burst = max(16 << 10, int(rate / 50))
                limits = ("rate", f"{int(8 * rate)}bit", "burst", str(burst), "latency", "200ms")
                _inside(box, "tc", "qdisc", "add", "dev", box.interface, "root", "tbf", *limits)

    def sent(self) -> int:
        """Returns the bytes that have passed the busier way so far."""
        path = "/sys/class/net/{}/statistics/tx_bytes"
        return max(int(_inside(box, "cat", path.format(box.interface))) for box in BOXES)

    def cut(self) -> None:
        """Lets nothing pass any more, without a word to either end."""
        for box in BOXES:
            _inside(box, "ip", "link", "set", box.interface, "down")  # netem is in few kernels


@contextmanager
def two_boxes() -> Iterator[Link]:
    """Makes both boxes and their link, and removes them. Raises LimitsUnavailable where that is not permitted."""
    with ExitStack() as stack:
        try:
            for box in BOXES:
                _run("ip", "netns", "del", box.name, check=False)  # left behind by a script that was killed
                _run("ip", "netns", "add", box.name)
                stack.callback(_run, "ip", "netns", "del", box.name, check=False)
            one, other = BOXES
            peer = ("peer", "name", other.interface, "netns", other.name)
            _run("ip", "link", "add", one.interface, "netns", one.name, "type", "veth", *peer)
            for box in BOXES:
                _inside(box, "ip", "address", "add", f"{box.address}/24", "dev", box.interface)
                _inside(box, "ip", "link", "set", box.interface, "up")
                _inside(box, "ip", "link", "set", "lo", "up")
            Link().hold(1e9)
            Link().hold(None)
        except (OSError, subprocess.CalledProcessError) as error:
            why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise LimitsUnavailable(f"no network namespaces with tc here: {why}; run as root, with iproute2") from error
        yield Link()


def _inside(box: Box, *words: str, check: bool = True) -> str:
    return _run("ip", "netns", "exec", box.name, *words, check=check)


def _run(*words: str, check: bool = True) -> str:
    return subprocess.run(words, check=check, capture_output=True, text=True).stdout


# ---- commands ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ended:
    """Says how a rank's command ended. `peak`: the most anonymous and kernel bytes of its box, `killed`: processes of it that
    were killed for memory."""

    code: int
    text: str
    seconds: float
    peak: int
    killed: int


class Rank:
    """Controls one rank's command, in its box."""

    def __init__(
        self, box: Box, command: Sequence[str], environment: Mapping[str, str], output: Path, held: Group, cores: set[int]
    ) -> None:
        self._held, self._output, self._began, self._peak, self._end = held, output, time.monotonic(), 0, 0.0
        named = f"hostname {box.name} && exec {shlex.join(command)}"
        words = ["ip", "netns", "exec", box.name, "unshare", "--uts", "sh", "-c", named]

        def enter() -> None:
            held.enter()
            os.sched_setaffinity(0, cores)

        clean = {name: value for name, value in child_environment().items() if name not in RANKED}
        with output.open("wb") as file:
            self._child = subprocess.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=clean | dict(environment),
                preexec_fn=enter, start_new_session=True,
            )  # fmt: skip

    def is_over(self) -> bool:
        """Tells whether it has ended, and looks at its memory."""
        pids = self._held.pids()
        self._peak = max(self._peak, memory_of(pids)[0] + self._held.kernel_bytes())
        if self._child.poll() is None:
            return False
        self._end = self._end or time.monotonic()
        return True

    def ended(self) -> Ended:
        assert self.is_over()
        text = self._output.read_text(encoding="utf-8", errors="replace")
        return Ended(self._child.returncode, text, self._end - self._began, self._peak, self._held.kills())

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        for pid in self._held.pids():  # torchrun gives ranks sessions of their own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def ranks(
    words: Sequence[str], folder: Path, *, memory: int | None = None, torchrun: bool = False, kept: Path | None = None,
    program: Sequence[str] = ("-m", "fuyou_cli"), names_interface: bool = False,
) -> Iterator[list[Rank]]:  # fmt: skip
    """Starts `fuyou WORDS` as one rank on each box, each within `memory` bytes. `torchrun`: by that, as people do; otherwise by
    the variables that it sets. `kept`: where boxes keep what they measure; `program`: what Python runs in place of
    fuyou; `names_interface`: to gloo, for what does not find it. What still runs at the end is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    allowed = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        began = []
        for number, box in enumerate(BOXES):
            held = stack.enter_context(group(memory=memory, name=f"{box.name}-{os.getpid()}"))
            command, environment = [sys.executable, "-P", *program, *words], dict[str, str]()
            if torchrun:
                place = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
                meeting = ["--master-addr", BOXES[0].address, "--master-port", str(PORT)]
                command = [sys.executable, "-P", "-m", "torch.distributed.run", *place, *meeting, "-m", "fuyou_cli", *words]
            else:
                values = (str(number), "2", "0", BOXES[0].address, str(PORT))
                environment = dict(zip(RANKED, values, strict=True))
            environment |= {"GLOO_SOCKET_IFNAME": box.interface} if names_interface else {}
            environment |= {} if kept is None else {"XDG_CACHE_HOME": str(kept / box.name)}
            cores = set(allowed[number :: len(BOXES)] or allowed)
            began.append(Rank(box, command, environment, folder / f"{number}.txt", held, cores))
            stack.callback(began[-1].kill)
        yield began


def wait(began: Sequence[Rank], seconds: float) -> list[Ended] | None:
    """Waits until all ranks have ended, and returns how; None if some have not within so many seconds."""
    until = time.monotonic() + seconds
    while not all([rank.is_over() for rank in began]):
        if time.monotonic() > until:
            return None
        time.sleep(MEMORY_SECONDS)
    return [rank.ended() for rank in began]
