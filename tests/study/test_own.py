"""Data and networks of one's own, as people have them: taken as they are meant, or refused in words."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from maxgain.errors import DataError, RecipeError
from maxgain.study import api, compare, dataset, train
from maxgain.study.runs import Watcher

IMAGES = np.random.default_rng(0).integers(0, 256, (10, 3, 8, 8), dtype=np.uint8)
LABELS = np.arange(10) % 2
GIVEN = (IMAGES, LABELS)


class Items(Dataset[Any]):
    """A data set of torch whose items a function makes."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, number: int) -> Any:
        return self.item(number)


def test_arrays_are_taken_in_whatever_order_of_bytes_and_strides_they_have() -> None:
    expected = dataset("mine", GIVEN, GIVEN).fingerprint
    fixed = IMAGES.copy()
    fixed.flags.writeable = False
    for images, labels in (
        (IMAGES[::-1][::-1], LABELS),
        (np.ascontiguousarray(IMAGES[..., ::-1])[..., ::-1], LABELS),
        (IMAGES, LABELS.astype(">i4")),
        (IMAGES.astype(np.int64), LABELS.astype(np.uint16)),
        (IMAGES.astype(">u2"), LABELS.astype(float)),
        (fixed, LABELS.tolist()),
        (list(IMAGES), list(LABELS)),
        (torch.tensor(IMAGES).contiguous(memory_format=torch.channels_last), torch.tensor(LABELS)),
        (IMAGES / 255, LABELS),
    ):
        assert dataset("mine", (images, labels), GIVEN).fingerprint == expected


def test_a_data_set_is_not_changed_with_the_array_it_was_made_of() -> None:
    images, labels = IMAGES.copy(), LABELS.copy()
    made = dataset("mine", GIVEN, (images, labels), validation=GIVEN)
    images[:], labels[:] = 0, 0
    assert torch.equal(made.test.images, torch.tensor(IMAGES))
    assert torch.equal(made.test.labels, torch.tensor(LABELS))


def test_images_that_are_in_two_parts_are_noted_and_readers_of_a_comparison_are_told(tmp_path) -> None:
    others = (255 - IMAGES, LABELS)
    assert not dataset("mine", GIVEN, others).note
    leaking = dataset("mine", GIVEN, (np.concatenate([255 - IMAGES, IMAGES[:2]]), np.arange(12) % 2))
    assert leaking.note == "2 of the 12 test images are also among those that are trained on"
    both = dataset("mine", GIVEN, others, validation=GIVEN).note
    assert both == "10 of the 10 validation images are also among those that are trained on"
    comparison = compare(
        leaking, ["none", "maxgain"], network=my_network, out=tmp_path / "two", seeds=2, epochs=1, batch_size=4
    )
    assert "Note: 2 of the 12 test images are also among those that are trained on." in str(comparison)


def test_images_whose_channels_come_last_are_doubted() -> None:
    last = (np.moveaxis(IMAGES, 1, 3), LABELS)
    with pytest.warns(UserWarning, match=r"8×8 pixels with 3 channels, which come last: .*permute\(0, 3, 1, 2\)"):
        dataset("mine", last, last)


def test_an_item_may_be_a_tensor_an_array_or_a_picture() -> None:
    expected = dataset("mine", GIVEN, GIVEN).fingerprint
    for made in (
        torch.tensor,
        lambda image: image.transpose(1, 2, 0),
        lambda image: Image.fromarray(image.transpose(1, 2, 0)),
    ):
        items = Items(lambda number, made=made: (made(IMAGES[number]), torch.tensor(LABELS[number])))
        assert dataset("mine", items, items).fingerprint == expected


@pytest.mark.parametrize("mode", ["P", "1", "I;16"])
def test_a_picture_is_made_of_its_levels_and_not_of_numbers_of_colours(mode) -> None:
    white = Image.new("RGB", (4, 4), "white")
    picture = {"P": white.convert("P"), "1": white.convert("1")}.get(mode) or Image.new("I;16", (4, 4), 65535)
    items = Items(lambda number: (picture, LABELS[number]))
    assert (dataset("mine", items, items).train.images == 255).all()


