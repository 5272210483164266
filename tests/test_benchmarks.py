"""The benchmarks run; what they say of speed is for a quiet machine, and of GPUs for one that has them."""

import csv
import os
import subprocess
import sys

import pytest
import torch

from benchmarks import compile as compiling
from benchmarks import data as in_memory
from benchmarks import gpu, strategies, text
from benchmarks.gpu import TinyWords
from tests.commands import ROOT
from tests.real_data import needs


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_benchmark_of_data_in_memory_compares_with_a_loader():
    row = in_memory.compare("28x28 uint8", batch_size=256, rounds=1)
    assert row["images"] == "28x28 uint8"
    assert row["ratio"] == row["least_ratio"] > 0.5  # other work on the machine may fall on one of the two
    assert row["feed_samples_per_s"] > 0 < row["loader_samples_per_s"]


def test_the_overhead_benchmark_compares_with_a_flat_loop():
    command = [sys.executable, "benchmarks/overhead.py", "--rounds", "1", "--only", "mlp"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[-1].split()
    figures = dict(zip(words[::2], words[1::2], strict=True))
    assert figures["recipe"] == "mlp"
    assert 0.2 < float(figures["ratio"]) < 5.0  # other work on the machine may fall on one of the two
    assert float(figures["flat_us"]) > 0.0
    assert float(figures["trainer_calls"]) > 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_benchmark_says_what_it_needs(capsys):
    assert gpu.main([]) == 2
    message = capsys.readouterr().err
    assert f"torch {torch.__version__} sees no cuda device here" in message
    assert "--device cpu --tiny" in message


def test_the_gpu_benchmark_appends_rows(tmp_path):
    path = tmp_path / "results" / "gpu.csv"
    for _ in range(2):
        assert gpu.main(["--device", "cpu", "--tiny", "--only", "fp32", "--save", str(path)]) == 0
    rows = rows_of(path)
    assert [row["model"] for row in rows] == ["resnet50", "bert_base"] * 2
    for row in rows:
        assert row["status"] == "done"
        assert (row["setting"], row["torch"], row["device"]) == ("fp32", torch.__version__, "cpu")
        assert float(row["step_ms"]) > 0.0
        assert float(row["ratio"]) == pytest.approx(float(row["step_ms"]) / float(row["flat_ms"]), rel=1e-2)


@pytest.mark.slow
def test_a_warm_start_of_the_compile_benchmark_compiles_nothing(tmp_path):
    path = tmp_path / "compile.csv"
    compiling.main(["--only", "bert4", "blocks", "--rounds", "1", "--save", str(path)])
    (row,) = rows_of(path)
    assert (row["model"], row["compile"], row["graphs"], row["misses"]) == ("bert4", "blocks", "1", "0")
    assert float(row["cold_s"]) > 0.0
    assert float(row["ratio"]) == pytest.approx(float(row["cold_s"]) / float(row["warm_s"]), rel=5e-2)


def compiled_with(backend):
    """The settings, compiled by another backend: inductor's C++ compiler takes minutes on a CPU."""
    compile_blocks = {"name": "blocks", "backend": backend}
    return {name: s | {"compile": compile_blocks} if "compile" in s else s for name, s in gpu.SETTINGS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("model", gpu.MODELS)
def test_every_setting_of_the_gpu_benchmark_runs_or_says_why_not(monkeypatch, tmp_path, model):
    monkeypatch.setattr(gpu, "SETTINGS", compiled_with("aot_eager"))
    path = tmp_path / "gpu.csv"
    assert gpu.main(["--device", "cpu", "--tiny", "--only", model, "--save", str(path)]) == 0
    rows = {row["setting"]: row for row in rows_of(path)}
    assert list(rows) == list(gpu.SETTINGS)
    reasons = {setting: row["reason"] for setting, row in rows.items() if row["status"] == "refused"}
    expected = {"tf32": "has no TensorFloat-32", "bf16+float8+compile": "float8"}
    if model == "bert_base":
        expected |= {name: "no 2-D or 3-D convolution" for name in gpu.SETTINGS if "channels_last" in name}
    else:
        expected["bf16+lora"] = "hold no linear layer"
    assert set(reasons) == set(expected)
    assert all(part in reasons[setting] for setting, part in expected.items())
    assert {row["status"] for row in rows.values()} == {"done", "refused"}


@pytest.mark.slow
def test_a_compiled_setting_of_the_gpu_benchmark_runs_with_inductor(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "MODELS", {"bert_base": gpu.MODELS["bert_base"]})
    path = tmp_path / "gpu.csv"
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "bf16+budget+compile", "--save", str(path)]) == 0
    assert [(row["model"], row["status"]) for row in rows_of(path)] == [("bert_base", "done")]


