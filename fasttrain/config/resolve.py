"""From layers to a resolved config: choose the classes by name, then convert each section by its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttrain.config import dump, interpolate
from fasttrain.config.convert import BAD, Converter
from fasttrain.config.imports import Importer
from fasttrain.config.keywords import slot_node
from fasttrain.config.merge import empty_layer, extended, file_layer, layered
from fasttrain.config.nodes import PYTHON, List, Map, Place, Scalar, describe, from_python, is_null
from fasttrain.config.overrides import override_layer
from fasttrain.config.settings import Settings
from fasttrain.config.suggest import Suggester, strategies_with
from fasttrain.core.slots import SLOTS
from fasttrain.core.strategy import Strategy, conflicts
from fasttrain.errors import ConfigError, ConfigErrors, Problem, did_you_mean
from fasttrain.registry import find, names


class Problems(list[Problem]):
    """All problems of a config. `notes`: what else is worth knowing, such as a module that imported torch."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []


@dataclass(frozen=True)
class Resolved:
    """A config with every choice made.

    `settings` is an instance of `trainer.Config`, or of `Settings`. `strategies` and `names` hold the slots that are
    on, in the order of the slots; `off` those that were given as null. A slot left out is in none of them. `reasons`: why
    a strategy was taken that the config does not name, by slot.
    """

    trainer: type | None
    settings: Settings
    strategies: dict[str, Any]
    names: dict[str, str]
    off: frozenset[str]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def classes(self) -> dict[str, type[Strategy]]:
        """The class of each strategy."""
        return {slot: find(slot, name) for slot, name in self.names.items()}

    def as_dict(self) -> dict[str, Any]:
        """Settings and slots as dicts, lists and plain values; each strategy as `{name: ..., its keys}`."""
        slots = {
            slot: None if slot in self.off else {"name": self.names[slot], **dump.plain(self.strategies[slot])}
            for slot in SLOTS
            if slot in self.names or slot in self.off
        }
        return {**dump.plain(self.settings), **slots}

    def to_yaml(self) -> str:
        """YAML that `load` reads as this very config, and plain PyYAML with the same values."""
        return dump.to_yaml(self.as_dict())

    def hash(self) -> str:
        """Twelve hexadecimal digits that change when the training does; names, logging and resume do not count."""
        return dump.digest(self.as_dict())


def load(path: str | Path, overrides: Sequence[str | Mapping[str, Any]] | Mapping[str, Any] = ()) -> Resolved:
    """Read a config file and what it extends, put the overrides on it, and check everything.

    Raises:
        ConfigErrors: the config is wrong; it holds all problems at once.
    """
    resolved, problems = check(path, overrides)
    if resolved is None:
        raise ConfigErrors(problems)
    return resolved


def check(
    path: str | Path, overrides: Sequence[str | Mapping[str, Any]] | Mapping[str, Any] = ()
) -> tuple[Resolved | None, Problems]:
    """As `load`, without raising: the config, or None, and every problem. `problems.notes` holds hints."""
    problems = Problems()
    above = override_layer(overrides, problems)
    path = Path(path)
    base = file_layer(path, problems)
    if base is None:
        return None, problems
    extends = above.get("extends")
    if extends is not None:
        problems.append(
            Problem(
                key="extends",
                message="a file is extended by a file, not on the command line",
                suggestion=f"write 'extends: {extends.text if isinstance(extends, Scalar) else '...'}' in {path}",
                file=extends.place.file,
            )
        )
    tree = layered(base, above.without("extends"), problems)
    return _Resolution(tree, problems, None, str(path)).result()


def peek(path: str | Path, overrides: Sequence[str | Mapping[str, Any]], key: str) -> str | None:
    """The text of a setting as files and overrides give it, before anything is imported or checked; None: not given."""
    problems = Problems()
    above = override_layer(overrides, problems)
    base = file_layer(Path(path), problems)
    if base is None:
        return None
    node = layered(base, above.without("extends"), problems).get(key)
    return node.text if isinstance(node, Scalar) else None


