"""What a run takes from earlier compilations and leaves to later ones."""

from __future__ import annotations

import sys
from pathlib import Path

from fasttrain.compiler.artifacts import Artifacts, load_artifacts, save_artifacts
from fasttrain.compiler.cache import Cache, CacheError, own_cache, use_cache
from fasttrain.lazy import torch

# The folder of a project's cache, beside its runs.
FOLDER = ".compile"


class Kept:
    """The cache and the artifacts of one run. Whatever fails with them is told, and the run compiles by itself.

    `cache`: `auto` (in `project_dir`; where there is none, torch's own place), a path, or `None` for torch's own place.
    `artifacts`: a file that is loaded now if it is there, and written at the end by the process that `writes`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        cache: str | None = "auto",
        project_dir: Path | None = None,
        artifacts: str | None = None,
        writes: bool = True,
    ) -> None:
        self.device = device
        self.cache: Cache | None = None
        self.loaded: Artifacts | None = None
        self._path = None if artifacts is None else Path(artifacts)
        self._writes = writes
        self._ended = False
        self._failed: list[str] = []
        folder = Path(cache) if cache not in (None, "auto") else None
        if cache == "auto" and project_dir is not None:
            folder = project_dir / FOLDER
        own_cache()  # what an earlier run in this process left, if it never ended
        try:
            if folder is not None:
                self.cache = use_cache(folder, device)
        except CacheError as error:
            self._failed.append(str(error))
        try:
            if self._path is not None:
                self.loaded = load_artifacts(self._path, device)
        except CacheError as error:
            self._failed.append(str(error))

    def notes(self) -> list[str]:
        """Where compiled code comes from, for the head of a run."""
        if torch.compiler.config.force_disable_caches:
            return [*self._failed, "nothing that is compiled is kept (TORCHINDUCTOR_FORCE_DISABLE_CACHES)"]
        told = list(self._failed)
        if self.cache is not None:
            told.append(f"compiled code is kept in {self.cache}")
        if self.loaded is not None:
            told.append(f"compiled code was taken from {self.loaded}")
        return told

    def end(self) -> None:
        """Write the artifacts, if anything new was compiled, and put torch's place back; once."""
        if self._ended:
            return
        self._ended = True
        try:
            if self._path is not None and self._writes:
                save_artifacts(self._path, self.device, self.loaded)
        except CacheError as error:
            sys.stderr.write(f"{error}\n")
        finally:
            if self.cache is not None:
                own_cache()