def test_what_items_do_wrong_is_said_with_their_number() -> None:
    def missing(number: int) -> Any:
        if number == 3:
            raise FileNotFoundError(2, "No such file or directory", "3.png")
        return torch.tensor(IMAGES[number]), 0

    def larger(number: int) -> Any:
        return torch.zeros(3, 8 + number, 8), 0

    for item, said in (
        (missing, "number 3 is not: FileNotFoundError: .*3.png"),
        (larger, r"number 1 is not: ValueError: its shape is \(3, 9, 8\), and the first's \(3, 8, 8\)"),
        (lambda number: (IMAGES[number], 0), r"shape \(3, 8, 8\) is not \(H, W, C\): make a tensor"),
        (lambda number: (Image.new("F", (8, 8)), 0), "32 bits, of which none is known to be white"),
        (lambda number: (torch.tensor(IMAGES[number]), 0.7), "labels must be whole numbers"),
        (lambda number: 1 / 0, "ZeroDivisionError"),
    ):
        with pytest.raises(DataError, match=said):
            dataset("mine", Items(item), GIVEN)


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (IMAGES.astype(float), LABELS, "fractions from 0 to 1, and here torch.float64 goes from .* to 255.0"),
        (IMAGES.astype(np.uint16) * 256, LABELS, "here torch.uint16 goes from"),
        (IMAGES > 9, LABELS, "here torch.bool goes from"),
        (torch.tensor(IMAGES).to_sparse(), LABELS, "sparse or nested"),
        (IMAGES[:, :, :0], LABELS, r"\(N, C, H, W\), not \(10, 3, 0, 8\)"),
        (IMAGES, np.array(["a", "b"] * 5), "the train labels are not numbers"),
        (IMAGES, None, "the train labels are not numbers"),
    ],
    ids=["large", "sixteen bits", "yes or no", "sparse", "empty", "words", "nothing"],
)
def test_what_is_no_picture_or_no_label_is_refused(images, labels, said) -> None:
    with pytest.raises(DataError, match=said):
        dataset("mine", (images, labels), GIVEN)


def test_classes_are_at_least_two_and_have_names_that_can_be_shown() -> None:
    alone = (IMAGES, LABELS * 0)
    with pytest.raises(DataError, match="there is 1 class, and nothing to tell apart"):
        dataset("mine", alone, alone)
    with pytest.raises(DataError, match="cannot be the name of a class"):
        dataset("mine", GIVEN, GIVEN, classes=["a", "\x1b[2J"])


def my_network(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, classes))


def trained(network, out, regulariser="maxgain=1", **settings):
    data = dataset("mine", GIVEN, GIVEN, validation=GIVEN)
    return train(data, regulariser, network=network, out=out, **({"epochs": 1, "batch_size": 4} | settings))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(192, 192), nn.Linear(192, 192), nn.Linear(192, classes)
        self.second.weight = self.first.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(images.flatten(1)).relu()).relu())


def tied(shape, classes):
    return Tied(classes)


def lazy(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(classes))


@pytest.mark.parametrize("network", [tied, lazy])
def test_tied_and_lazy_layers_are_trained_saved_and_taken_up(network, tmp_path, monkeypatch) -> None:
    whole = trained(network, tmp_path / "whole", epochs=2)
    perform = api.perform

    def stop(training):
        if training.epoch == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(api, "perform", lambda *args, **more: perform(*args, **more, watcher=Watcher(stepped=stop)))
    with pytest.raises(KeyboardInterrupt):
        trained(network, tmp_path / "parts", epochs=2)
    monkeypatch.undo()
    assert trained(network, tmp_path / "parts", epochs=2)["weights_sha256"] == whole["weights_sha256"]


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    trained(my_network, "~/run")
    assert (tmp_path / "run" / "result.json").exists()


def test_a_network_that_comes_in_evaluation_mode_is_trained_as_any_other(tmp_path) -> None:
    def pretrained(shape, classes):
        return nn.Sequential(nn.Dropout(0.5), my_network(shape, classes)).eval()

    def fresh(shape, classes):
        return nn.Sequential(nn.Dropout(0.5), my_network(shape, classes))

    weights = {
        trained(network, tmp_path / network.__name__, "none")["weights_sha256"] for network in (pretrained, fresh)
    }
    assert len(weights) == 1


def test_networks_of_which_no_fair_runs_can_be_made_are_refused(tmp_path) -> None:
    only, widths = my_network(None, 2), itertools.count(8)

    class Remembering(nn.Linear):
        def forward(self, images):
            return super().forward(images.flatten(1))

        def get_extra_state(self):
            return {"steps": 1}

    class Two(nn.Linear):
        def forward(self, images):
            scores = super().forward(images.flatten(1))
            return (scores, scores) if self.training else scores

    def another(shape, classes):
        width = next(widths)
        return nn.Sequential(nn.Flatten(), nn.Linear(192, width), nn.Linear(width, classes))

    for network, said in (
        (lambda shape, classes: only, "returns the same network again"),
        (another, "makes another network each time"),
        (lambda shape, classes: Remembering(192, classes), "_extra_state in its state"),
        (lambda shape, classes: Two(192, classes), "and not tuple, in training"),
        (lambda shape, classes: my_network(shape, classes).requires_grad_(False), "nothing of the network"),
        (lambda shape, classes: my_network(shape, classes).to("meta"), "on the device meta"),
    ):
        with pytest.raises(RecipeError, match=said):
            trained(network, tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_what_a_program_has_set_for_all_of_torch_changes_no_run(tmp_path) -> None:
    expected = trained(my_network, tmp_path / "plain")["weights_sha256"]
    around = {
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
        "device": torch.device("meta"),
    }
    for name, setting in around.items():
        with setting:
            assert trained(my_network, tmp_path / name)["weights_sha256"] == expected
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(RecipeError, match=r"torch.float32 here, and torch makes tensors of torch.float64"):
            trained(my_network, tmp_path / "double")
    finally:
        torch.set_default_dtype(torch.float32)
