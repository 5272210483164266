"""Reported faults of configs, each kind by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from fasttrain.config import Resolved, check, from_keywords, load
from fasttrain.errors import EXIT_WRONG_REQUEST, ConfigErrors
from fasttrain.strategies.weight_averaging import EmaConfig

TRAINER = """
from dataclasses import dataclass, field
from typing import Any, Literal

from fasttrain.config import Settings


class Study:
    @dataclass(frozen=True, kw_only=True)
    class Config(Settings):
        lr: float = 0.1
        clip: float | None = 0.5
        milestones: list[int] | None = None
        dims: list[int] = field(default_factory=lambda: [1, 2])
        kw: dict[str, Any] = field(default_factory=dict)
        mode: Literal["no", "fp16", "bf16"] = "bf16"
        label: str = "none"
        labels: list[str] = field(default_factory=list)
        amp: bool = True
        n: int = 1


class Demanding:
    @dataclass(frozen=True, kw_only=True)
    class Config(Settings):
        width: int
        depth: int
        cells: int = "${width}"
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Loads YAML text, with overrides, for a trainer that is imported from the current directory."""
    module = f"study_{uuid.uuid4().hex}"
    (tmp_path / f"{module}.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def read(text: str = "", *overrides: str, trainer: str = "Study", batch_size: str = "batch_size: 8\n") -> Resolved:
        Path("config.yaml").write_text(f"trainer: {module}:{trainer}\n{batch_size}{text}")
        return load("config.yaml", overrides)

    return read


def refused(read, *args: str, **kwargs: str) -> ConfigErrors:
    with pytest.raises(ConfigErrors) as caught:
        read(*args, **kwargs)
    assert caught.value.exit_code == EXIT_WRONG_REQUEST
    assert caught.value.problems
    return caught.value


def test_CFG_TYPO_1_a_misspelt_override_is_refused_with_the_key_that_was_meant(study):
    (problem,) = refused(study, "", "optimzer.lr=1").problems
    assert (problem.key, problem.file, problem.suggestion) == ("optimzer", "command line", "did you mean 'optimizer'?")
    (problem,) = refused(study, "", "optimizer=sgd", "optimizer.momentun=1").problems
    assert problem.key == "optimizer.momentun"
    assert "'momentum'" in problem.suggestion


def test_CFG_TYPO_2_keys_in_the_wrong_section_are_sent_to_the_right_one_with_their_line(study):
    text = "learning_rate: 0.1\nevaluate:\n  num-epochs: 3\n  batch-size: 4\nlog: [10]\nweight_decay: 0.1\n"
    problems = refused(study, text).problems
    assert [(p.key, p.line) for p in problems] == [
        ("learning_rate", 3),
        ("evaluate.num-epochs", 5),
        ("evaluate.batch-size", 6),
        ("log", 7),
        ("weight_decay", 8),
    ]
    assert {p.file for p in problems} == {"config.yaml"}
    assert "'optimizer.lr'" in problems[0].suggestion
    assert "top level: 'epochs'" in problems[1].suggestion
    assert problems[2].suggestion == "did you mean 'batch_size'?"
    assert "expects a mapping, got a list" in problems[3].message
    assert "'optimizer.weight_decay'" in problems[4].suggestion


@pytest.mark.parametrize("written", ["1e-3", "0.001", "1E-3", ".001", "1.0e-3"])
def test_CFG_FLOAT_1_a_learning_rate_is_a_number_on_every_path(study, written):
    from_file = study(f"lr: {written}\noptimizer: {{name: sgd, lr: {written}}}\nkw: {{lr: {written}}}\n")
    from_line = study("optimizer: sgd", f"lr={written}", f"optimizer.lr={written}", f"kw={{lr: {written}}}")
    Path("sweep.yaml").write_text(f"extends: config.yaml\nlr: {written}\n")
    from_sweep = load("sweep.yaml", [f"optimizer.lr={written}", OmegaConf.create({"kw": {"lr": 0.001}})])
    Path("saved.yaml").write_text(from_file.to_yaml())
    for resolved in (from_file, from_line, from_sweep, load("saved.yaml")):
        assert (resolved.settings.lr, resolved.strategies["optimizer"].lr, resolved.settings.kw) == (
            0.001,
            0.001,
            {"lr": 0.001},
        )
        assert type(resolved.settings.kw["lr"]) is float
        saved = resolved.to_yaml()
        assert "lr: 0.001" in saved
        assert "1e-3" not in saved
        plain = yaml.safe_load(saved)
        assert [plain["lr"], plain["optimizer"]["lr"], plain["kw"]["lr"]] == [0.001, 0.001, 0.001]


@pytest.mark.parametrize(("written", "steps"), [("1e3", 1000), ("10.0", 10), ("1_000", 1000), ("1000", 1000)])
def test_CFG_FLOAT_3_whole_numbers_are_integers_however_written(study, written, steps):
    for resolved in (study("", f"steps={written}"), study(f"steps: {written}\n")):
        assert resolved.settings.steps == steps
        assert type(resolved.settings.steps) is int


@pytest.mark.parametrize("written", ["2.5", "1e-3", "abc", "inf", "nan", "true", "[1]", "1e999999999"])
def test_CFG_FLOAT_3_what_is_no_whole_number_is_refused(study, written):
    (problem,) = refused(study, "", f"steps={written}").problems
    assert problem.key == "steps"
    assert problem.message.startswith("expects an integer or null, got")


def test_CFG_INTERP_1_a_reference_to_a_missing_key_is_found_at_load(study):
    (problem,) = refused(study, "optimizer: sgd\nn: ${optimizer.lrr}\n").problems
    assert (problem.key, problem.line) == ("n", 4)
    assert "'optimizer.lrr'" in problem.message
    assert "optimizer.lr" in problem.suggestion
    (problem,) = refused(study, "n: ${opt.lrr}\n").problems
    assert (problem.key, "'opt.lrr'" in problem.message) == ("n", True)


def test_CFG_INTERP_2_missing_values_are_listed_and_what_is_computed_from_them_is_not(study):
    problems = refused(study, trainer="Demanding").problems
    assert [p.key for p in problems] == ["width", "depth"]
    assert all("must be given" in p.message for p in problems)
    assert [p.key for p in refused(study, "width: ???\n", "depth=2", trainer="Demanding").problems] == ["width"]
    assert study("width: 3\n", "depth=2", trainer="Demanding").settings.cells == 3


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("clip=null", "clip", None),
        ("clip=1", "clip", 1.0),
        ("clip=~", "clip", None),
        ("clip=", "clip", None),
        ("milestones=[1,2]", "milestones", [1, 2]),
        ("milestones=null", "milestones", None),
    ],
)
def test_CFG_NULL_1_optional_values_can_be_set_and_set_back(study, override, field, value):
    found = getattr(study("milestones: [7]\n", override).settings, field)
    assert found == value
    assert type(found) is type(value)


def test_CFG_NULL_1_the_word_of_python_is_refused_where_null_may_stand(study):
    for override in ("clip=None", "run.name=None", "kw={a: None}", "milestones=None"):
        (problem,) = refused(study, "", override).problems
        assert "write null" in problem.suggestion


def test_CFG_NULL_3_overriding_inside_a_slot_that_is_off_says_what_to_write(study):
    (problem,) = refused(study, "weight_averaging: null\n", "weight_averaging.decay=0.9").problems
    assert problem.key == "weight_averaging.decay"
    assert problem.suggestion == "name it too: weight_averaging=ema weight_averaging.decay=0.9"
    on = study("weight_averaging: null\n", "weight_averaging.decay=0.9", "weight_averaging=ema")
    assert on.strategies["weight_averaging"] == EmaConfig(decay=0.9)
    for word in ("null", "off", "no", "~", "false", ""):
        off = study("weight_averaging: {name: ema, decay: 0.5}\n", f"weight_averaging={word}")
        assert off.names == {}
        assert off.off == {"weight_averaging"}


@pytest.mark.parametrize("override", ["dims.0=9", "dims[0]=9"])
def test_CFG_LIST_1_one_item_of_a_list_can_be_set_in_both_spellings(study, override):
    assert study("dims: [1, 2]\n", override).settings.dims == [9, 2]
    assert study("", override).settings.dims == [9, 2], "also where the list is a default"


def test_CFG_LIST_1_an_item_that_does_not_exist_is_refused(study):
    for text in ("dims: [1, 2]\n", ""):
        (problem,) = refused(study, text, "dims[2]=9").problems
        assert problem.key == "dims[2]"
        assert "items 0 to 1" in problem.message
        assert problem.suggestion == "write the whole list: dims=[...]"


def test_CFG_LIST_3_mappings_and_lists_on_the_command_line_are_what_they_look_like(study):
    assert study("", "kw={a: 1}").settings.kw == {"a": 1}
    (problem,) = refused(study, "", "kw={a:1}").problems
    assert (problem.key, problem.suggestion) == ("kw", "write {a: 1}")
    (problem,) = refused(study, "", "dims=3").problems
    assert (problem.message, problem.suggestion) == ("expects a list, got '3'", "write [3]")
    (problem,) = refused(study, "kw: {a:1}\n").problems
    assert (problem.line, problem.suggestion) == (3, "write {a: 1}")


def test_CFG_BOOL_1_no_is_text_where_text_is_meant(study):
    for resolved in (study("mode: no\nlabel: no\n"), study("", "mode=no", "label=no")):
        assert (resolved.settings.mode, resolved.settings.label) == ("no", "no")
        Path("saved.yaml").write_text(resolved.to_yaml())
        assert load("saved.yaml") == resolved
        assert yaml.safe_load(resolved.to_yaml())["mode"] == "no"
    (problem,) = refused(study, "", "mode=off").problems
    assert "one of no, fp16, bf16" in problem.message


def test_CFG_BOOL_3_labels_keep_their_words_and_booleans_take_them(study):
    assert study("labels: [no, yes, on, 1e3, 007]\n").settings.labels == ["no", "yes", "on", "1e3", "007"]
    assert study("", "labels=[no, yes]").settings.labels == ["no", "yes"]
    for word, value in {"no": False, "off": False, "1": True, "0": False, "Yes": True, "TRUE": True}.items():
        assert study("", f"amp={word}").settings.amp is value
        assert study(f"amp: {word}\n").settings.amp is value
    (problem,) = refused(study, "", "amp=maybe").problems
    assert problem.message == "expects true or false, got 'maybe'"


def test_CFG_all_kinds_at_once_are_told_at_once(study):
    text = "optimzer: sgd\nsteps: 2.5\nn: ${opt.lrr}\ndims: 3\namp: maybe\nclip: None\n"
    problems = refused(study, text, "mode=off").problems
    assert [p.key for p in problems] == ["optimzer", "steps", "n", "dims", "amp", "clip", "mode"]
    assert [p.line for p in problems] == [3, 4, 5, 6, 7, 8, None]
    resolved, same = check("config.yaml", ["mode=off"])
    assert resolved is None
    assert list(same) == problems


def test_CFG_keywords_follow_the_same_rules_with_python_values():
    resolved = from_keywords(None, {"batch_size": 8, "model": {"mode": "no", "lr": 1e-3, "id": "007"}})
    assert resolved.settings.model == {"mode": "no", "lr": 0.001, "id": "007"}
    with pytest.raises(ConfigErrors) as caught:
        from_keywords(None, {"batch_size": 2.5, "stepz": 3})
    assert {p.key for p in caught.value.problems} == {"batch_size", "stepz"}
