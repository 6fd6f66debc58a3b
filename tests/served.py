"""Reads and tokenises in the process that asks, by the worker's own entries: its own process takes a second to start."""

from __future__ import annotations

import json
from typing import Any

from fuyou_cli.data import cache, worker


def serve(request: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Stands in for `cache._serve`, and replies as over its pipe."""
    asked, told = json.loads(cache.request_line(request)), list[str]()
    work = worker.continue_prompts if "prompts" in asked else worker.build
    worker._answered(lambda: work(asked), told.append)
    return cache.read_reply(told[0])
