"""Folders of images: what is read, how much is decoded for it, and what is said where something is missing."""

import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from torchvision import datasets
from torchvision.transforms import v2

from fasttrain import ConfigError
from fasttrain.data.broken import find_broken, leave_out_broken
from fasttrain.data.images import ImageFolder, train_and_val
from fasttrain.data.pixels import centre_box, random_box, read_pixels, reduction
from fasttrain.data.seeds import seed_host
from fasttrain.distributed.world import World
from fasttrain.errors import BrokenSample
from tests.data.pictures import both, folder, photos


def encoded(image, kind="JPEG", **how):
    """The bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **how)
    return np.frombuffer(bytearray(file.getvalue()), np.uint8)


def whole(width, height):
    return 0, 0, width, height


def test_samples_are_those_of_torchvisions_folder(tmp_path):
    folder(tmp_path, ("dog", "cat", "ape"))
    ours, theirs = ImageFolder(tmp_path, size=32), datasets.ImageFolder(tmp_path)
    assert ours.classes == theirs.classes == ["ape", "cat", "dog"]
    assert [ours.name_of(i) for i in range(len(ours))] == [path for path, _ in theirs.samples]
    assert ours.targets.tolist() == theirs.targets
    pixels, label = ours[4]
    assert (pixels.shape, pixels.dtype, label) == ((3, 32, 32), torch.uint8, 1)


def test_the_pixels_are_those_of_torchvisions_reference_to_rounding(tmp_path):
    """The same box by the same draws; at its resolution, decoding and resizing are the same mathematics."""
    folder(tmp_path, size=(96, 64))
    ours = ImageFolder(tmp_path, size=48, mirror=False)
    reference = v2.Compose([v2.PILToTensor(), v2.RandomResizedCrop(48, antialias=True)])
    theirs = datasets.ImageFolder(tmp_path, reference)
    for index in range(6):
        seed_host(index)
        expected = theirs[index][0]
        seed_host(index)
        assert torch.equal(ours[index][0], expected)


def test_evaluation_takes_the_middle_as_resize_and_crop_do(tmp_path):
    folder(tmp_path, size=(112, 112))
    ours = ImageFolder(tmp_path, size=56, train=False)
    resize = v2.Compose([v2.PILToTensor(), v2.Resize(64, antialias=True), v2.CenterCrop(56)])
    theirs = datasets.ImageFolder(tmp_path, resize)
    assert len(ours) == 6
    for (read, _), (expected, _) in zip(ours, theirs, strict=True):
        # At the border pixels from outside of the box come in there.
        assert torch.equal(read[:, 1:-1, 1:-1], expected[:, 1:-1, 1:-1])


def test_what_is_drawn_follows_from_the_seed(tmp_path):
    dataset = ImageFolder(folder(tmp_path), size=24)

    def read(seed):
        seed_host(seed)
        return dataset[0][0]

    assert torch.equal(read(1), read(1))
    assert len({read(seed).numpy().tobytes() for seed in range(20)}) == 20


def test_half_of_the_images_are_mirrored(tmp_path):
    dataset = ImageFolder(folder(tmp_path), size=24)
    plain = ImageFolder(tmp_path, size=24, mirror=False)
    mirrored = 0
    for seed in range(40):
        seed_host(seed)
        one = dataset[0][0]
        seed_host(seed)
        other = plain[0][0]
        assert torch.equal(one, other) or torch.equal(one, other.flip(2))
        mirrored += not torch.equal(one, other)
    assert 10 < mirrored < 30


@pytest.fixture
def pixels_decoded(monkeypatch):
    """How many pixels each JPEG was decoded to."""
    counts = []
    load = JpegImageFile.load

    def counted(image):
        first = bool(image.tile)
        result = load(image)
        if first:
            counts.append(image.width * image.height)
        return result

    monkeypatch.setattr(JpegImageFile, "load", counted)
    return counts


@pytest.mark.parametrize(("size", "by"), [(400, 1), (214, 1), (213, 2), (107, 2), (106, 4), (53, 8), (10, 8)])
def test_a_jpeg_is_decoded_no_finer_than_its_box_needs(pixels_decoded, size, by):
    """640 × 427 as a whole: at the largest reduction that leaves `size` pixels in both sides."""
    data = encoded(photos()[0])
    fine = read_pixels(data, whole, size, reduced=False)
    coarse = read_pixels(data, whole, size)
    assert pixels_decoded == [640 * 427, -(-640 // by) * -(-427 // by)]
    assert fine.shape == coarse.shape == (3, size, size)
    # The same picture: a mean over blocks and a triangle, instead of the triangle alone.
    assert (fine.float() - coarse.float()).abs().mean() < 3


def test_a_small_box_of_a_large_photo_is_not_reduced(pixels_decoded):
    read_pixels(encoded(photos()[0]), lambda width, height: (100, 50, 150, 150), 100)
    assert pixels_decoded == [640 * 427]
    assert [reduction(side, 900, 100) for side in (199, 200, 399, 400, 800, 1600)] == [1, 2, 2, 4, 8, 8]


def test_a_box_of_a_reduced_jpeg_is_at_the_same_place():
    """A bright square on black: found where it is, to a pixel."""
    picture = Image.new("RGB", (640, 480))
    picture.paste((255, 255, 255), (200, 120, 360, 280))
    read = read_pixels(encoded(picture, quality=95), lambda width, height: (200, 120, 160, 160), 40)
    assert read[:, 1:-1, 1:-1].min() > 245
    read = read_pixels(encoded(picture, quality=95), lambda width, height: (40, 120, 160, 160), 40)
    assert read[:, :, :-2].max() < 10


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_jpegs_of_other_colours_come_in_three_planes(mode):
    photo = photos()[1]
    data = encoded(photo.convert(mode), quality=95)
    expected = torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB"))).permute(2, 0, 1)
    for size, reduced in ((100, True), (100, False)):
        read = read_pixels(data, lambda width, height: (0, 0, 400, 400), size, reduced)
        shrunk = torch.nn.functional.interpolate(
            expected[None, :, :400, :400], (size, size), mode="bilinear", antialias=True
        )
        assert (read.float() - shrunk[0].float()).abs().mean() < 3


@pytest.mark.parametrize("mode", ["P", "RGBA", "LA", "1"])
def test_other_kinds_of_files_are_read_too(mode):
    data = encoded(photos()[0].resize((60, 40)).convert(mode), "PNG")
    read = read_pixels(data, whole, 20)
    assert (read.shape, read.dtype) == ((3, 20, 20), torch.uint8)


def test_boxes_are_those_of_torchvision_and_lie_in_the_image():
    torch.manual_seed(0)
    for _ in range(50):
        left, top, width, height = random_box(90, 40)
        assert 0 <= left < left + width <= 90
        assert 0 <= top < top + height <= 40
    assert centre_box(512, 256) == (144, 16, 224, 224)


def test_a_broken_file_is_named_with_the_reason(tmp_path):
    folder(tmp_path)
    jpeg, cut, text = (tmp_path / "cat" / f"{i}.jpg" for i in range(3))
    cut.write_bytes(jpeg.read_bytes()[:1500])
    text.write_text("not a picture")
    dataset = ImageFolder(tmp_path, size=32)
    for index, reason in ((1, "truncated"), (2, "cannot identify image file")):
        with pytest.raises(BrokenSample, match=reason) as told:
            dataset[index]
        assert told.value.name == dataset.name_of(index)
        again = pickle.loads(pickle.dumps(told.value))
        assert (again.name, again.reason) == (told.value.name, told.value.reason)
    jpeg.unlink()
    with pytest.raises(BrokenSample, match="the file is gone"):
        dataset[0]


def test_a_file_broken_behind_its_header_is_found_and_left_out_on_request(tmp_path):
    folder(tmp_path, count=5)
    for number in (1, 3):
        path = tmp_path / "dog" / f"{number}.jpg"
        path.write_bytes(path.read_bytes()[:-200])
        with Image.open(path) as image:
            assert image.size == (96, 64)  # the header is whole
    dataset = ImageFolder(tmp_path, size=32)
    names = [dataset.name_of(i) for i in range(10)]
    assert [index for index, _ in find_broken(dataset, num_workers=2)] == [6, 8]
    with pytest.warns(UserWarning, match="2 of 10 images are broken and left out") as told:
        leave_out_broken(dataset, World(device=torch.device("cpu")))
    assert all(names[i] in str(told[0].message) for i in (6, 8))
    kept = [name for i, name in enumerate(names) if i not in (6, 8)]
    assert [dataset.name_of(i) for i in range(len(dataset))] == kept
    assert [dataset[i][1] for i in range(8)] == [0] * 5 + [1] * 3
    assert find_broken(dataset) == []


def test_a_class_of_broken_files_alone_is_refused(tmp_path):
    folder(tmp_path, count=1)
    (tmp_path / "dog" / "0.jpg").write_text("")
    with pytest.warns(UserWarning, match="1 of 2"), pytest.raises(ConfigError, match="dog: all images"):
        leave_out_broken(ImageFolder(tmp_path), World(device=torch.device("cpu")))


WRONG = {
    "no such folder": lambda root: root / "nowhere",
    "no folder in it": lambda root: root / "cat",
    "empty: there is no image": lambda root: (root / "empty").mkdir(),
    "cat/notes.txt: this is no image": lambda root: (root / "cat" / "notes.txt").write_text(""),
    "cat/README: this is no image": lambda root: (root / "cat" / "README").write_text(""),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_with_a_folder_is_said_with_its_path(tmp_path, message):
    folder(tmp_path)
    given = WRONG[message](tmp_path)
    root = given if message.startswith("no ") else tmp_path
    with pytest.raises(ConfigError, match=message) as told:
        ImageFolder(root)
    assert str(tmp_path) in str(told.value)


def test_hidden_files_are_passed_over_and_folders_within_a_class_are_looked_into(tmp_path):
    folder(tmp_path)
    (tmp_path / "cat" / ".DS_Store").write_text("")
    (tmp_path / "cat" / "more").mkdir()
    (tmp_path / "cat" / "0.jpg").rename(tmp_path / "cat" / "more" / "0.JPG")
    assert len(ImageFolder(tmp_path)) == 6


def test_other_classes_in_train_and_val_are_refused(tmp_path):
    both(tmp_path)
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "fox")
    with pytest.raises(ConfigError, match=r"val/dog: there is no such folder"):
        train_and_val(tmp_path)
    (tmp_path / "val" / "fox").rename(tmp_path / "val" / "dog")
    assert [len(part) for part in train_and_val(tmp_path)] == [6, 6]


def test_a_fingerprint_tells_classes_and_counts_apart(tmp_path):
    first = ImageFolder(folder(tmp_path / "a")).fingerprint()
    assert first == ImageFolder(folder(tmp_path / "b")).fingerprint()
    assert "6 images of 2 classes, cat to dog" in first
    others = [folder(tmp_path / "c", ("cat", "fox")), folder(tmp_path / "d", count=4)]
    (folder(tmp_path / "e") / "cat" / "1.jpg").rename(tmp_path / "e" / "dog" / "9.jpg")
    assert len({first, *(ImageFolder(other).fingerprint() for other in [*others, tmp_path / "e"])}) == 4