def test_what_there_is_no_time_for_is_named(tmp_path):
    path = tmp_path / "gpu.csv"
    assert gpu.main(["--device", "cpu", "--tiny", "--minutes", "-1", "--save", str(path)]) == 0
    rows = rows_of(path)
    # Both models with what comes first, before either with what comes last.
    assert [(r["setting"], r["model"]) for r in rows] == [(s, m) for s in gpu.SETTINGS for m in gpu.MODELS]
    assert {row["status"] for row in rows} == {"left out"}


@pytest.mark.parametrize("setting", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", gpu.MODELS)
def test_the_flat_loop_trains_as_the_trainer_does(monkeypatch, name, setting):
    kind, cpu = gpu.MODELS[name][1], torch.device("cpu")
    settings = {"batch_size": kind.samples, "steps": 4, "run": {"dir": None}, "device": "cpu"}
    trainer = kind(**settings, optimizer={"name": "adamw", "lr": 1e-4}, **gpu.SETTINGS[setting])
    batches = gpu.endless(trainer.data.train, kind.samples, cpu)
    torch.manual_seed(0)
    trainer.model.load_state_dict(trainer.build_model().state_dict())
    for _ in range(2):
        trainer.train_step(next(batches))
    models = []
    build = kind.build_model
    monkeypatch.setattr(kind, "build_model", lambda self: models.append(build(self)) or models[-1])
    flat = gpu.flat_block(trainer, setting, cpu)
    assert flat is not None
    flat(2)
    trained, by_hand = trainer.model.state_dict(), models[0].state_dict()
    assert set(trained) == set(by_hand)
    assert all(torch.equal(trained[key], by_hand[key]) for key in trained)


@pytest.mark.slow
def test_the_benchmark_of_strategies_counts_what_one_saves(monkeypatch, tmp_path):
    path = tmp_path / "strategies.csv"
    rows = {"full": strategies.ROWS["activation_checkpointing"]["full"]}
    monkeypatch.setattr(strategies, "ROWS", {"activation_checkpointing": rows})
    strategies.main(["--no-times", "--only", "resnet50", "--save", str(path)])
    rows = strategies.newest(path)
    assert len(rows) == 2
    plain, full = rows["", "plain", "resnet50"], rows["activation_checkpointing", "full", "resnet50"]
    assert float(full["kept_mib"]) < 0.4 * float(plain["kept_mib"])
    assert float(full["peak_mib"]) < 0.6 * float(plain["peak_mib"])
    assert float(full["gflop"]) == pytest.approx(4 / 3 * float(plain["gflop"]), rel=0.02)


def test_times_are_those_of_turns_with_plain_training():
    ratio = strategies.time_ratio(
        TinyWords, {"accumulation": {"name": "microbatches", "num": 2}}, torch.device("cpu"), 1
    )
    assert 0.1 < ratio < 20.0  # other work on the machine may fall on one of the two


def test_the_text_benchmark_counts_text_and_not_padding(monkeypatch):
    needs("movie")
    needs("minilm")
    monkeypatch.setattr(text, "MIXES", {"short": 32})
    tiny = {"width": 16, "layers": 1, "heads": 2, "feedforward": 16}
    rows = text.measure("short", 2, 2, torch.device("cpu"), tiny)
    assert [row["way"] for row in rows] == list(text.WAYS)
    share = {row["way"]: row["text_share"] for row in rows}
    assert share["fixed"] < share["padded"] < share["grouped"] < share["unpadded"]
    assert share["fixed"] < 0.5 < 0.9 < share["packed"] <= share["unpadded"] <= 1
    assert rows[0]["ratio"] == 1
    assert all(row["tokens_per_s"] > 0 and row["batch_size"] == 32 for row in rows)
