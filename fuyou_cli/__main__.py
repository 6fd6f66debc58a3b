"""`python -m fuyou_cli`."""

from __future__ import annotations

from fuyou_cli.cli.app import main

if __name__ == "__main__":
    main()
