"""A trainer, strategies and helpers for the tests of configs."""

from __future__ import annotations

import enum
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from fasttrain import registry
from fasttrain.config import Resolved, Settings, from_keywords, load
from fasttrain.core.strategy import Clash, NoConfig, Strategy
from fasttrain.errors import ConfigError, ConfigErrors, Problem
from fasttrain.registry import register


class Norm(enum.Enum):
    GROUP = "group"
    BATCH = "batch"


@dataclass(frozen=True, kw_only=True)
class Layer:
    width: int = 8
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Model:
    dim: int = 16
    dropout: float = 0.0
    norm: Norm = Norm.GROUP
    layers: list[Layer] = field(default_factory=lambda: [Layer(), Layer(width=4)])

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout} must be at least 0 and below 1; write for example 0.1.")


class Fake:
    """Stands for a Trainer: a class with a Config."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Settings):
        net: Model = field(default_factory=Model)
        head: Model | None = None
        sizes: tuple[int, ...] = (1, 2)
        pair: tuple[float, float] = (0.9, 0.99)
        kind: Literal["small", "large", 3] = "small"
        cache: int | str = 0
        rate: float | Literal["auto"] = "auto"
        note: str | None = None
        words: list[str] = field(default_factory=list)
        extra: Any = None
        table: dict[int, float] = field(default_factory=dict)
        folder: Path = Path("data")
        fast: bool = False


@dataclass(frozen=True, kw_only=True)
class SlowConfig:
    decay: float = 0.99
    every: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ConfigError(f"weight_averaging.decay={self.decay} must be between 0 and 1.")


@dataclass(frozen=True, kw_only=True)
class LateConfig:
    begin: int
    every: int = 1


class Slow(Strategy):
    Config = SlowConfig


class Late(Strategy):
    Config = LateConfig


class Ring(Strategy):
    Config = NoConfig
    clashes = (
        Clash(slot="weight_averaging", name="late", why="the sequence is cut.", instead="use weight_averaging=slow."),
        Clash(slot="tensor_parallel", why="both cut the same layers.", instead="keep one of them."),
    )


class Rows(Strategy):
    Config = NoConfig


@pytest.fixture(autouse=True)
def use_an_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own strategies, an own folder, and an import path that is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(registry, "_registered", {})
    register("weight_averaging", "slow")(Slow)
    register("weight_averaging", "late")(Late)
    register("context_parallel", "ring")(Ring)
    register("tensor_parallel", "rows")(Rows)


HERE = "trainer: tests.config_fakes:Fake\n"


def read(text: str = "", *overrides: Any) -> Resolved:
    Path("c.yaml").write_text(HERE + ("" if "batch_size" in text else "batch_size: 8\n") + textwrap.dedent(text))
    return load("c.yaml", overrides)


def refused(text: str = "", *overrides: Any) -> list[Problem]:
    with pytest.raises(ConfigErrors) as caught:
        read(text, *overrides)
    assert str(caught.value).count("\n") + 1 == len(caught.value.problems)
    return caught.value.problems


def refused_keywords(**values: Any) -> list[Problem]:
    with pytest.raises(ConfigErrors) as caught:
        from_keywords(Fake, values)
    return caught.value.problems
