"""Strategies from elsewhere: by `@register` and `plugins:`, and by an entry point of a separate package."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest

from fasttrain import ConfigError, Strategy, register, registry
from fasttrain.config import load
from fasttrain.registry import BUILT_IN, find, names
from tests.helpers import largest_difference, state
from tests.stack import Stack

# Bounds each gradient entry; written by someone else.
THEIRS = """
from dataclasses import dataclass
from typing import final

from fasttrain import Strategy, register


@dataclass(frozen=True, kw_only=True)
class SignConfig:
    size: float = 1.0


{decorator}
@final
class Sign(Strategy):
    Config = SignConfig

    def gradients(self, model, optimizer):
        for parameter in model.parameters():
            parameter.grad.sign_().mul_(self.config.size)
"""


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Own strategies and an import path that are put back."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()
    for module in ("their_tricks", "their_plugin"):
        sys.modules.pop(module, None)


def config(tmp_path, lines):
    path = tmp_path / "config.yaml"
    start = "trainer: tests.stack:Stack\nbatch_size: 24\nsteps: 1\nrun: {dir: null}\noptimizer: {name: sgd, lr: 0.5}\n"
    path.write_text(start + textwrap.dedent(lines))
    return load(path)


def moved(trainer):
    """How far each entry of the weights moved in a run."""
    before = state(trainer)
    trainer.fit()
    return {round(abs(x), 4) for name, w in state(trainer).items() for x in (w - before[name]).flatten().tolist()}


def test_every_built_in_strategy_is_found_under_its_own_name():
    found = [find(slot, name) for slot, table in BUILT_IN.items() for name in table]
    assert [(kind.slot, kind.name) for kind in found] == [(s, n) for s, table in BUILT_IN.items() for n in table]
    assert len(found) >= 19


def test_a_registered_strategy_is_used_by_name_through_plugins(tmp_path):
    (tmp_path / "their_plugin.py").write_text(THEIRS.format(decorator='@register("gradient_clipping", "sign")'))
    sys.path.insert(0, str(tmp_path))
    lines = "gradient_clipping: {name: sign, size: 0.25}\n"
    with pytest.raises(ConfigError, match="gradient_clipping has no strategy 'sign'"):
        config(tmp_path, lines)
    trainer = Stack(config(tmp_path, lines + "plugins: [their_plugin]\n"))
    assert type(trainer.plan.strategies["gradient_clipping"]).__module__ == "their_plugin"
    assert moved(trainer) == {0.125}
    assert dict(trainer.plan.explain())["gradients"] == ["gradient_clipping=sign"]


def test_a_separate_package_brings_a_strategy_by_an_entry_point(tmp_path):
    site = tmp_path / "site"
    info = site / "their_tricks-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "their_tricks.py").write_text(THEIRS.format(decorator=""))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-tricks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fasttrain.strategies]\ngradient_clipping.sign = their_tricks:Sign\n")
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    assert names("gradient_clipping")[:1] == ["norm"]
    assert "sign" in names("gradient_clipping")
    assert "their_tricks" not in sys.modules  # known by name, imported when asked for
    trainer = Stack(config(tmp_path, "gradient_clipping: sign\n"))
    kind = type(trainer.plan.strategies["gradient_clipping"])
    assert (kind.__module__, kind.slot, kind.name) == ("their_tricks", "gradient_clipping", "sign")
    assert moved(trainer) == {0.5}
    with pytest.raises(ConfigError, match=r"gradient_clipping\.siz.*did you mean 'size'"):
        config(tmp_path, "gradient_clipping: {name: sign, siz: 2}\n")


def test_a_strategy_from_elsewhere_changes_nothing_where_it_is_not_named():
    plain = Stack(batch_size=8, steps=2, run={"dir": None})
    plain.fit()

    @register("gradient_clipping", "sign")
    class Sign(Strategy):
        def gradients(self, model, optimizer):
            raise AssertionError

    again = Stack(batch_size=8, steps=2, run={"dir": None})
    again.fit()
    assert largest_difference(state(plain), state(again)) == 0.0


def test_a_taken_name_and_a_slot_that_is_none_are_refused():
    class Mine(Strategy):
        pass

    with pytest.raises(ConfigError, match="gradient_clipping=norm exists already; register Mine under another name"):
        register("gradient_clipping", "norm")(Mine)
    with pytest.raises(ConfigError, match="there is no slot 'clipping'"):
        register("clipping", "mine")(Mine)
    register("gradient_clipping", "mine")(Mine)
    assert register("gradient_clipping", "mine")(Mine) is Mine  # a module that is imported again

    class Other(Strategy):
        pass

    with pytest.raises(ConfigError, match="gradient_clipping=mine exists already"):
        register("gradient_clipping", "mine")(Other)
    assert names("gradient_clipping") == [*BUILT_IN["gradient_clipping"], "mine"]


def test_an_unknown_strategy_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="optimizer has no strategy 'adamv'; did you mean 'adamw'"):
        find("optimizer", "adamv")
