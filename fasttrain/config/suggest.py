"""What an unknown key was probably meant to be, and where it belongs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from fasttrain.config import kinds
from fasttrain.core.slots import SLOTS
from fasttrain.errors import ConfigError, FasttrainError, did_you_mean
from fasttrain.registry import find, names

# What other trainers call it.
_ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "wd": "optimizer.weight_decay",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "num_steps": "steps",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "mixed_precision": "precision",
    "amp": "precision",
    "lr_scheduler": "schedule",
    "scheduler": "schedule",
    "gradient_accumulation_steps": "accumulation",
    "grad_accumulation": "accumulation",
    "max_grad_norm": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "gradient_checkpointing": "activation_checkpointing",
    "ema": "weight_averaging",
    "output_dir": "run.dir",
    "logging_steps": "log.every",
    "save_steps": "checkpoint.every",
    "eval_steps": "evaluate.every",
}

# What others call a key, wherever a strategy or a section has it.
_SYNONYMS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "r": "rank",
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "modules_to_save": "train",
    "max_grad_norm": "max_norm",
    "clip_value": "max_value",
    "micro_batch_size": "size",
    "num_warmup_steps": "warmup",
    "warmup_ratio": "warmup",
    "min_lr_ratio": "final",
}


def config_of(slot: str, name: str) -> type | None:
    """The settings of a strategy, or None where it cannot be imported."""
    try:
        return find(slot, name).Config
    except (FasttrainError, ImportError, AttributeError):
        return None


def strategies_with(slot: str, key: str) -> list[str]:
    """The strategies of a slot that have a key."""
    return [
        name for name in names(slot) if (config := config_of(slot, name)) is not None and key in kinds.settable(config)
    ]


def paths(settings: type, prefix: str = "") -> list[str]:
    """Every key of a dataclass and of its sections, as dotted paths."""
    found = []
    try:
        types = kinds.field_types(settings)
    except ConfigError:
        types = {}
    for name in kinds.settable(settings):
        found.append(f"{prefix}{name}")
        section = kinds.section_of(types.get(name, Any))
        if section is not None and section is not settings:
            found += paths(section, f"{prefix}{name}.")
    return found


class Suggester:
    """Knows the settings class and the chosen strategies; looks further only when asked about an unknown key."""

    def __init__(self, settings: type, chosen: Mapping[str, str], is_sure: bool) -> None:
        self.settings, self.chosen, self.is_sure = settings, chosen, is_sure

    def everything(self) -> list[str]:
        """All dotted paths of the settings and of every strategy."""
        found = [*paths(self.settings), *SLOTS]
        for slot in SLOTS:
            for name in names(slot):
                config = config_of(slot, name)
                found += [f"{slot}.{key}" for key in kinds.settable(config)] if config is not None else []
        return list(dict.fromkeys(found))

    def unknown(self, key: str, path: tuple[str | int, ...], cls: type) -> tuple[str, str] | None:
        """Message and suggestion for a key that a section does not have.

        None: the trainer class could not be imported, and the key may well be one of its own.
        """
        known = list(kinds.settable(cls))
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        section = f"{where}={self.chosen[where]}" if where in self.chosen else f"'{where}'"
        message = f"{section} has no key '{key}'" if path else "there is no such setting or slot"
        if not path:
            known += [*SLOTS, "extends"]
        hint = self.hint(key, where, known)
        if not path and not self.is_sure and not _near(key, known, 0.8) and key.partition(".")[0] not in known:
            return None
        return message, hint

    def hint(self, key: str, where: str, known: Iterable[str]) -> str:
        """What an unknown key of a section was probably meant to be."""
        word = key.replace("-", "_").strip().lower()
        known = list(known)
        if word in known:
            return f"did you mean '{word}'?"
        section, dot, rest = word.partition(".")
        if dot and section in known:
            nested = "".join(f"{{{part}: " for part in rest.split(".")) + "..." + "}" * (rest.count(".") + 1)
            return f"dots are for the command line; write '{section}: {nested}'"
        if where and _SYNONYMS.get(word) in known:
            return f"did you mean '{_SYNONYMS[word]}'?"
        near = _near(word, known, 0.8)
        if near:
            return f"did you mean '{near}'?"
        if where in SLOTS:
            owners = strategies_with(where, word)
            if owners:
                return f"it belongs to {' or '.join(f'{where}={owner}' for owner in owners)}"
        homes = [slot for slot in SLOTS if word in names(slot)] if not where else []
        if homes:
            return f"it is a strategy: write {' or '.join(f'{slot}={word}' for slot in homes)}"
        homes = [_ELSEWHERE[word]] if word in _ELSEWHERE else []
        homes = homes or [path for path in self.everything() if path.rpartition(".")[2] == word]
        if homes:
            return _belongs(homes)
        if _near(word, known, 0.6):
            return did_you_mean(word, known)
        leaves: dict[str, list[str]] = {}
        for path in self.everything():
            leaves.setdefault(path.rpartition(".")[2], []).append(path)
        far = _near(word, leaves, 0.72)
        return _belongs(leaves[far]) if far else did_you_mean(word, known)


def _near(word: str, known: Iterable[str], cutoff: float) -> str | None:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def _belongs(homes: list[str]) -> str:
    if len(homes) == 1 and "." not in homes[0]:
        return f"it belongs at the top level: '{homes[0]}'"
    return "it belongs in its section: " + " or ".join(f"'{home}'" for home in homes[:3])
