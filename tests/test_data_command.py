"""`data`: what it says of data sets that are right, and of each thing that can be wrong with one."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from fasttrain.cli import main
from tests import commands

CONFIG = "trainer: tests.test_data_command:{kind}\nbatch_size: 4\nsteps: 1\nrun: {{dir: null}}\n"
CLASSES = ("cat", "dog", "owl")


def photo(color, seed):
    """A JPEG of 12 x 10 pixels, as bytes."""
    pixels = np.random.RandomState(seed).randint(0, 60, (10, 12, 3)) + np.array(color)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Photos of three classes: 6 of each to train, 2 to evaluate."""
    for part, each in (("train", 6), ("val", 2)):
        for k, name in enumerate(CLASSES):
            place = tmp_path / "photos" / part / name
            place.mkdir(parents=True)
            for i in range(each):
                color = [180 if channel == k else 20 for channel in range(3)]
                (place / f"{i}.jpg").write_bytes(photo(color, f"{part}{k}{i}".__hash__() % 2**31))
    monkeypatch.setattr("fasttrain.cli.data.SECONDS", 0.05)
    return tmp_path / "photos"


def looked_at(folder, capsys, *words):
    """The exit code and the report of a ResNet's data in a folder."""
    config = folder.parent / "photos.yaml"
    config.write_text(
        "trainer: recipes.resnet:ResNet\nmodel: {name: resnet8}\n"
        f"data: {{name: folder, path: {folder}, image_size: 8}}\nbatch_size: 4\nsteps: 1\nrun: {{dir: {folder.parent}}}\n"
    )
    code = main(["data", "--config", str(config), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_a_folder_of_images_is_counted_and_drawn(folder, capsys):
    code, told = looked_at(folder, capsys)
    assert (code, told["ok"], told["problems"]) == (0, True, [])
    assert told["class_names"] == list(CLASSES)
    train, held_out = told["parts"]["train"], told["parts"]["evaluation"]
    assert (train["samples"], train["looked_at"], held_out["samples"]) == (18, 18, 6)
    assert train["labels"] == {"0": 6, "1": 6, "2": 6}
    assert held_out["labels"] == {"0": 2, "1": 2, "2": 2}
    (image, label) = train["entries"].values()
    assert (image["dtype"], image["shapes"]) == ("uint8", [[[3, 8, 8], 18]])
    assert (label["dtype"], label["range"]) == ("int64", [0.0, 2.0])
    assert told["in_both"] == {"count": 0, "first": []}
    rates = {row["workers"]: row["samples_per_s"] for row in told["loader"]}
    assert {0, 1} <= set(rates)
    assert all(rate > 0 for rate in rates.values())
    sheet = np.asarray(Image.open(told["sheet"]).convert("RGB")).astype(int)
    # The first photo is of one of three colors, and its class stands below it.
    first = sheet[10:60, 10:60].mean((0, 1))
    assert sorted(first)[2] - sorted(first)[1] > 60
    assert sheet[67:80, 2:40].sum(2).min() < 300


def test_broken_files_are_all_named_and_reading_goes_on(folder, capsys):
    good = (folder / "train" / "cat" / "0.jpg").read_bytes()
    (folder / "train" / "cat" / "0.jpg").write_bytes(good[: len(good) // 2])
    (folder / "train" / "owl" / "3.jpg").write_bytes(b"no image")
    (folder / "val" / "dog" / "1.jpg").write_bytes(b"")
    code, told = looked_at(folder, capsys)
    assert code == 1
    broken = {part: [entry["name"] for entry in told["parts"][part]["broken"]] for part in ("train", "evaluation")}
    assert broken["train"] == [str(folder / "train" / "cat" / "0.jpg"), str(folder / "train" / "owl" / "3.jpg")]
    assert broken["evaluation"] == [str(folder / "val" / "dog" / "1.jpg")]
    assert told["parts"]["train"]["labels"] == {"0": 5, "1": 6, "2": 5}
    assert sum("could not be read" in problem for problem in told["problems"]) == 3
    assert all(row["samples_per_s"] > 0 for row in told["loader"])


def test_a_file_that_is_in_training_and_evaluation_is_told(folder, capsys):
    copied = folder / "val" / "owl" / "1.jpg"
    copied.write_bytes((folder / "train" / "owl" / "2.jpg").read_bytes())
    _, told = looked_at(folder, capsys)
    assert told["in_both"] == {"count": 1, "first": [[str(folder / "train" / "owl" / "2.jpg"), str(copied)]]}


def test_limit_batches_limits_what_is_looked_at(folder, capsys):
    code, told = looked_at(folder, capsys, "limit_batches=2")
    assert code == 0  # a class may be missing in a part
    assert (told["parts"]["train"]["samples"], told["parts"]["train"]["looked_at"]) == (18, 8)


def trainer(train, evaluation):
    from fasttrain import Data
    from tests.helpers import Mlp

    return type("Labels", (Mlp,), {"build_data": lambda self: Data(train=train, evaluation=evaluation)})


def points(labels, seed):
    return torch.randn(len(labels), 8, generator=torch.Generator().manual_seed(seed)), torch.tensor(labels)


Right = trainer(points([0, 1, 2, 3] * 3, 0), points([0, 1, 2, 3], 1))
Negative = trainer(points([0, 1, -1, 3], 0), points([0, 1, 2, 3], 1))
Outside = trainer(points([0, 1, 2, 3], 0), points([0, 1, 2, 3, 7, 7], 1))
Missing = trainer(points([0, 1, 3, 3], 0), points([0, 1, 3], 1))
Nan = trainer((points([0, 1], 0)[0].fill_(float("nan")), torch.tensor([0, 1])), points([0, 1], 1))


@pytest.mark.parametrize(
    ("kind", "problems"),
    [
        ("Right", []),
        (
            "Negative",
            ["train: label -1 is outside of 0 to 3, in 1 samples, the first sample 2", "class 2 has no sample"],
        ),
        ("Outside", ["evaluation: label 7 is outside of 0 to 3, in 2 samples, the first sample 4"]),
        ("Missing", ["train: class 2 has no sample", "evaluation: class 2 has no sample"]),
        ("Nan", ["train: 16 values of [0] are not finite"]),
    ],
)
def test_labels_and_values_that_are_wrong_are_told(kind, problems, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fasttrain.cli.data.SECONDS", 0.05)
    config = tmp_path / "labels.yaml"
    config.write_text(CONFIG.format(kind=kind))
    code = main(["data", "--config", str(config), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (code, told["ok"]) == ((1, False) if problems else (0, True))
    assert len(told["problems"]) == len(problems)
    for given, expected in zip(told["problems"], problems, strict=True):
        assert expected in given
    assert told["sheet"] is None


Sorted = trainer(points([0] * 40 + [1, 2, 3], 0), points([0, 1, 2, 3], 1))


def test_labels_of_a_part_of_the_data_do_not_tell_how_many_classes_there_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fasttrain.cli.data.SECONDS", 0.05)
    config = tmp_path / "labels.yaml"
    config.write_text(CONFIG.format(kind="Sorted"))
    assert main(["data", "--config", str(config), "limit_batches=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "in training and evaluation: 0 samples of those looked at" in lines
    table = lines.index("4 classes (class, train, evaluation):")
    assert lines[table + 2 : table + 5] == ["  1 0 1", "  2 0 1", "  3 0 1"]
    assert lines[-1] == "nothing is wrong"


def test_plain_lines_where_no_terminal_is(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("fasttrain.cli.data.SECONDS", 0.05)
    assert main(["data", "--config", commands.DIGITS, "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train: 1,437 samples"
    assert "  [1]: int64 [], 0 to 9" in lines
    assert "evaluation: 360 samples" in lines
    assert "  8 134 40" in lines
    assert f"sheet: {tmp_path / 'sheet.png'}" in lines
    assert lines[-1] == "nothing is wrong"
    assert not any("\x1b" in line or "┃" in line for line in lines)


def test_what_is_given_on_a_terminal_is_a_table():
    from fasttrain.cli.data_page import page

    part = {"samples": 3, "looked_at": 3, "entries": {}, "labels": {"0": 2, "1": 1}, "repeated": None}
    report = {
        "parts": {"train": part}, "classes": 2, "class_names": ["cat", "dog"], "in_both": None, "text": None,
        "loader": [{"workers": 0, "samples_per_s": 10.0}], "sheet": None, "problems": ["train: wrong"],
    }  # fmt: skip
    drawn = page(report, True, 20)
    assert "┏━━━━━━━┳━━━━━━┳━━━━━━━┳" in drawn
    assert "│     1 │ dog  │     1 │ " in drawn
    assert "█" * 24 in drawn
    assert drawn.endswith("1 problem\n  train: wrong\n")


class Endless(torch.utils.data.IterableDataset):
    """Samples without end."""

    def __iter__(self):
        inputs, labels = points([0, 1, 2, 3], 0)
        while True:
            yield from zip(inputs, labels, strict=True)


Stream = trainer(Endless(), None)


def test_a_stream_is_looked_at_as_far_as_the_limit_says(tmp_path, capsys):
    config = tmp_path / "stream.yaml"
    config.write_text(CONFIG.format(kind="Stream"))
    assert main(["data", "--config", str(config), "--json", "limit_batches=32"]) == 0
    train = json.loads(capsys.readouterr().out)["parts"]["train"]
    assert (train["samples"], train["looked_at"]) == (None, 128)
    assert train["labels"] == {"0": 32, "1": 32, "2": 32, "3": 32}


def test_several_ranks_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["data", "--config", commands.DIGITS]) == 2
    assert "start it without torchrun" in capsys.readouterr().err


def test_a_wrong_request_ends_with_2(tmp_path):
    assert main(["data", "--config", str(tmp_path / "none.yaml")]) == 2
    assert main(["data"]) == 2
