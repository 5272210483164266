"""The ResNet recipe on images of all kinds: bytes until the device, sizes by schedule, files read once."""

import gzip
import struct

import numpy as np
import pytest
import torch

from fasttrain import ConfigError
from fasttrain.config import load
from fasttrain.data.images import Files
from recipes import image_data
from recipes.resnet import ResNet
from tests.commands import ROOT
from tests.data.pictures import both
from tests.helpers import Recorder, largest_difference, state
from tests.ranks import run_ranks
from tests.real_data import needs

TINY = {
    "model": {"name": "resnet8", "stem": "half", "width": 8, "norm": "group"},
    "optimizer": {"name": "sgd", "lr": 0.05},
    "run": {"dir": None},
    "log": {"every": 1},
}


class Watched(ResNet):
    """Keeps what each training batch looked like when the model got it, and before."""

    def build_data(self):
        self.seen, self.given = [], []
        return super().build_data()

    def augment(self, batch, seed):
        self.given.append((batch[0].dtype, tuple(batch[0].shape[1:])))
        return super().augment(batch, seed)

    def inputs(self, batch):
        (images,) = super().inputs(batch)
        if self.model.training:
            self.seen.append((images.dtype, images.shape[-1]))
        else:
            assert images.shape[-1] == 24
        return (images,)


def fashion(root, count=30, side=24):
    """Files as torchvision leaves them, with random pictures."""
    rng = np.random.default_rng(0)
    for start, n in (("train", count), ("t10k", 10)):
        for part, shape in (("images-idx3", (n, side, side)), ("labels-idx1", (n,))):
            raw = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
            raw += rng.integers(0, 255 if len(shape) > 1 else 10, shape).astype(np.uint8).tobytes()
            (root / f"{start}-{part}-ubyte").write_bytes(raw)
    return root


def trained(data, kind=Watched, **settings):
    watcher = Recorder()
    trainer = kind(data=data, observers=[watcher], **{"batch_size": 6, **TINY, **settings})
    trainer.fit()
    return trainer, [record["loss"] for record in watcher.steps]


SIZES = {"smallest": 8, "multiple": 8, "grow_until": 0.8}
GROWN = [8] * 4 + [16] * 4 + [24] * 2


def test_images_in_memory_are_bytes_until_the_device_and_grow_there(tmp_path):
    trainer, losses = trained({"name": "fashion", "path": str(fashion(tmp_path)), "sizes": SIZES}, epochs=2)
    assert trainer.given == [(torch.uint8, (1, 24, 24))] * 10
    assert trainer.seen == [(torch.float32, side) for side in GROWN]
    assert len(losses) == 10


def test_images_in_folders_are_read_at_the_size_of_their_step(tmp_path):
    both(tmp_path, count=15)
    data = {"name": "folder", "path": str(tmp_path), "image_size": 24, "sizes": SIZES}
    trainer, _ = trained(data, epochs=2)
    assert trainer.given == [(torch.uint8, (3, side, side)) for side in GROWN]
    assert [side for _, side in trainer.seen] == GROWN


def test_a_batch_holds_each_image_as_often_as_asked(tmp_path):
    trainer, _ = trained(
        {"name": "fashion", "path": str(fashion(tmp_path)), "repeats": 3, "shift": 0}, kind=Kept, steps=1
    )
    (images,) = trainer.batches
    assert images.shape[0] == 6
    assert len(images.flatten(1).unique(dim=0)) == 2


class Stop(Recorder):
    def stepped(self, record):
        super().stepped(record)
        if record["step"] == 3:
            self.run.request_stop("test")


@pytest.mark.parametrize("mixed", [False, True])
def test_a_stopped_run_goes_on_with_the_sizes_and_changes_of_one_that_was_not(tmp_path, mixed):
    (tmp_path / "idx").mkdir()
    sizes = {**SIZES, "mixed": mixed}
    data = {"name": "fashion", "path": str(fashion(tmp_path / "idx")), "sizes": sizes, "mirror": True, "shift": 2}
    straight, losses = trained(data, epochs=2)
    run = {"dir": str(tmp_path), "name": "halved", "id": "x"}
    how = {**TINY, "batch_size": 6, "data": data, "epochs": 2, "run": run}
    first, second = Stop(), Recorder()
    halved = Watched(**how, observers=[first])
    assert halved.fit()["status"] == "stopped"
    resumed = Watched(**how, resume="auto", observers=[second])
    resumed.fit()
    assert halved.seen[:3] + resumed.seen == straight.seen
    assert [record["loss"] for record in first.steps + second.steps] == losses
    assert largest_difference(state(straight), state(resumed)) == 0.0


def changed_batches(path):
    """What a rank gives its model in five steps, the last one short."""
    trainer, _ = trained(
        {"name": "fashion", "path": path, "mirror": True, "shift": 2, "sizes": {**SIZES, "mixed": True}},
        kind=Kept,
        epochs=1,
        batch_size=7,
    )
    return trainer.batches


