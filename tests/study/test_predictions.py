"""Predictions come back as they were written, and what is damaged is named and never used."""

import io
import zipfile

import numpy as np
import pytest

from maxgain.errors import FileError, MissingFileError
from maxgain.study import predictions
from maxgain.study.predictions import Predictions


def some(classes=10, count=500, seed=0):
    random = np.random.default_rng(seed)
    predicted, labels = random.integers(classes, size=(2, count))
    return Predictions.of(predicted, labels, random.exponential(size=count).astype(np.float32))


@pytest.mark.parametrize(("classes", "kind"), [(10, np.uint8), (256, np.uint8), (257, np.uint16), (1000, np.uint16)])
def test_what_is_written_is_read(tmp_path, classes, kind):
    written = some(classes, 5000)
    predictions.write(tmp_path / "p.npz", written)
    found = predictions.read(tmp_path / "p.npz", written.sha256)
    assert found.predicted.dtype == found.label.dtype == kind
    for name in predictions.KINDS:
        np.testing.assert_array_equal(getattr(found, name), getattr(written, name))
    assert found.correct.sum() == (written.predicted == written.label).sum()
    assert (tmp_path / "p.npz").stat().st_size < 5000 * (2 * written.label.itemsize + 2) * 1.1


def test_the_same_predictions_make_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        predictions.write(tmp_path / name, some())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert some().sha256 != some(seed=1).sha256


def test_a_loss_without_room_is_infinite():
    kept = Predictions.of(np.array([1]), np.array([1]), np.array([1e6], np.float32))
    assert kept.loss[0] == np.inf


def packed(**arrays):
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def bomb():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file, file.open("label.npy", "w") as entry:
        for _ in range(predictions.LARGEST // 2**20 + 1):
            entry.write(bytes(2**20))
    return content.getvalue()


GOOD = some()
SMALL = {"predicted": GOOD.predicted, "label": GOOD.label, "loss": GOOD.loss}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no predictions"),
        (b"PK no zip", "holds no predictions"),
        (packed(predicted=GOOD.predicted), "holds no predictions"),
        (packed(**SMALL | {"loss": GOOD.loss[:3]}), "loss is not one number per image"),
        (packed(**SMALL | {"label": GOOD.label.astype(float)}), "label is not one number per image"),
        (packed(**SMALL | {"label": GOOD.label[:, None]}), "label is not one number per image"),
        (packed(**SMALL | {"label": np.array([object()] * 500)}), "holds no predictions"),
        (packed(**SMALL | {"predicted": GOOD.predicted[::-1].copy()}), "is damaged or of another run"),
        (bomb(), "unpacked it has more than"),
    ],
    ids=["empty", "no zip", "too little", "too short", "floats", "a matrix", "objects", "others", "a bomb"],
)
def test_what_is_no_predictions_is_named(tmp_path, content, said):
    (tmp_path / "p.npz").write_bytes(content)
    with pytest.raises(FileError, match=rf"p\.npz .*{said}") as caught:
        predictions.read(tmp_path / "p.npz", GOOD.sha256)
    assert str(caught.value).endswith("remove it.")


def test_every_flipped_bit_is_seen(tmp_path):
    predictions.write(tmp_path / "p.npz", GOOD)
    whole = (tmp_path / "p.npz").read_bytes()
    for place in range(0, len(whole), 37):
        (tmp_path / "p.npz").write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            found = predictions.read(tmp_path / "p.npz", GOOD.sha256)
        except FileError:
            continue
        assert found.sha256 == GOOD.sha256, "a bit that means nothing may flip"


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(MissingFileError):
        predictions.read(tmp_path / "p.npz", "")
