"""Makes states durable beside the run: one thread flushes what was written, then writes the manifest that names it.

A crash relies on the order: every byte is written when `begin` is called, flushed, and only then its manifest replaces the one
before. A flush that failed is not tried again: the kernel may have dropped what it could not write, and calls the next one a
success.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from ...core.patience import SILENT, Patience
from .stored import Manifest

_SLICE = 0.2  # seconds: a wait comes back to Python this often, so that Ctrl-C works


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
        # Committed (the thread says so: even a signal's handler may look); committed or being committed.
        self.last = self.newest = durable
        self.has_failed = False  # and somebody was told
        self._failure: BaseException | None = None  # nothing is flushed or named behind it
        self._under_way: Future[None] | None = None  # the last that was begun: the others end before it
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fuyou-commit")

    def restart(self, durable: Manifest) -> None:
        """Resumes from this state. Nothing is under way."""
        assert self._under_way is None
        self.last = self.newest = durable

    def begin(self, manifest: Manifest) -> None:
        """Begins to commit. What the manifest names is written, and stays as it is until that is durable."""
        self._raise_failure()
        self.newest = manifest
        self._under_way = self._thread.submit(self._commit, manifest)

    def durable(self) -> Manifest | None:
        """Returns the newest state that is committed, without waiting. Raises what kept one from it, again and again."""
        self._raise_failure()
        return self.last

    def finish(self) -> None:
        """Returns when everything that was begun is committed."""
        waiting = self._patience.waiting(f"the commit of step {self.newest.step if self.newest is not None else 0}")
        while self._under_way is not None and not self._under_way.done():
            wait_for([self._under_way], timeout=_SLICE)
            waiting.look()
        self._raise_failure()

    @property
    def is_busy(self) -> bool:
        return self._under_way is not None and not self._under_way.done()

    def close(self) -> None:
        """Returns when the thread has ended; what had not begun never will."""
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
