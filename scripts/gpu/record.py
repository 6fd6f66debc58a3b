"""What one stage has found so far, in a file that is whole at any moment: a stage that is ended leaves what it had."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from proof.verdicts import Row


def write_json(path: Path, content: object) -> None:
    """Replaces `path` at once."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


class Record:
    """Rows, and what else is worth keeping under a name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.values: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._write()

    def keep(self, name: str, value: object) -> None:
        self.values[name] = value
        self._write()

    def _write(self) -> None:
        write_json(self.path, {"rows": [asdict(row) for row in self.rows], "values": self.values})


def read_record(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Rows and values of a stage; nothing where it did not begin."""
    if not path.exists():
        return [], {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**row) for row in content["rows"]], content["values"]
