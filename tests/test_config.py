"""Reading configs: the writing, the types, the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from fasttrain.config import Resolved, Settings, check, load
from tests.config_fakes import (  # noqa: F401
    Fake,
    Layer,
    Model,
    Norm,
    Slow,
    SlowConfig,
    read,
    refused,
    refused_keywords,
    use_an_own_folder,
)

# Reading


def test_a_small_config_is_read_by_its_trainers_types():
    resolved = read(
        "optimizer: {name: sgd, lr: 1e-3}\nprecision: bf16\nnet:\n  norm: BATCH\n  layers: [{width: 1e1}]\n"
    )
    assert resolved.trainer is Fake
    assert type(resolved.settings) is Fake.Config
    assert resolved.settings.net == Model(norm=Norm.BATCH, layers=[Layer(width=10)])
    assert list(resolved.names.items()) == [("precision", "bf16"), ("optimizer", "sgd")], "in the order of the slots"
    assert resolved.strategies["optimizer"].lr == 0.001
    assert {slot: cls.name for slot, cls in resolved.classes().items()} == resolved.names


def test_without_a_trainer_the_settings_are_the_common_ones():
    Path("c.yaml").write_text("batch_size: 4\n")
    resolved = load(Path("c.yaml"))
    assert resolved == Resolved(None, Settings(batch_size=4), {}, {}, frozenset())


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("seed: 1\nseed: 2\n", 4, "given twice, first in line 3"),
        ("log:\n\tevery: 2\n", 4, "a tab stands"),
        ("seed: [1\n", 4, "no YAML"),
        ("seed: 1\n---\nseed: 2\n", 4, "several documents"),
        ("seed:1\nsteps: 3\n", 4, "a key without ': '"),
        ("words: [${seed}]\n", 3, "cannot stand bare inside brackets"),
        ("extra: !!python/name:os.system x\n", 3, "the tag"),
        ("extra: &a [*a]\n", 3, "contains itself"),
        ("? [a, b]\n: 1\n", 3, "cannot be a key"),
    ],
)
def test_faults_of_the_writing_are_told_with_their_line(text, line, said):
    problem = refused(text)[0]
    assert (problem.file, problem.line) == ("c.yaml", line)
    assert said in problem.message
    assert problem.suggestion


def test_files_that_cannot_be_read_are_told():
    Path("config.yaml").write_text("batch_size: 1\n")
    for path, said in (("confg.yaml", "no file 'confg.yaml'"), (".", "cannot be read")):
        resolved, problems = check(path)
        assert resolved is None
        assert said in problems[0].message
    assert check("confg.yaml")[1][0].suggestion == "did you mean 'config.yaml'?"
    Path("bad.yaml").write_bytes(b"batch_size: \xff\n")
    assert "not UTF-8" in check("bad.yaml")[1][0].message
    Path("list.yaml").write_text("- 1\n")
    assert "a list and no mapping" in check("list.yaml")[1][0].message
    Path("empty.yaml").write_text("")
    assert [p.key for p in check("empty.yaml")[1]] == ["batch_size"]


def test_anchors_and_merge_keys_are_read():
    resolved = read("extra:\n  base: &b {x: 1, y: 2}\n  own: {<<: *b, y: 3}\n")
    assert resolved.settings.extra == {"base": {"x": 1, "y": 2}, "own": {"x": 1, "y": 3}}


# Types


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("seed=0x10", "seed", 16),
        ("seed=-3", "seed", -3),
        ("note=1e3", "note", "1e3"),
        ("note=007", "note", "007"),
        ("note=12:30", "note", "12:30"),
        ("note=no", "note", "no"),
        ("note=a: b #c", "note", "a: b #c"),
        ("note='null'", "note", "null"),
        ("note=null", "note", None),
        ("cache=7", "cache", 7),
        ("cache='7'", "cache", "7"),
        ("cache=disk", "cache", "disk"),
        ("rate=1e-2", "rate", 0.01),
        ("rate=auto", "rate", "auto"),
        ("kind=3", "kind", 3),
        ("kind=large", "kind", "large"),
        ("sizes=[1e1]", "sizes", (10,)),
        ("pair=[1, 2]", "pair", (1.0, 2.0)),
        ("words=[no, 1, 'null']", "words", ["no", "1", "null"]),
        ("table={1: 1e-3}", "table", {1: 0.001}),
        ("folder=a/b", "folder", Path("a/b")),
        ("fast=On", "fast", True),
        ("net.norm=batch", "net", Model(norm=Norm.BATCH)),
        ("net.layers.1.width=5", "net", Model(layers=[Layer(), Layer(width=5)])),
        ("net.layers[-1].bias=no", "net", Model(layers=[Layer(), Layer(width=4, bias=False)])),
        ("head.dim=5", "head", Model(dim=5)),
        ("head={}", "head", Model()),
    ],
)
def test_values_take_the_type_of_their_field(override, name, value):
    found = getattr(read("", override).settings, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 0.001),
        ("1.5", 1.5),
        (".inf", float("inf")),
        ("12", 12),
        ("1_000", 1000),
        ("0x1F", 31),
        ("no", "no"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("'null'", "null"),
        ("'12'", "12"),
        ("007", "007"),
        ("12:30", "12:30"),
        ("2024-01-31", "2024-01-31"),
        ("[1, no, 1e3]", [1, "no", 1000.0]),
        ("{0: cat, no: dog, '1': emu}", {0: "cat", "no": "dog", "1": "emu"}),
    ],
)
def test_where_a_field_has_no_type_yaml_1_2_decides(written, value):
    for resolved in (read(f"extra: {written}\n"), read("", f"extra={written}"), read(f"model: {{x: {written}}}\n")):
        found = resolved.settings.extra if resolved.settings.extra is not None else resolved.settings.model.get("x")
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("seed=true", "seed", "expects an integer, got 'true'"),
        ("seed=", "seed", "expects an integer, got nothing"),
        ("seed=1,000", "seed", "expects an integer, got '1,000'"),
        ("pair=[1]", "pair", "expects 2 items, got 1"),
        ("pair=[1, x]", "pair[1]", "expects a number, got 'x'"),
        ("kind=tiny", "kind", "expects one of small, large, 3, got 'tiny'"),
        ("rate=soon", "rate", "expects a number or one of auto, got 'soon'"),
        ("words=a", "words", "expects a list, got 'a'"),
        ("table={x: 1}", "table.x", "expects an integer, got 'x'"),
        ("net=3", "net", "expects a mapping, got '3'"),
        ("net.norm=layer", "net.norm", "expects one of GROUP, BATCH, got 'layer'"),
        ("head.dim=x", "head.dim", "expects an integer, got 'x'"),
        ("seed.x=1", "seed", "expects an integer, got a mapping"),
        ("trainer=null", "net", ""),
    ],
)
def test_a_value_of_another_type_is_refused(override, key, message):
    if override == "trainer=null":
        assert [p.key for p in refused("net: {dim: 3}\n", override)] == [key]
        return
    (problem,) = refused("", override)
    assert (problem.key, problem.message, problem.file) == (key, message, "command line")


def test_a_dataclass_that_refuses_its_values_is_told_at_the_key_it_names():
    (problem,) = refused("net:\n  dim: 3\n  dropout: 1.5\n")
    assert (problem.key, problem.line) == ("net.dropout", 5)
    assert problem.message == "dropout=1.5 must be at least 0 and below 1"
    assert problem.suggestion == "write for example 0.1"
    (problem,) = refused("weight_averaging: {name: slow, decay: 2}\n")
    assert (problem.key, problem.line) == ("weight_averaging.decay", 3)


def test_checks_of_a_dataclass_are_told_beside_other_mistakes():
    keys = [p.key for p in refused("batch_size: -1\nsteps: 0\nseed: x\nlimit_batches: 0\nmax_time: soon\nresume: no\n")]
    assert keys == ["batch_size", "steps", "seed", "limit_batches", "max_time", "resume"]


def test_nothing_is_said_of_checks_that_fail_for_a_missing_part():
    (problem,) = refused("net: {dim: x, dropout: 0.5}\n")
    assert problem.key == "net.dim"


# Layers


def test_files_extend_each_other_and_later_ones_win():
    Path("sub").mkdir()
    Path("sub/root.yaml").write_text("seed: 1\nmodel: {a: 1, b: 2}\nwords: [x, y]\noptimizer: {name: sgd, lr: 0.5}\n")
    Path("sub/mid.yaml").write_text("extends: root.yaml\nseed: 2\nmodel: {b: 3}\n")
    Path("other.yaml").write_text("model: {c: 4}\n")
    resolved = read("extends: [sub/mid.yaml, other.yaml]\nwords: [z]\noptimizer: {momentum: 0.5}\n", "model.c=5")
    assert resolved.settings.seed == 2
    assert resolved.settings.model == {"a": 1, "b": 3, "c": 5}
    assert resolved.settings.words == ["z"], "lists replace"
    assert (resolved.strategies["optimizer"].lr, resolved.strategies["optimizer"].momentum) == (0.5, 0.5)
    (problem,) = refused("extends: sub/mid.yaml\n", "words=[a]", "model.a.b=1", "words.3=z")
    assert problem.key == "words[3]"


def test_problems_name_the_file_they_stand_in():
    Path("base.yaml").write_text("seed: 1\nsteps: x\n")
    problems = refused("extends: base.yaml\nsed: 2\n")
    assert [(p.file, p.line, p.key) for p in problems] == [("c.yaml", 4, "sed"), ("base.yaml", 2, "steps")]


def test_circles_and_missing_bases_are_refused_with_their_line():
    Path("a.yaml").write_text("seed: 1\nextends: b.yaml\n")
    Path("b.yaml").write_text("extends: a.yaml\n")
    (problem,) = check("a.yaml")[1]
    assert (problem.key, problem.file, problem.line) == ("extends", "b.yaml", 1)
    assert "a.yaml -> b.yaml -> a.yaml" in problem.message
    (problem,) = refused("seed: 1\nextends: bb.yaml\n")
    assert (problem.key, problem.file, problem.line) == ("extends", "c.yaml", 4)
    assert problem.suggestion == "did you mean 'b.yaml'?"


def test_steps_and_epochs_take_each_others_place_in_a_later_layer_only():
    Path("base.yaml").write_text("epochs: 3\n")
    assert read("extends: base.yaml\nsteps: 5\n").settings.epochs is None
    resolved = read("steps: 5\n", "epochs=2")
    assert (resolved.settings.steps, resolved.settings.epochs) == (None, 2)
    assert read("epochs: 5\n", "steps=null").settings.epochs == 5
    (problem,) = refused("steps: 5\nepochs: 2\n")
    assert "both given" in problem.message


def test_naming_another_strategy_starts_from_its_defaults_and_the_same_keeps_settings():
    text = "optimizer: {name: sgd, lr: 0.5}\n"
    assert read(text, "optimizer=sgd").strategies["optimizer"].lr == 0.5
    assert read(text, "optimizer=adamw").strategies["optimizer"].lr == 0.001
    for overrides in (("optimizer=adamw", "optimizer.lr=0.3"), ("optimizer.lr=0.3", "optimizer=adamw")):
        resolved = read(text, *overrides)
        assert (resolved.names["optimizer"], resolved.strategies["optimizer"].lr) == ("adamw", 0.3)
    assert read(text, "optimizer={name: adamw, eps: 1e-6}").strategies["optimizer"].lr == 0.001


def test_off_is_told_apart_from_left_out():
    assert read().off == frozenset()
    for word in ("null", "off", "no", "", "~", "'off'", "{name: null}"):
        assert read(f"data_parallel: {word}\n").off == {"data_parallel"}
    assert read("data_parallel: null\n") != read()
    assert read("data_parallel: null\n", "data_parallel=ddp").names == {"data_parallel": "ddp"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed", "write seed=value"),
        ("--seed=1", "write seed=1"),
        ("+seed=1", "write seed=1"),
        ("a..b=1", "section.key=value"),
        ("=1", "section.key=value"),
        ("words=[a", "check brackets"),
        ("extends=b.yaml", "write 'extends: b.yaml'"),
        (3, "key=value"),
    ],
)
def test_overrides_that_are_none_are_refused(override, said):
    (problem,) = refused("", override)
    assert problem.file == "command line"
    assert said in problem.suggestion


def test_overrides_may_be_mappings_and_omegaconf_containers():
    given = OmegaConf.create({"seed": 3, "model": {"lr": 0.1, "twice": "${.lr}"}, "optimizer": {"name": "sgd"}})
    assert (
        load_with(given) == load_with([given]) == load_with(["seed=3", "model={lr: 0.1, twice: 0.1}", "optimizer=sgd"])
    )


def load_with(overrides: Any) -> Resolved:
    Path("c.yaml").write_text("batch_size: 8\n")
    return load("c.yaml", overrides)
