"""Where a run's model and tokenizer come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UsageError

if TYPE_CHECKING:
    from ..recipe.schema import Recipe

Progress = Callable[[str, int, int], None]  # what is fetched, the bytes so far and in all


class Hub:
    """Model and tokenizer of a recipe as folders, fetched where they are not here."""

    def __init__(self, recipe: Recipe, *, say: Callable[[str], None], progress: Progress) -> None:
        self._model, self._tokenizer, self._say, self._progress = recipe.model, recipe.tokenizer, say, progress
        self._found: Path | None = None

    def model(self, *, need_weights: bool) -> Path:
        """The model's folder; with its weights only when asked for."""
        found = self._resolve(self._model.name_or_path, revision=self._model.revision, need_weights=need_weights)
        if self._found is not None and found != self._found:
            raise UsageError(f"{self._model.name_or_path}: changed while it was read", hint="Run the same command again.")
        self._found = found
        return found

    def tokenizer(self, model_dir: Path, *, needed: bool) -> Path:
        """The tokenizer's folder: the model's unless the recipe names another."""
        named = self._tokenizer.name_or_path
        if named is None and not needed:
            return model_dir
        return self._resolve(named or str(model_dir), tokenizer_only=True)

    def _resolve(self, name: str, **options: Any) -> Path:
        from ..checkpoint.hub import Download, resolve

        def announce(download: Download) -> None:
            self._say(f"downloading {download.name}: {download.files} files, {download.total:,} bytes")

        def progress(done: int, total: int) -> None:
            self._progress(f"downloading {name}", done, total)

        trusted = self._model.trust_remote_code
        return resolve(name, trust_remote_code=trusted, announce=announce, progress=progress, **options)
