"""A folder of pictures is a data set, cut the same way every time."""

import numpy as np
import pytest
import torch
from PIL import Image

from maxgain.errors import DataError
from maxgain.study.data import table as datasets
from study_data import fingerprints, picture


def test_a_folder_with_a_split_keeps_it(tmp_path):
    for part, shade in (("train", 10), ("val", 20), ("test", 30)):
        for label, name in enumerate(("cat", "dog")):
            for i in range(2):
                picture(tmp_path / part / name / f"{i}.png", colour=(shade + i, label, 200))
    data = datasets.load("folder", tmp_path, size=8)
    assert data.classes == ("cat", "dog")
    assert data.shape == (3, 8, 8)
    for split, shade in ((data.train, 10), (data.validation, 20), (data.test, 30)):
        assert split.labels.tolist() == [0, 0, 1, 1]
        colours = split.images[:, :, 3, 3].tolist()
        assert colours == [[shade, 0, 200], [shade + 1, 0, 200], [shade, 1, 200], [shade + 1, 1, 200]]
    assert datasets.check("folder", tmp_path) == []


def test_a_folder_without_validation_holds_a_tenth_of_training_out(tmp_path):
    for name in ("cat", "dog"):
        for i in range(20):
            picture(tmp_path / "train" / name / f"{i}.png", colour=(i, 0, 0))
        picture(tmp_path / "test" / name / "a.png")
    data = datasets.load("folder", tmp_path, size=4)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [36, 4, 2]
    assert data.validation.labels.bincount().tolist() == [2, 2]
    assert fingerprints(data.train, data.validation).most_common(1)[0][1] == 1


def test_a_folder_without_a_split_is_cut_the_same_way_every_time(tmp_path):
    for label, name in enumerate(("cat", "dog", "train")):
        for i in range(20):
            picture(tmp_path / name / f"{i}.png", colour=(i, label, 0))
    data, again = (datasets.load("folder", tmp_path, size=4) for _ in range(2))
    assert data.classes == ("cat", "dog", "train")
    for part, count in ((data.train, 16), (data.validation, 2), (data.test, 2)):
        assert part.labels.bincount().tolist() == [count] * 3
        assert part.images[:, 1, 0, 0].tolist() == part.labels.tolist()
    assert len(fingerprints(data.train, data.validation, data.test)) == 60
    assert torch.equal(data.train.images, again.train.images)


@pytest.mark.parametrize("names", [("Train", "Val", "Test"), ("training", "valid", "testing"), ("TRAIN", "", "TEST")])
def test_the_folders_of_a_split_go_by_several_names(names, tmp_path):
    for shade, part in enumerate(filter(None, names)):
        for name in ("cat", "dog"):
            for i in range(10):
                picture(tmp_path / part / name / f"{i}.png", colour=(shade, i, len(part)))
    data = datasets.load("folder", tmp_path, size=4)
    assert data.classes == ("cat", "dog")
    assert len(data.train) == (20 if names[1] else 18)
    picture(tmp_path / "TeSt" / "cat" / "0.png")
    with pytest.raises(DataError, match=rf"has TeSt and {names[2]}, of which one can be test|has {names[2]} and TeSt"):
        datasets.load("folder", tmp_path, size=4)


def test_a_picture_that_is_in_two_parts_is_noted(tmp_path):
    for shade, part in enumerate(("train", "val", "test")):
        for name in ("cat", "dog"):
            for i in range(2):
                picture(tmp_path / part / name / f"{i}.png", colour=(50 * shade + i, len(name) + ord(name[0]), 0))
    assert not datasets.load("folder", tmp_path, size=4).note
    picture(tmp_path / "test" / "cat" / "again.png", colour=(0, 3 + ord("c"), 0))
    assert datasets.load("folder", tmp_path, size=4).note == (
        "1 of the 5 test images are also among those that are trained on"
    )


