"""What the thread that launches a device's compute does itself with the host's memory, by kind, in bytes read and written.

A device with memory of its own computes while this thread prepares what it is asked next, and stands still where that takes
longer. So each of these bytes is charged in a plan and counted in a run (`engine/host_work`), by the same names.
"""

from __future__ import annotations

from typing import Literal

HostWorkKind = Literal[
    "inputs staged",  # copied to pinned memory, from where they go up
    "boundaries kept",  # copied to where they rest until backward
    "results placed",  # copied from pinned memory to where the whole batch is, pages that are there
    "results on new pages",  # the same where the kernel has to clear the pages first
    "added",  # to a sum in host memory
    "looked at",  # read once: squares, checksums
]