def from_keywords(trainer: type | None, values: Mapping[str, Any]) -> Resolved:
    """Settings and slots given in Python: `batch_size=64, precision="bf16", optimizer={"name": "sgd", "lr": 0.1}`.

    A slot takes a name, a dict, a strategy's `Config` instance, a strategy, or None for off. Text stays text.

    Raises:
        ConfigErrors: something is wrong; it holds all problems at once.
    """
    problems = Problems()
    tree = from_python(values, PYTHON)
    assert isinstance(tree, Map)
    for slot in SLOTS:
        if slot in tree.entries:
            tree.put(slot, slot_node(slot, values[slot], problems))
    base = extended(tree, Path(), problems)
    resolved = None
    if base is not None:
        tree = layered(empty_layer(), base, problems)
        resolved, problems = _Resolution(tree, problems, trainer, "").result()
    if resolved is None:
        raise ConfigErrors(problems)
    return resolved


class _Resolution:
    """One pass over a merged tree."""

    def __init__(self, tree: Map, problems: Problems, trainer: type | None, main: str) -> None:
        self.problems, self.main = problems, main
        self.tree = interpolate.resolve_names(tree, SLOTS, problems)
        self.importer = Importer(problems, problems.notes)
        self.trainer = trainer
        self.sections: dict[str, Map] = {}
        self.classes: dict[str, type[Strategy]] = {}

    def result(self) -> tuple[Resolved | None, Problems]:
        self.import_plugins()
        is_sure = self.choose_trainer()
        settings = self.importer.settings_of(self.trainer, self.place("trainer"))
        is_sure = is_sure and settings is not None
        for slot in SLOTS:
            self.choose(slot)
        named = {slot: self.name(slot) for slot in self.sections}
        suggester = Suggester(settings or Settings, named, is_sure)
        made = self.convert(settings or Settings, suggester)
        self.check_clashes(made)
        if self.problems:
            self.sort()
            return None, self.problems
        own = made.pop("")
        off = frozenset(slot for slot in SLOTS if (node := self.tree.get(slot)) is not None and is_null(node))
        return Resolved(self.trainer, own, made, {slot: named[slot] for slot in made}, off), self.problems

    def place(self, key: str) -> Place:
        node = self.tree.get(key)
        return node.place if node is not None else Place(self.main)

    def refuse(self, key: str, place: Place, message: str, suggestion: str) -> None:
        self.problems.append(Problem(key=key, message=message, suggestion=suggestion, file=place.file, line=place.line))

    def import_plugins(self) -> None:
        node = self.tree.get("plugins")
        if isinstance(node, List):
            for item in node.items:
                if isinstance(item, Scalar):
                    self.importer.module("plugins", item.text, item.place)

    def choose_trainer(self) -> bool:
        """Import the trainer the config names. False: it names one that cannot be had."""
        node = self.tree.get("trainer")
        if self.trainer is not None:
            if node is None or is_null(node):
                self.tree = Map(dict(self.tree.entries), self.tree.place)
                self.tree.put("trainer", Scalar(f"{self.trainer.__module__}:{self.trainer.__qualname__}", final=True))
            return True
        if node is None or is_null(node):
            return True
        if isinstance(node, Map | List):
            self.refuse("trainer", node.place, f"expects 'module:Class', got {describe(node)}", "write module:Class")
            return False
        self.trainer = self.importer.trainer(node)
        return self.trainer is not None

    def name(self, slot: str) -> str:
        node = self.sections[slot].get("name")
        assert isinstance(node, Scalar)
        return node.text

    def choose(self, slot: str) -> None:
        """Find the class of a slot's strategy."""
        node = self.tree.get(slot)
        if node is None or is_null(node):
            return
        assert isinstance(node, Map)
        name = node.get("name")
        if name is None:
            self.unnamed(slot, node)
            return
        if not isinstance(name, Scalar):
            self.refuse(f"{slot}.name", name.place, f"expects text, got {describe(name)}", "write a strategy's name")
            return
        try:
            strategy = find(slot, name.text)
        except ConfigError as error:
            message, _, suggestion = str(error).partition("; ")
            if name.text in {"None", "none", "nil"}:
                suggestion = "write null for off"
            elif name.text.lower() in {"true", "yes", "on"} and names(slot):
                suggestion = f"name the strategy: {' or '.join(f'{slot}={known}' for known in names(slot))}"
            elif _is_number(name.text) and names(slot):
                named = " or ".join(f"{slot}={{name: {known}, ...}}" for known in names(slot)[:3])
                suggestion = f"name the strategy, and give the number by its key: {named}"
            self.refuse(slot, name.place, message, suggestion)
            return
        except Exception as error:  # a strategy's module may fail in any way when it is imported
            message = f"{slot}={name.text} cannot be imported: {type(error).__name__}: {error}"
            self.refuse(slot, name.place, message, "repair or update the package that gives it")
            return
        self.sections[slot] = node
        self.classes[slot] = strategy

    def unnamed(self, slot: str, section: Map) -> None:
        """A section that sets keys of a strategy without naming one."""
        key = next(iter(section.entries), "")
        place = section.entries[key].node.place if key else section.place
        state = "is off" if section.was_off else "has no strategy yet"
        nested = [name for name in section.entries if name in names(slot)]
        owners = strategies_with(slot, key)
        if nested:
            suggestion = f"write '{slot}: {{name: {nested[0]}, ...}}'"
        elif len(owners) == 1:
            value = section.entries[key].node
            text = value.text if isinstance(value, Scalar) else "..."
            suggestion = f"name it too: {slot}={owners[0]} {slot}.{key}={text}"
        elif owners:
            suggestion = "name the strategy too: " + " or ".join(f"{slot}={owner}" for owner in owners)
        elif names(slot):
            suggestion = f"name the strategy too: {slot}=NAME; {did_you_mean('', names(slot))}"
        else:
            suggestion = "this slot has no strategy yet"
        full = f"{slot}.{key}" if key else slot
        message = f"{slot} {state}, so '{key}' sets nothing" if key else f"{slot} {state}"
        self.refuse(full, place, message, suggestion)

    def convert(self, settings: type[Settings], suggester: Suggester) -> dict[str, Any]:
        """The settings under '' and each strategy's config under its slot."""
        own = self.tree.without(*SLOTS)
        sketcher = Converter(sketch=True)
        sketch = self.sketch(sketcher, settings)
        references, found = sketcher.references, {}
        if references:
            found = interpolate.resolve(sketch, references, self.problems, suggester.everything)
            # A reference to a reference is settled once the latter has its field's type, and so on along the chain.
            for _ in range(len(references) - 1):
                before = found
                typed = self.sketch(Converter(sketch=True, found=found), settings)
                found = interpolate.settle(typed, references, before)
                if found == before:
                    break
        converter = Converter(found=found, unknown=suggester.unknown, main=self.main)
        made = {"": converter.section(own, settings, ())}
        for slot, section in self.sections.items():
            made[slot] = converter.section(section.without("name"), self.classes[slot].Config, (slot,))
        self.problems += converter.problems
        return {key: value for key, value in made.items() if value is not BAD}

    def sketch(self, sketcher: Converter, settings: type[Settings]) -> dict[str, Any]:
        """The whole config as plain data, with all defaults, for references to look into."""
        own = sketcher.section(self.tree.without(*SLOTS), settings, ())
        sketch: dict[str, Any] = own if isinstance(own, dict) else {}
        for slot in SLOTS:
            if slot in self.sections:
                config = sketcher.section(self.sections[slot].without("name"), self.classes[slot].Config, (slot,))
                sketch[slot] = {"name": self.name(slot), **(config if isinstance(config, dict) else {})}
            elif slot in self.tree.entries:
                sketch[slot] = None
        return sketch

    def check_clashes(self, made: Mapping[str, Any]) -> None:
        """Two strategies that cannot live together, told at the one that has the limit."""
        for slot, clash in conflicts({slot: (cls, made.get(slot)) for slot, cls in self.classes.items()}):
            other = self.name(clash.slot) if clash.slot in self.sections else "null"
            self.refuse(
                slot,
                self.sections[slot].place,
                f"{slot}={self.name(slot)} cannot be used with {clash.slot}={other}: {clash.why.rstrip('.')}",
                clash.instead.rstrip("."),
            )

    def sort(self) -> None:
        """Problems by line, those of the main file first; those of the command line, and what is missing, last."""
        order = {self.main: 0}
        for problem in self.problems:
            order.setdefault(problem.file, len(order))
        self.problems.sort(key=lambda p: (p.line is None, order[p.file], p.line or 0))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
