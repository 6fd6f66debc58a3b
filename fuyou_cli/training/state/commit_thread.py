"""Makes states durable beside the run: one thread flushes what was written, then writes the manifest that names it.

A crash is safe because of this order: every byte is written before `begin`, then flushed, and only then its manifest replaces
the one before. A failed flush is not tried again, because the kernel may have dropped what it could not write and report
success the next time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from ...core.process import SILENT, Patience
from .stored import Manifest

_SLICE = 0.2  # seconds; a wait returns to Python this often, so that Ctrl-C works


class Commits:
    """Commits manifests in order. `flush` returns when the data is on stable storage, `name` when a manifest is."""

    def __init__(
        self,
        *,
        flush: Callable[[], None],
        name: Callable[[Manifest], None],
        durable: Manifest | None = None,
        patience: Patience = SILENT,
    ) -> None:
        self._flush, self._name, self._patience = flush, name, patience
        # `last` is committed. The thread sets it, so even a signal handler may read it. `newest` is committed or being
        # committed.
        self.last = self.newest = durable
        self.has_failed = False  # and the failure was raised
        self._failure: BaseException | None = None  # after it nothing is flushed or named
        self._under_way: Future[None] | None = None  # the last commit begun; the others end before it
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fuyou-commit")

    def restart(self, durable: Manifest) -> None:
        """Resumes from this state. No commit may be under way."""
        assert self._under_way is None
        self.last = self.newest = durable

    def begin(self, manifest: Manifest) -> None:
        """Begins to commit. The data that the manifest names is written, and must stay as it is until the commit is durable."""
        self._raise_failure()
        self.newest = manifest
        self._under_way = self._thread.submit(self._commit, manifest)

    def durable(self) -> Manifest | None:
        """Returns the newest committed state, without waiting. Raises the failure of a commit at every call."""
        self._raise_failure()
        return self.last

    def finish(self) -> None:
        """Waits until every commit that was begun is durable."""
        waiting = self._patience.waiting(f"the commit of step {self.newest.step if self.newest is not None else 0}")
        while self._under_way is not None and not self._under_way.done():
            wait_for([self._under_way], timeout=_SLICE)
            waiting.look()
        self._raise_failure()

    def close(self) -> None:
        """Waits until the thread has ended. A commit that has not begun never will."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _commit(self, manifest: Manifest) -> None:
        if self._failure is not None:
            return
        try:
            self._flush()
            self._name(manifest)
        except BaseException as error:
            self._failure = error
            raise
        self.last = manifest

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self.has_failed = True
            raise self._failure
