"""Configs go back to YAML without loss, and are checked without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain import registry
from fasttrain.config import Resolved, Settings, from_keywords, load, seconds
from fasttrain.errors import ConfigError
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

# Back to YAML


def test_a_resolved_config_reads_the_same_by_any_reader():
    resolved = read(
        "optimizer: {name: adamw, lr: 1e-3, eps: 1e-8}\n"
        "extra: [1e-3, 'no', '1e3', '007', 'None', '12:30', 1e20, '1_0', '???']\n"
    )
    text = resolved.to_yaml()
    assert "lr: 0.001\n" in text
    plain = yaml.safe_load(text)
    assert plain["optimizer"]["eps"] == 1e-8
    assert plain["extra"] == resolved.settings.extra == [0.001, "no", "1e3", "007", "None", "12:30", 1e20, "1_0", "???"]
    assert plain == resolved.as_dict()


def test_the_hash_changes_with_the_training_and_not_with_its_names():
    one = read("optimizer: sgd\nrun: {name: a}\n")
    assert len(one.hash()) == 12
    same = read(
        "run: {name: b, id: '7'}\nlog: {every: 3}\noptimizer: {name: sgd, lr: 1e-1}\nresume: auto\nschedule: null\n"
    )
    assert same.hash() == one.hash()
    others = [read("optimizer: {name: sgd, lr: 0.2}\n"), read("optimizer: sgd\nseed: 1\n"), read("optimizer: adamw\n")]
    assert len({one.hash(), *(other.hash() for other in others)}) == 4


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "no",
        "null",
        "~",
        "",
        "1e3",
        "007",
        "12:30",
        "None",
        "${seed}",
        r"\${x}",
        "\\\\${y} \\",
        "a: b",
        "- x",
        "???",
        "1_0",
    ]
)
FLOAT = st.floats(allow_nan=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers(-9, 99), inner, max_size=3),
    max_leaves=6,
)
VALUES = st.fixed_dictionaries(
    {"batch_size": st.integers(1, 10**6)},
    optional={
        "seed": st.integers(-(10**6), 10**6),
        "note": st.none() | TEXT,
        "cache": st.integers() | TEXT,
        "rate": FLOAT | st.just("auto"),
        "words": st.lists(TEXT, max_size=4),
        "sizes": st.lists(st.integers(), max_size=4),
        "pair": st.tuples(FLOAT, FLOAT),
        "table": st.dictionaries(st.integers(), FLOAT, max_size=3),
        "extra": PLAIN,
        "model": st.dictionaries(TEXT, PLAIN, max_size=3),
        "fast": st.booleans(),
        "steps": st.none() | st.integers(1, 10**9),
        "net": st.builds(Model, dim=st.integers(), dropout=st.floats(0, 0.9), norm=st.sampled_from(Norm)),
        "optimizer": st.none()
        | st.fixed_dictionaries({"name": st.sampled_from(["sgd", "adamw"]), "lr": st.floats(1e-12, 1e3)}),
        "precision": st.sampled_from(["fp32", "bf16", None]),
        "weight_averaging": st.none() | st.builds(SlowConfig, decay=st.floats(1e-9, 0.999999)),
    },
)


def escaped(value: Any) -> Any:
    """Text in which nothing is a reference."""
    if isinstance(value, str):
        return value.replace("${", "$ {").replace("???", "??")
    if isinstance(value, dict):
        return {escaped(key): escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(escaped(item) for item in value)
    return value


@settings(max_examples=150, deadline=None)
@given(values=VALUES, order=st.randoms(use_true_random=False))
def test_writing_and_reading_gives_the_equal_config_in_any_order_of_keys(values, order):
    resolved = from_keywords(Fake, escaped(values))
    text = resolved.to_yaml()
    tree = yaml.safe_load(text)
    assert tree == resolved.as_dict(), "plain PyYAML reads the same values"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_text(text, encoding="utf-8")
        again = load(path)
        assert again == resolved
        assert again.hash() == resolved.hash()
        # Each top-level key with its lines, shuffled.
        blocks = re.split(r"^(?=[^ \n-])", text, flags=re.MULTILINE)
        assert len(blocks) > len(Fake.Config.__dataclass_fields__)
        order.shuffle(blocks)
        path.write_text("".join(blocks), encoding="utf-8")
        assert load(path) == resolved


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_any_text_survives_though_it_looks_like_a_reference(text):
    resolved = Resolved(None, Settings(batch_size=1, model={"text": text}), {}, {}, frozenset())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_text(resolved.to_yaml(), encoding="utf-8")
        assert load(path).settings.model == {"text": text}


# Without torch, and fast


def fresh(code: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    return json.loads(done.stdout)


FIVE_MISTAKES = "batch_size: 2.5\noptimizer: {name: sgd, lr: x}\nschedule: cosin\nlr: 0.1\nsed: 1\n"


def test_five_mistakes_are_told_without_torch_and_omegaconf_and_fast():
    Path("five.yaml").write_text(FIVE_MISTAKES)
    told = fresh(
        """
        import json, os, sys, time
        from fasttrain.config import check
        problems = check("five.yaml")[1]
        # CPU time of the whole process, the interpreter's start included: a busy machine does not lengthen it.
        used_s = time.process_time()
        loaded = [name for name in ("torch", "omegaconf", "numpy") if name in sys.modules]
        print(json.dumps([[problem.as_dict() for problem in problems], loaded, used_s]))
        """
    )
    problems, loaded, used_s = told
    assert [(p["key"], p["line"]) for p in problems] == [
        ("batch_size", 1),
        ("optimizer.lr", 2),
        ("schedule", 3),
        ("lr", 4),
        ("sed", 5),
    ]
    assert loaded == []
    assert used_s < 0.5


def test_every_slot_and_references_are_resolved_without_torch():
    lines = [f"{slot}: {next(iter(table))}" for slot, table in registry.BUILT_IN.items()]
    lines[lines.index("accumulation: microbatches")] = "accumulation: {name: microbatches, num: 2}"
    # The first of these clashes with float8, which exchanges the layers that it corrects.
    lines[lines.index("adapters: lora")] = "adapters: {name: freeze, freeze: [stem]}"
    assert len(lines) > 5
    Path("all.yaml").write_text("batch_size: 8\nseed: ${batch_size}\n" + "\n".join(lines) + "\n")
    seed, loaded = fresh(
        """
        import json, sys
        from fasttrain.config import check
        resolved, problems = check("all.yaml")
        print(json.dumps([[str(p) for p in problems] or resolved.settings.seed, "torch" in sys.modules]))
        """
    )
    assert seed == 8
    assert loaded is False


def test_a_module_that_imports_torch_is_noted():
    Path("heavy.py").write_text("import torch\nclass T: pass\n")
    Path("heavy.yaml").write_text("batch_size: 8\ntrainer: heavy:T\n")
    code = """
    import json
    from fasttrain.config import check
    resolved, problems = check("heavy.yaml")
    print(json.dumps([resolved.settings.trainer, list(problems), problems.notes]))
    """
    trainer, problems, notes = fresh(code)
    assert (trainer, problems) == ("heavy:T", [])
    assert len(notes) == 1
    assert "importing 'heavy' imported torch" in notes[0]


def test_durations_are_read_and_refused():
    assert [seconds(text) for text in ("90", "90s", "15m", "1h30m", "2d")] == [90, 90, 900, 5400, 172800]
    with pytest.raises(ConfigError, match="no duration"):
        seconds("soon")
