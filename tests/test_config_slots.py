"""Configs name classes and refer to each other: slots, trainers, references, keywords."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import MISSING, OmegaConf

from fasttrain.config import Settings, check, from_keywords, load
from fasttrain.core.strategy import NoConfig
from fasttrain.errors import ConfigErrors
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

# Slots


@pytest.mark.parametrize(
    ("text", "key", "message", "suggestion"),
    [
        ("optimizer: sdg", "optimizer", "optimizer has no strategy 'sdg'", "did you mean 'sgd'?"),
        ("precision: None", "precision", "precision has no strategy 'None'", "write null for off"),
        ("batch_norm: true", "batch_norm", "batch_norm has no strategy 'true'", "name the strategy: batch_norm=sync"),
        ("optimizer: [sgd, adamw]", "optimizer", "a slot holds one strategy, got a list", "write 'optimizer: NAME'"),
        ("optimizer: {adamw: {lr: 1}}", "optimizer.adamw", "optimizer has no strategy yet", "{name: adamw, ...}"),
        ("optimizer: {lr: 1}", "optimizer.lr", "optimizer has no strategy yet", "optimizer=sgd or optimizer=adamw"),
        (
            "optimizer: {name: sgd, eps: 1}",
            "optimizer.eps",
            "optimizer=sgd has no key 'eps'",
            "belongs to optimizer=adamw",
        ),
        ("gradient_clipping: 1.0", "gradient_clipping", "gradient_clipping has no strategy '1.0'", "{name: norm, ...}"),
        ("adapters: {name: lora, r: 8}", "adapters.r", "adapters=lora has no key 'r'", "did you mean 'rank'?"),
        ("log.every: 5", "log.every", "there is no such setting or slot", "write 'log: {every: ...}'"),
        ("optimizer.adamw.lr: 5", "optimizer.adamw.lr", "there is no such", "write 'optimizer: {adamw: {lr: ...}}'"),
        ("device: gpu", "device", "device=gpu is no device", "did you mean 'cuda'?"),
        ("device: 'cuda:first'", "device", "device=cuda:first is no device", "did you mean 'cuda'?"),
        ("fp16: true", "fp16", "there is no such setting or slot", "write precision=fp16"),
        (
            "pipeline_parallel: gpipe",
            "pipeline_parallel",
            "pipeline_parallel has no strategy 'gpipe'",
            "no strategy yet",
        ),
        ("weight_averaging: late", "weight_averaging.begin", "must be given: an integer", "weight_averaging.begin=8"),
    ],
)
def test_slots_are_checked_by_name_and_key(text, key, message, suggestion):
    (problem,) = refused(text + "\n")
    assert problem.key == key
    assert problem.message.startswith(message)
    assert suggestion in problem.suggestion


def test_strategies_that_clash_are_told_once_with_reason_and_way_out():
    text = "weight_averaging: {name: late, begin: 3}\ncontext_parallel: ring\ntensor_parallel: rows\n"
    problems = refused(text)
    assert [(p.key, p.line) for p in problems] == [("context_parallel", 4), ("context_parallel", 4)]
    averaging = next(p for p in problems if "weight_averaging" in p.message)
    assert averaging.message == "context_parallel=ring cannot be used with weight_averaging=late: the sequence is cut"
    assert averaging.suggestion == "use weight_averaging=slow"
    assert read("weight_averaging: slow\ncontext_parallel: ring\n").names.keys() == {
        "weight_averaging",
        "context_parallel",
    }


def test_plugins_are_imported_before_strategies_are_looked_up():
    Path("my_plugin.py").write_text(
        "from fasttrain.core.strategy import Strategy\nfrom fasttrain.registry import register\n"
        "@register('gradient_clipping', 'mine')\nclass Mine(Strategy):\n    pass\n"
    )
    resolved = read("plugins: [my_plugin]\ngradient_clipping: mine\n")
    assert resolved.classes()["gradient_clipping"].__name__ == "Mine"
    problems = refused("plugins: [no_plugin]\ngradient_clipping: another\n")
    assert [(p.key, p.line) for p in problems] == [("plugins", 3), ("gradient_clipping", 4)]
    assert "'no_plugin' cannot be imported: ModuleNotFoundError" in problems[0].message


# The trainer's module


@pytest.mark.parametrize(
    ("source", "named", "said", "suggestion"),
    [
        ("import nothing_there\n", "m:A", "No module named 'nothing_there'", "install 'nothing_there'"),
        ("import nothing_there.part\n", "m:A", "No module named 'nothing_there'", "install 'nothing_there'"),
        ("import json.part\n", "m:A", "No module named 'json.part'", "'json' is there without it"),
        ("1 / 0\n", "m:A", "ZeroDivisionError", "python -c"),
        ("def f(:\n", "m:A", "SyntaxError", "m.py:1"),
        ("raise SystemExit(3)\n", "m:A", "SystemExit: 3", "python -c"),
        ("class Alpha: pass\n", "m:Alpa", "has no 'Alpa'", "did you mean 'Alpha'?"),
        ("A = 3\n", "m:A", "is no class but a int", "name a class"),
        (
            "class A:\n  class Config: pass\n",
            "m:A",
            "does not derive from Trainer.Config",
            "class Config(Trainer.Config)",
        ),
        ("class A: pass\n", "m.A", "expects 'module:Class', got 'm.A'", "write m:A"),
        ("class A: pass\n", "mm:A", "No module named 'mm'", "start in the folder that holds 'mm'"),
    ],
)
def test_a_trainer_that_cannot_be_had_is_told_with_module_and_cause(source, named, said, suggestion, monkeypatch):
    monkeypatch.delitem(sys.modules, "m", raising=False)
    Path("m.py").write_text(source)
    Path("c.yaml").write_text(f"batch_size: 8\ntrainer: {named}\nits_own: 1\nsteps: x\n")
    problems = check("c.yaml")[1]
    assert [(p.key, p.line) for p in problems] == [("trainer", 2), ("steps", 4)], "and its own keys are not judged"
    assert said in problems[0].message
    assert suggestion in problems[0].suggestion


def test_types_written_as_text_and_nested_classes_are_found(monkeypatch):
    Path("nested.py").write_text(
        textwrap.dedent("""
        from __future__ import annotations
        from dataclasses import dataclass, field
        from fasttrain.config import Settings

        class Net:
            @dataclass(frozen=True, kw_only=True)
            class Model:
                dim: int

            @dataclass(frozen=True, kw_only=True)
            class Config(Settings):
                net: Model
                other: Model | None = None
        """)
    )
    Path("c.yaml").write_text("batch_size: 8\ntrainer: nested:Net\nother: {dim: 3}\n")
    assert [p.key for p in check("c.yaml")[1]] == ["net.dim"]
    resolved = load("c.yaml", ["net.dim=4"])
    assert (resolved.settings.net.dim, resolved.settings.other.dim) == (4, 3)


# References


def test_references_resolve_to_typed_values_defaults_and_the_environment(monkeypatch):
    monkeypatch.setenv("FASTTRAIN_LR", "1e-3")
    monkeypatch.setenv("FASTTRAIN_PRECISION", "bf16")
    resolved = read(
        """
        optimizer: {name: adamw, lr: "${oc.env:FASTTRAIN_LR}"}
        precision: ${oc.env:FASTTRAIN_PRECISION}
        schedule: ${oc.env:FASTTRAIN_SCHEDULE,null}
        extra: {lr: "${optimizer.lr}", every: "${log.every}", betas: "${optimizer.betas}", name: "${optimizer.name}"}
        note: run-${seed}-${optimizer.lr}
        net: {dim: "${batch_size}", layers: [{width: "${...dim}"}]}
        batch_size: 8
        """
    )
    assert resolved.strategies["optimizer"].lr == 0.001
    assert resolved.names["precision"] == "bf16"
    assert resolved.off == {"schedule"}
    assert resolved.settings.extra == {"lr": 0.001, "every": 10, "betas": [0.9, 0.999], "name": "adamw"}
    assert resolved.settings.note == "run-0-0.001"
    assert resolved.settings.net.dim == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("note: ${nothing}", "refers to 'nothing', which does not exist"),
        ("note: ${seed.x}", "refers to 'seed.x', which does not exist"),
        ("note: ${note}", "refers to itself in a circle"),
        ("note: ${oc.env:FASTTRAIN_NOT_SET}", "the environment variable 'FASTTRAIN_NOT_SET' is not set"),
        ("note: ${no.resolver:1}", "there is no resolver 'no.resolver'"),
        ("note: ${seed", "is no reference"),
        ("precision: ${nothing}", "refers to 'nothing', which does not exist"),
        ("seed: ${run.dir}", "expects an integer, got 'runs'"),
        ("plugins: ['${nothing}']", "refers to 'nothing', which does not exist"),
    ],
)
def test_a_reference_that_leads_nowhere_is_told_at_load(text, said):
    (problem,) = refused(text + "\n")
    assert problem.line == 3
    assert said in problem.message


def test_a_chain_of_references_is_told_once_at_its_broken_link():
    assert [p.key for p in refused("note: ${run.name}\nrun: {name: '${nothing}'}\n")] == ["run.name"]
    assert [p.key for p in refused("note: ${seed}\nseed: x\n")] == ["seed"], "a reference to a wrong value is not told"


def test_omegaconfs_missing_marks_a_mandatory_field():
    @dataclass(frozen=True, kw_only=True)
    class Config(Settings):
        width: int = MISSING
        cells: int = "${width}"  # pyright: ignore[reportAssignmentType]

    trainer = type("T", (), {"Config": Config})
    with pytest.raises(ConfigErrors) as caught:
        from_keywords(trainer, {})
    assert [p.key for p in caught.value.problems] == ["batch_size", "width"]
    assert from_keywords(trainer, {"batch_size": 1, "width": 3}).settings.cells == 3


# Keywords


def test_keywords_take_settings_and_every_form_of_a_slot():
    forms = ["slow", {"name": "slow"}, SlowConfig(), Slow, Slow(SlowConfig()), OmegaConf.create({"name": "slow"})]
    resolved = [
        from_keywords(Fake, {"batch_size": 64, "weight_averaging": form, "data_parallel": None}) for form in forms
    ]
    assert all(one == resolved[0] for one in resolved)
    assert resolved[0].strategies == {"weight_averaging": SlowConfig()}
    assert resolved[0].off == {"data_parallel"}
    assert resolved[0].trainer is Fake
    Path("saved.yaml").write_text(resolved[0].to_yaml())
    assert load("saved.yaml") == resolved[0], "the trainer's name is kept"


def test_keywords_keep_python_values():
    function = len
    resolved = from_keywords(
        Fake, {"batch_size": 8, "net": Model(dim=3), "log": {"every": 5}, "extra": {"f": function}, "words": ("1e3",)}
    )
    assert resolved.settings.net == Model(dim=3)
    assert resolved.settings.log.every == 5
    assert resolved.settings.extra["f"] is function
    assert resolved.settings.words == ["1e3"]


def test_wrong_keywords_are_told_at_once_with_suggestions():
    problems = refused_keywords(batch_sizes=64, optimizer={"name": "sgd", "lr": "x"}, seed=True, precision=NoConfig())
    told = {p.key: p for p in problems}
    assert told.keys() == {"batch_size", "batch_sizes", "optimizer.lr", "seed", "precision"}
    assert told["batch_sizes"].suggestion == "did you mean 'batch_size'?"
    assert "may mean precision=" in told["precision"].message
    (problem,) = refused_keywords(batch_size=8, precision=SlowConfig())
    assert problem.message.startswith("SlowConfig(...) is the Config of no strategy")


def test_a_reference_beside_a_list_counts_the_levels_of_omegaconf():
    layers = read('net: {dim: 3, layers: [{width: "${...dim}"}, {width: "${..0.width}"}]}\n').settings.net.layers
    assert [layer.width for layer in layers] == [3, 3]


def test_references_along_a_chain_have_the_types_of_the_fields_they_pass(monkeypatch):
    monkeypatch.setenv("FASTTRAIN_STEPS", "1e3")
    monkeypatch.setenv("FASTTRAIN_NOTE", "${seed} 1e3")
    resolved = read(
        """
        extra: {a: "${model.b}", t: "${table.1}"}
        model: {b: "${steps}", c: "${note}"}
        steps: ${oc.env:FASTTRAIN_STEPS}
        note: ${oc.env:FASTTRAIN_NOTE}
        table: {1: "${steps}"}
        """
    )
    assert resolved.settings.extra == {"a": 1000, "t": 1000.0}
    assert resolved.settings.model == {"b": 1000, "c": "${seed} 1e3"}
    assert type(resolved.settings.extra["a"]) is int
    assert type(resolved.settings.extra["t"]) is float
    Path("saved.yaml").write_text(resolved.to_yaml())
    assert load("saved.yaml") == resolved