def test_pictures_with_sixteen_bits_per_pixel_keep_their_shades(tmp_path):
    """Pillow alone would make everything from 255 of 65,535 on white."""
    shades = np.linspace(0, 65535, 16).astype(np.uint16).reshape(4, 4)
    for part in ("train", "val", "test"):
        for name in ("a.png", "b.tif"):
            (tmp_path / part / name[0]).mkdir(parents=True)
            Image.fromarray(shades).save(tmp_path / part / name[0] / name)
    for image in datasets.load("folder", tmp_path, size=4).train.images:
        assert (image == torch.tensor((shades // 257).astype(np.uint8))).all()


def test_pictures_of_which_nobody_knows_what_is_white_are_refused(tmp_path):
    for name in ("cat", "dog"):
        for i in range(10):
            picture(tmp_path / name / f"{i}.png")
    Image.new("F", (4, 4), 0.5).save(tmp_path / "cat" / "0.tif")
    with pytest.raises(DataError, match=r"0\.tif cannot be read .* 32 bits, of which none is known to be white"):
        datasets.load("folder", tmp_path, size=4)


def test_the_central_square_of_a_picture_is_kept(tmp_path, rng):
    """The smaller side is 8 already, so that nothing is resized and pixels can be compared."""
    pixels = rng.integers(0, 256, (8, 14, 3), dtype=np.uint8)
    for part in ("train", "val", "test"):
        for name in ("tall", "wide"):
            (tmp_path / part / name).mkdir(parents=True)
            image = pixels if name == "wide" else pixels.transpose(1, 0, 2)
            Image.fromarray(image).save(tmp_path / part / name / "x.PNG")
    tall, wide = datasets.load("folder", tmp_path, size=8).train.images.numpy()
    assert np.array_equal(wide, pixels[:, 3:11].transpose(2, 0, 1))
    assert np.array_equal(tall, pixels.transpose(1, 0, 2)[3:11].transpose(2, 0, 1))


def test_a_picture_is_resized_by_its_smaller_side(tmp_path):
    """Red, green and blue bands of 50, 100 and 50 in 200×100: the central square is the green one, at any size."""
    image = np.zeros((100, 200, 3), np.uint8)
    image[:, :50, 0] = image[:, 50:150, 1] = image[:, 150:, 2] = 255
    for part in ("train", "val", "test"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(image).save(tmp_path / part / name / "x.png")
    red, green, blue = datasets.load("folder", tmp_path, size=20).train.images[0, :, :, 2:-2]
    assert green.min() >= 250  # away from the edges, where the filter mixes the bands
    assert max(red.max(), blue.max()) <= 5
    assert datasets.load("folder", tmp_path).shape == (3, 96, 96)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_pictures_of_every_mode_become_colour_images(tmp_path, mode):
    suffix = "tif" if mode in ("CMYK", "I;16") else "png"
    for part in ("train", "val", "test"):
        for name in ("a", "b"):
            picture(tmp_path / part / name / "x.jpg")
            Image.new(mode, (10, 10)).save(tmp_path / part / name / f"y.{suffix}")
    assert datasets.load("folder", tmp_path, size=5).train.images.shape == (4, 3, 5, 5)


def test_a_picture_that_cannot_be_read_is_named(tmp_path):
    for name in ("a", "b"):
        for i in range(10):
            picture(tmp_path / name / f"{i}.png")
    (tmp_path / "a/3.png").write_bytes((tmp_path / "a/3.png").read_bytes()[:60])
    (tmp_path / "b/5.png").write_text("not a picture")
    with pytest.raises(DataError, match=r"(a/3|b/5)\.png cannot be read as an image .*; repair or remove it"):
        datasets.load("folder", tmp_path)
    problems = datasets.check("folder", tmp_path)
    assert len(problems) == 2
    assert all(any(name in problem for problem in problems) for name in ("a/3.png", "b/5.png"))


def test_files_that_are_hidden_or_no_pictures_are_passed_over(tmp_path):
    for name in ("a", "b"):
        for i in range(10):
            picture(tmp_path / name / f"{i}.png")
        (tmp_path / name / "notes.txt").write_text("x")
        (tmp_path / name / "._0.png").write_text("x")
    (tmp_path / ".cache").mkdir()
    data = datasets.load("folder", tmp_path, size=4)
    assert len(data.train) + len(data.validation) + len(data.test) == 20


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has 0 folders where one for each class is expected: name a folder"),
        (["a/0.png"], "has 1 folder where one for each class"),
        (["a/0.png", "b/notes.txt"], "b has no images"),
        (["a/0.png", "b/0.png"], "too few images"),
        (["train/a/0.png", "val/a/0.png"], "has train and val but needs both train and test, or neither"),
        (["train/a/0.png", "train/b/0.png", "test/c/0.png"], "test has a folder c, which is no class of the training"),
        (["train/a/0.png", "train/b/0.png", "test/a/0.png"], "test/b has no images"),
    ],
)
def test_folders_that_make_no_data_set_are_refused(tmp_path, files, message):
    for file in files:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(path) if path.suffix == ".png" else path.touch()
    with pytest.raises(DataError, match=message):
        datasets.load("folder", tmp_path)
    assert len(datasets.check("folder", tmp_path)) == 1


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="nowhere is not a folder: name a folder"):
        datasets.load("folder", tmp_path / "nowhere")


@pytest.mark.parametrize("size", [0, -3])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(DataError, match="choose a size from 1 to 4096"):
        datasets.load("folder", tmp_path, size=size)
