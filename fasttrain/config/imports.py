"""Import what a config names: the trainer class and the plugins."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import time
from types import ModuleType
from typing import Any

from fasttrain.config.nodes import Place, Scalar, Value
from fasttrain.config.settings import Settings
from fasttrain.errors import Problem, did_you_mean


class Importer:
    """Imports modules of the user, and notes whether they brought torch along."""

    def __init__(self, problems: list[Problem], notes: list[str]) -> None:
        self.problems, self.notes = problems, notes
        here = os.getcwd()
        if here not in sys.path and "" not in sys.path:
            sys.path.insert(0, here)

    def refuse(self, key: str, place: Place, message: str, suggestion: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(key=key, message=message, suggestion=suggestion, file=place.file, line=place.line))

    def module(self, key: str, name: str, place: Place) -> ModuleType | None:
        """A module, or None and a problem that names key, module and cause."""
        had_torch, started_at = "torch" in sys.modules, time.perf_counter()
        try:
            module = importlib.import_module(name)
        # Whatever a user's module does when it is imported, the config has a line to blame.
        except (Exception, SystemExit) as error:
            cause = f"{type(error).__name__}: {error}"
            hint = f"run 'python -c \"import {name}\"' to see where"
            if isinstance(error, ModuleNotFoundError):
                missing = error.name or ""
                if name == missing or name.startswith(f"{missing}."):
                    hint = f"start in the folder that holds '{missing.partition('.')[0]}', or install it"
                elif "." in missing and missing.partition(".")[0] in sys.modules:
                    hint = f"'{missing.partition('.')[0]}' is there without it: look at the spelling, or at its version"
                else:
                    hint = f"install '{missing.partition('.')[0]}'"
            elif isinstance(error, SyntaxError) and error.filename:
                hint = f"see {error.filename}:{error.lineno}"
            self.refuse(key, place, f"the module '{name}' cannot be imported: {cause}", hint)
            return None
        if not had_torch and "torch" in sys.modules:
            elapsed_s = time.perf_counter() - started_at
            self.notes.append(
                f"{key}: importing '{name}' imported torch ({elapsed_s:.1f} s); "
                "with 'from fasttrain.lazy import torch' there, configs are checked without it"
            )
        return module

    def trainer(self, node: Scalar | Value) -> type | None:
        """The class that `trainer: module:Class` names, or None and a problem."""
        if isinstance(node, Value):
            self.refuse("trainer", node.place, f"expects 'module:Class', got {node.value!r}", "give the name as text")
            return None
        text = node.text.strip()
        name, colon, attribute = text.partition(":")
        if not (colon and name and attribute):
            left, _, right = text.strip(":").rpartition(".")
            hint = f"write {left}:{right}" if left and right else "write module:Class"
            self.refuse("trainer", node.place, f"expects 'module:Class', got '{node.text}'", hint)
            return None
        module = self.module("trainer", name, node.place)
        if module is None:
            return None
        found: Any = module
        for part in attribute.split("."):
            names = [n for n, value in vars(found).items() if isinstance(value, type) and not n.startswith("_")]
            found = getattr(found, part, None)
            if found is None:
                near = difflib.get_close_matches(part, names, n=1, cutoff=0.6)
                hint = did_you_mean(part, near or [n for n in names if hasattr(getattr(module, n, None), "Config")])
                self.refuse("trainer", node.place, f"the module '{name}' has no '{attribute}'", hint)
                return None
        if not isinstance(found, type):
            self.refuse("trainer", node.place, f"'{text}' is no class but a {type(found).__name__}", "name a class")
            return None
        return found

    def settings_of(self, trainer: type | None, place: Place) -> type[Settings] | None:
        """The settings class of a trainer, or None and a problem."""
        config = getattr(trainer, "Config", None)
        if config is None:
            return Settings
        if not (isinstance(config, type) and issubclass(config, Settings)):
            name = getattr(trainer, "__qualname__", trainer)
            self.refuse(
                "trainer",
                place,
                f"{name}.Config does not derive from Trainer.Config",
                f"write 'class Config(Trainer.Config)' in {name}, with @dataclass(frozen=True, kw_only=True)",
            )
            return None
        return config
