"""The configs in the repository hold what they promise."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from fasttrain.config import check, load
from tests.commands import DIGITS, ROOT, run
from tests.helpers import Recorder

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def test_all_configs_are_looked_at():
    names = {path.name for path in CONFIGS}
    assert {"resnet_digits.yaml", "bert_docstrings.yaml", "resnet50_imagenet.yaml", "bert_base_mlm.yaml"} <= names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_has_no_problem_and_explains_itself(path):
    resolved, problems = check(path)
    assert problems == []
    assert resolved.trainer is not None
    done = run("explain", "--config", str(path.relative_to(ROOT)))
    assert done.returncode == 0, done.stderr
    assert "optimizer=" in done.stdout


def test_two_steps_of_the_imagenet_run_on_tiny_images(tmp_path):
    rng = np.random.default_rng(0)
    for part, count in (("train", 4), ("val", 2)):
        for name in ("cat", "dog"):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 255, (40, 48, 3), dtype=np.uint8)).save(folder / f"{i}.jpg")
    watcher = Recorder()
    # aot_eager instead of generated code: what is compiled is the same, and no compiler is waited for.
    tiny = [
        "batch_size=4",
        "epochs=null",
        "steps=2",
        "data.num_workers=2",
        "data.image_size=32",
        "compile.backend=aot_eager",
    ]
    resolved = load(
        ROOT / "configs" / "resnet50_imagenet.yaml", [*tiny, f"data.path={tmp_path}", "run.dir=null", "log.every=1"]
    )
    trainer = resolved.trainer(resolved, observers=[watcher])
    summary = trainer.fit()
    assert [record["step"] for record in watcher.steps] == [1, 2]
    assert 0.1 < watcher.steps[0]["loss"] < 5
    assert 0 <= summary["metrics"]["accuracy"] <= 1
    assert sum(parameter.numel() for parameter in trainer.model.parameters()) == 23_508_032 + 2 * 2048 + 2


def test_two_steps_of_the_bert_base_run_on_a_small_text(tmp_path):
    text = "the model learns to guess what was hidden from it by looking at all the words around the hole"
    words = text.split()
    rng = np.random.default_rng(0)
    text = "\n\n".join(" ".join(rng.permutation(words)) for _ in range(400))
    (tmp_path / "text.txt").write_text(text)
    tiny = [
        "batch_size=4",
        "steps=2",
        "accumulation.size=2",
        "data.sequence_length=32",
        "data.vocabulary=256",
        "model.layers=2",
    ]
    watcher = Recorder()
    config = ROOT / "configs" / "bert_base_mlm.yaml"
    extra = ["schedule.warmup=1", f"data.files={tmp_path}", "run.dir=null", "log.every=1"]
    drop = ["compile=null"] if "compile" in load(config).names else []
    resolved = load(config, [*tiny, *extra, *drop])
    resolved.trainer(resolved, observers=[watcher]).fit()
    assert [record["step"] for record in watcher.steps] == [1, 2]
    # At the start every word is as likely as any other.
    assert watcher.steps[0]["loss"] == pytest.approx(np.log(256), rel=0.3)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_quickstart_reaches_its_accuracy(tmp_path, ranks):
    done = run("--config", DIGITS, f"run.dir={tmp_path}", "run.id=a", ranks=ranks)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "resnet-digits" / "a" / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["world_size"] == ranks
    assert summary["metrics"]["accuracy"] >= 0.985


@pytest.mark.slow
def test_the_docstring_bert_comes_below_the_unigram_entropy(tmp_path):
    """A tenth of the full run: the loss must be falling and clearly under where it began; the full run goes far below."""
    done = run(
        "--config",
        "configs/bert_docstrings.yaml",
        "limit_batches=400",
        "epochs=1",
        f"run.dir={tmp_path}",
        "run.id=a",
        "evaluate.every=400",
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "bert-docstrings" / "a" / "summary.json").read_text())
    assert summary["metrics"]["loss"] < summary["metrics"]["unigram_entropy"]
    assert torch.isfinite(torch.tensor(summary["metrics"]["perplexity"]))


def test_the_table_of_settings_is_that_of_the_code():
    import dataclasses
    import re

    from fasttrain.config import Settings

    table = (ROOT / "docs" / "configuration.md").read_text().split("## Settings")[1].split("## Layers")[0]
    told = {key for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for key in re.findall(r"`([\w.]+)`", row)}
    known = set()
    for field in dataclasses.fields(Settings):
        default = field.default_factory() if callable(field.default_factory) else None
        nested = dataclasses.fields(default) if dataclasses.is_dataclass(default) else []
        known |= {f"{field.name}.{inner.name}" for inner in nested} or {field.name}
    assert told == known - {"model", "data"} | {"extends"}
