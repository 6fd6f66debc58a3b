"""Makes states durable beside the run: one thread flushes what was written, then names it.

The order is what a crash relies on: every byte of a generation has been written when `begin` is called, the flush puts it
on stable storage, and only then its manifest replaces the one before. A flush that failed is not tried again: the kernel
may have dropped what it could not write, and would call the next one a success.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from ...core.patience import SILENT, Patience
from .manifest import Manifest

_SLICE = 0.2  # seconds: a wait comes back to Python this often, so that Ctrl-C works


class Commits:
    """`flush` returns when the store's data is on stable storage, `name` when a manifest is. `durable`: what is committed
    already."""

    def __init__(
        self,
        *,
        flush: Callable[[], None],
        name: Callable[[Manifest], None],
        durable: Manifest | None = None,
        patience: Patience = SILENT,
    ) -> None:
        self._flush, self._name, self._patience = flush, name, patience
        self.last = self.newest = durable  # committed, and as far as anybody has looked; committed or being committed
        self._failure: BaseException | None = None
        self._broken = False  # in the thread: nothing is flushed or named behind a failure
        self._under_way: deque[tuple[Manifest, Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fuyou-commit")

    def restart(self, durable: Manifest) -> None:
        """A run goes on from this state. Nothing is under way."""
        assert not self._under_way
        self.last = self.newest = durable

    def begin(self, manifest: Manifest) -> None:
        """What the manifest names is written, and stays as it is until that is durable."""
        self._raise_failure()
        self.newest = manifest
        self._under_way.append((manifest, self._thread.submit(self._commit, manifest)))

    def durable(self) -> Manifest | None:
        """The newest state that is committed. Never waits. Raises what kept one from it, again and again."""
        while self._under_way and self._under_way[0][1].done():
            manifest, done = self._under_way[0]
            self._failure = self._failure or done.exception()
            if self._failure is None:
                self.last = manifest
            self._under_way.popleft()
        self._raise_failure()
        return self.last

    def seen(self) -> Manifest | None:
        """The newest state that is committed, whatever became of those behind it. Changes nothing, so that a signal's handler
        may ask amid any of the rest."""
        last = self.last
        for manifest, done in tuple(self._under_way):
            if not done.done() or done.cancelled() or done.exception() is not None:
                break
            last = manifest
        return last

    def finish(self) -> None:
        """Returns when everything that was begun is committed."""
        waiting = self._patience.waiting(f"the commit of step {self.newest.step if self.newest is not None else 0}")
        while self._under_way:
            wait_for([done for _, done in self._under_way], timeout=_SLICE)
            waiting.look()
            self.durable()

    @property
    def is_busy(self) -> bool:
        """Whether something is being committed, as far as anybody has looked."""
        return bool(self._under_way)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def close(self) -> None:
        """Returns when the thread has ended; what had not begun never will."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _commit(self, manifest: Manifest) -> None:
        if self._broken:
            raise RuntimeError("a commit before this one failed")  # which is the one that is told
        self._broken = True
        self._flush()
        self._name(manifest)
        self._broken = False

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