class Kept(ResNet):
    batches: list

    def inputs(self, batch):
        if self.model.training:
            self.batches = [*getattr(self, "batches", []), batch[0].clone()]
        return super().inputs(batch)


@pytest.mark.ranks
def test_ranks_together_change_images_as_one_does(tmp_path):
    path = str(fashion(tmp_path))
    alone = changed_batches(path)
    shares = run_ranks(2, changed_batches, path)
    assert len(alone) == 5
    for whole, *parts in zip(alone, *shares, strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_the_second_epoch_opens_no_file(tmp_path, monkeypatch):
    both(tmp_path, count=9)
    opened, read = [], Files.__getitem__
    monkeypatch.setattr(Files, "__getitem__", lambda files, index: opened.append(index) or read(files, index))
    data = {"name": "folder", "path": str(tmp_path), "image_size": 24, "cache": "2MB"}
    trained(data, epochs=3, evaluate={"every": 1000}, limit_batches=3)
    evaluated = 18
    assert sorted(opened) == sorted([*range(18), *range(evaluated)])


def test_broken_files_stop_the_run_by_name_or_are_left_out_on_request(tmp_path):
    both(tmp_path, count=7)
    broken = tmp_path / "train" / "cat" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:-300])
    data = {"name": "folder", "path": str(tmp_path), "image_size": 24}
    with pytest.raises(Exception, match=str(broken)):
        trained(data, epochs=1)
    with pytest.warns(UserWarning, match="1 of 14 images"):
        trainer, _ = trained({**data, "broken": "skip"}, epochs=1)
    assert len(trainer.data.train) == 13


def test_workers_to_be_found_and_batches_ahead_are_settings(tmp_path, monkeypatch):
    both(tmp_path, count=7)
    looked = []

    def leave_out(dataset, world, num_workers):
        looked.append(num_workers)

    monkeypatch.setattr("fasttrain.data.broken.leave_out_broken", leave_out)
    monkeypatch.setattr("recipes.image_data.cores_of_rank", lambda: 3)
    words = ["data.name=folder", f"data.path={tmp_path}", "data.image_size=24", "data.broken=skip", "run.dir=null"]
    settings = load(ROOT / "configs" / "resnet_photos.yaml", [*words, "data.num_workers=auto", "data.prefetch=5"])
    trainer = ResNet(settings)
    assert (trainer.data.num_workers, trainer.data.prefetch) == ("auto", 5)
    assert looked == [3, 3], "every file is looked at by as many workers as there are cores"
    with pytest.raises(ConfigError, match=r"prefetch=-1, num_workers=auto: use 0 or more"):
        load(ROOT / "configs" / "resnet_photos.yaml", ["data.num_workers=auto", "data.prefetch=-1"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "folder"}, "needs data.path"),
        ({"name": "folder", "path": "/nowhere"}, "no folder 'train'"),
        ({"name": "fashion", "path": "/nowhere"}, "scripts/fetch_data fashion"),
        ({"name": "patches"}, "scripts/fetch_data patches"),
        ({"name": "photos"}, "scripts/fetch_data photos"),
        ({"name": "folder", "cache": "4 G"}, "write it as 4GB"),
        ({"name": "folder", "sizes": {"smallest": 999}}, "more than the images' side of 224"),
    ],
)
def test_data_that_is_not_there_is_told_with_what_to_type(monkeypatch, tmp_path, data, message):
    monkeypatch.setenv("FASTTRAIN_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        ResNet(batch_size=6, data=data, steps=1, **TINY)


def test_gzipped_files_of_fashion_are_read_as_plain_ones(tmp_path):
    config = image_data.ImageData(name="fashion", path=str(fashion(tmp_path)))
    plain = image_data.build_images(config, None)
    for path in list(tmp_path.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    packed = image_data.build_images(config, None)
    assert torch.equal(plain.train[0], packed.train[0])
    assert torch.equal(plain.evaluation[1], packed.evaluation[1])
    assert plain.train[0].shape == (30, 1, 24, 24)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "classes"), [("fashion", 10), ("patches", 100), ("photos", 27)])
def test_a_config_trains_on_its_real_data(name, classes):
    needs(name)
    watcher = Recorder()
    short = ["epochs=null", "steps=3", "limit_batches=3", "run.dir=null", "log.every=1"]
    resolved = load(ROOT / "configs" / f"resnet_{name}.yaml", short)
    trainer = resolved.trainer(resolved, observers=[watcher])
    summary = trainer.fit()
    assert trainer.model.fc.out_features == classes
    assert len(watcher.steps) == 3
    assert watcher.steps[0]["loss"] == pytest.approx(np.log(classes), rel=0.5)
    assert 0 <= summary["metrics"]["accuracy"] <= 1
