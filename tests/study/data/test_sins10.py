"""SINS-10 from ImageNet: what is written can be loaded, is stratified, and is whole or not there."""

import json

import numpy as np
import pytest
from PIL import Image

from maxgain.errors import DataError, RunError
from maxgain.study.data import sins10
from maxgain.study.data import table as datasets

PER_CLASS = 20


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """Ten classes of two synsets with eleven or twelve images each; the colour tells synset and image."""
    root = tmp_path_factory.mktemp("imagenet")
    for synset in range(20):
        folder = root / f"n{synset:08}"
        folder.mkdir()
        for image in range(11 + synset % 2):
            Image.new("RGB", (110, 100), (synset, image, 100)).save(folder / f"{folder.name}_{image}.PNG")
    return root


@pytest.fixture
def mapping(tmp_path):
    path = tmp_path / "classes.json"
    path.write_text(json.dumps({f"class {i}": [f"n{2 * i:08}", f"n{2 * i + 1:08}"] for i in range(10)}))
    return path


def build(imagenet, mapping, out, **options):
    return sins10.build(imagenet, mapping, out, **({"per_class": PER_CLASS, "progress": False} | options))


def read(out):
    return np.fromfile(out / "X.bin", np.uint8).reshape(-1, 3, 96, 96), np.fromfile(out / "y.bin", np.uint8)


def test_every_image_is_labelled_with_the_class_of_its_synset_and_used_once(imagenet, mapping, tmp_path):
    images, labels = read(build(imagenet, mapping, tmp_path / "sins10"))
    assert np.bincount(labels).tolist() == [PER_CLASS] * 10
    colours = images[:, :, 50, 50]
    assert (colours[:, 0] // 2 == labels).all()
    assert len({tuple(colour) for colour in colours.tolist()}) == len(labels)
    assert (images == colours[:, :, None, None]).all()


def test_what_is_built_is_loaded_fold_by_fold_with_all_classes_alike(imagenet, mapping, tmp_path):
    build(imagenet, mapping, tmp_path / "sins10")
    for fold in range(10):
        data = datasets.load("sins10", tmp_path, fold=fold)
        together = data.train.join(data.validation).join(data.test)
        assert together.labels.bincount().tolist() == [2] * 10
        assert data.classes == tuple(f"class {i}" for i in range(10))


def test_training_and_test_parts_have_all_classes_alike(imagenet, tmp_path, mapping, monkeypatch):
    """A hundred images a class and fold, taken from the labels alone: no image has to be read."""
    monkeypatch.setattr(sins10.pictures, "find", lambda folder: [folder / str(i) for i in range(500)])
    monkeypatch.setattr(sins10.pictures, "read_all", lambda paths, side: (np.zeros(3, np.uint8) for _ in paths))
    labels = np.fromfile(build(imagenet, mapping, tmp_path / "out", per_class=1000) / "y.bin", np.uint8)
    for fold in labels.reshape(10, 1000):
        assert np.bincount(fold[:900]).tolist() == [90] * 10
        assert np.bincount(fold[900:]).tolist() == [10] * 10


def test_the_same_seed_gives_the_same_bytes_and_another_gives_others(imagenet, mapping, tmp_path):
    first, again, other = (
        read(build(imagenet, mapping, tmp_path / str(i), seed=seed)) for i, seed in enumerate((0, 0, 1))
    )
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[1], again[1])
    assert not np.array_equal(first[0], other[0])


def test_progress_is_shown_when_it_is_asked_for(imagenet, mapping, tmp_path, capfd):
    build(imagenet, mapping, tmp_path / "out", progress=True)
    assert "200/200" in capfd.readouterr().err


def test_too_few_images_name_the_class_and_both_numbers(imagenet, mapping, tmp_path):
    with pytest.raises(DataError, match="the class class 0 has 23 images where 10,000 are needed"):
        build(imagenet, mapping, tmp_path / "out", per_class=10_000)
    assert not (tmp_path / "out").exists()


def test_a_corrupt_image_is_named_and_nothing_is_left(imagenet, mapping, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for folder in imagenet.iterdir():
        (copy / folder.name).symlink_to(folder)
    (copy / "n00000003").unlink()
    (copy / "n00000003").mkdir()
    for i in range(12):
        (copy / "n00000003" / f"bad_{i}.JPEG").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(DataError, match=r"n00000003/bad_\d+\.JPEG cannot be read as an image"):
        build(copy, mapping, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["classes.json", "copy"]


def test_a_synset_that_is_not_there_is_named(imagenet, mapping, tmp_path):
    mapping.write_text(mapping.read_text().replace("n00000004", "n09999999"))
    with pytest.raises(DataError, match="has no folder n09999999, which the class class 2 asks for"):
        build(imagenet, mapping, tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has to map names of classes to lists of synsets"),
        ('{"dog": "n02084071"}', "has to map"),
        ('{"dog": []}', "has to map"),
        ('{"dog": [1]}', "has to map"),
        ('{"dog": ["../elsewhere"]}', "has to map"),
        ('{"dog": [".."]}', "has to map"),
        ('{"": ["n1"]}', "has to map"),
        ('{"two\\nlines": ["n1"]}', "has to map"),
        ('{"dog": ["n1"]}', "has 1 classes where 10 are needed"),
        (json.dumps({str(i): ["n1"] for i in range(10)}), "names the synset n1 more than once"),
    ],
)
def test_a_mapping_that_makes_no_sense_is_refused(imagenet, mapping, tmp_path, content, message):
    mapping.write_text(content)
    with pytest.raises(DataError, match=message):
        build(imagenet, mapping, tmp_path / "out")


def test_a_mapping_that_is_not_there_is_one_sentence(imagenet, tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.json is missing"):
        build(imagenet, tmp_path / "nowhere.json", tmp_path / "out")


@pytest.mark.parametrize("per_class", [0, -10, 15])
def test_a_number_that_makes_no_equal_folds_is_refused(imagenet, mapping, tmp_path, per_class):
    with pytest.raises(DataError, match="choose a multiple of 10"):
        build(imagenet, mapping, tmp_path / "out", per_class=per_class)


def test_what_is_there_already_is_not_written_over(imagenet, mapping, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/X.bin").write_bytes(b"old")
    with pytest.raises(RunError, match="not an empty folder"):
        build(imagenet, mapping, tmp_path / "out")
    assert (tmp_path / "out/X.bin").read_bytes() == b"old"
