"""The study in Python: one's own tensors and network, with the same records, tests and page as the command line's."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from maxgain.errors import DataError, RecipeError
from maxgain.study import api, compare, dataset, page, train, training, tune
from maxgain.study.cli.app import main
from maxgain.study.comparing import jobs, records
from maxgain.study.models import NETWORKS
from maxgain.study.runs import Watcher, perform

QUICK = {"epochs": 2, "batch_size": 8, "device": "cpu"}


def part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(count) % 2
    images = (
        torch.randint(0, 100, (count, 1, 4, 4), dtype=torch.uint8) + (100 * labels).to(torch.uint8)[:, None, None, None]
    )
    return images, labels


def my_network(shape, classes, dropout=None):
    channels, height, width = shape
    inputs, noise = channels * height * width, [dropout(0.5)] if dropout else []
    return nn.Sequential(nn.Flatten(), *noise, nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, classes))


@pytest.fixture
def data():
    return dataset("mine", part(32), part(16), validation=part(8), classes=["dark", "light"])


def never(*_, **__):
    pytest.fail("this is recorded already")


def test_a_network_of_ones_own_is_trained_and_goes_on(data, tmp_path) -> None:
    result = train(data, "maxgain=1.5", network=my_network, out=tmp_path / "run", **QUICK)
    assert (result["recipe"], result["gamma"]) == ("mine", 1.5)
    assert result["config"]["network"].startswith("my_network-")
    assert train(data, "maxgain=1.5", network=my_network, out=tmp_path / "run", **QUICK) == result
    assert not [name for name in NETWORKS if "my_network" in name]
    assert "MaxGain (γ = 1.5) on mine" in page(tmp_path / "run", tmp_path / "run.html").read_text()


class Viewing(nn.Module):
    """As many a network is written: its images must lie in memory as they usually do."""

    def __init__(self, shape, classes) -> None:
        super().__init__()
        channels, height, width = shape
        self.convolution, self.dense = nn.Conv2d(channels, 4, 3, padding=1), nn.Linear(4 * height * width, classes)

    def forward(self, x):
        x = self.convolution(x).relu()
        return self.dense(x.view(x.size(0), -1))


def test_a_network_of_ones_own_gets_its_images_as_they_usually_lie_in_memory(data, tmp_path, monkeypatch) -> None:
    as_on_a_gpu = {("cpu", network): layout for (_, network), layout in training.MEMORY_FORMATS.items()}
    monkeypatch.setattr(training, "MEMORY_FORMATS", as_on_a_gpu)
    train(data, "maxgain=1.5", network=Viewing, out=tmp_path / "run", **QUICK)


def test_results_print_as_tables_and_notebooks_show_them(data, tmp_path) -> None:
    run = train(data, "maxgain=1.5", network=my_network, out=tmp_path / "run", **QUICK)
    tuned = tune(data, grid="gamma=1:2:1", network=my_network, out=tmp_path / "search", **QUICK)
    comparison = compare(data, ["none", "maxgain=1"], network=my_network, out=tmp_path / "two", seeds=2, **QUICK)
    for shown, words in (
        (run, ("mine, maxgain=1.5", "accuracy", "validation", "(nats)")),
        (tuned, ("chosen on the validation part", "gamma", "one of the 8 validation images")),
        (comparison, ("mine: test accuracy in %, over 2 seeds", "maxgain=1 : none", "verdict")),
    ):
        assert all(word in str(shown) for word in words), str(shown)
        assert shown._repr_html_().startswith("<table><caption>mine")
        assert len(repr(shown)) < 100
    assert repr(data) == "<mine: images of (1, 4, 4) in 2 classes: 32 train, 8 validation, 16 test>"


def test_a_comparison_is_recorded_and_made_a_page_of(data, tmp_path, monkeypatch) -> None:
    rows, said = ["none", "maxgain=1"], []
    comparison = compare(data, rows, network=my_network, out=tmp_path, seeds=2, tell=said.append, **QUICK)
    assert [row.done for row in comparison.rows] == [2, 2]
    assert len(records.read(tmp_path / "results").runs) == 4
    assert said[-1] == "comparing: 4 of 4 runs, maxgain=1, seed 1: done"
    monkeypatch.setattr(jobs, "run_recorded", never)  # nothing is trained twice
    again = compare(data, rows, network=my_network, out=tmp_path, seeds=2, **QUICK)
    assert again.contrasts == comparison.contrasts
    assert "Regularisers compared on mine" in page(tmp_path, tmp_path / "report.html").read_text()


def test_numbers_are_chosen_on_every_fold_before_folds_are_compared(data, tmp_path) -> None:
    comparison = compare(
        data,
        ["none", "dropout", "maxgain", "maxgain+dropout"],
        contrasts="matched",
        tuned=True,
        grid="gamma=0.5:1.5:1",
        folds=3,
        network=my_network,
        out=tmp_path,
        rope=1,
        **QUICK,
    )
    question = comparison.question
    assert (question.over, question.cross_validation, question.units) == ("fold", 3, (0, 1, 2))
    assert question.tuning_runs == {"maxgain": 2, "maxgain+dropout": 2}
    assert question.contrasts == (("maxgain", "none"), ("maxgain+dropout", "dropout"))
    chosen = {run.regulariser for run in question.rows["maxgain"]}
    assert chosen <= {"maxgain=0.5", "maxgain=1.5"}
    assert len(records.read(tmp_path / "tuning" / "results").runs) == 12
    assert all(run["test_accuracy"] is None for run in records.read(tmp_path / "tuning" / "results").runs)
    assert "Chosen: maxgain=" in page(tmp_path, tmp_path / "report.html").read_text()


def test_a_number_is_chosen_without_a_look_at_the_test_part(data, tmp_path) -> None:
    tuned = tune(data, "maxgain", grid=["gamma=1:2:1"], network=my_network, out=tmp_path, **QUICK)
    assert tuned.regulariser in ("maxgain=1", "maxgain=2")
    assert "test_accuracy" not in tuned.to_json()
    assert len(tuned.curve) == 2
    assert "γ for MaxGain on mine" in page(tmp_path, tmp_path / "tune.html").read_text()


def test_python_and_the_command_line_compute_the_same_and_share_their_records(tmp_path, monkeypatch, capsys) -> None:
    settings = {"epochs": 1, "network": "mlp", "device": "cpu"}
    here = compare("digits", ["none", "maxgain=2"], folds=2, out=tmp_path, **settings)
    monkeypatch.setattr(jobs, "run_recorded", never)  # what Python recorded is not trained again
    words = ["compare", "digits", "--regularisers", "none", "maxgain=2", "--folds", "2", "--epochs", "1"]
    assert main([*words, "--network", "mlp", "--device", "cpu", "--out", str(tmp_path), "--json"]) == 0
    assert f'"mean": {here.row("none").summary.mean}' in capsys.readouterr().out


class Pictures(Dataset):
    """As a folder of pictures: images from Pillow, grey or in colour, and their labels."""

    def __init__(self, images, labels, mode="L") -> None:
        self.items = list(zip(images, labels, strict=True))
        self.mode = mode

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number):
        image, label = self.items[number]
        return Image.fromarray(image[0].numpy()).convert(self.mode), int(label)


def test_every_form_in_which_people_have_images_becomes_the_same_data() -> None:
    images, labels = part(20)
    same = [
        (images, labels),
        (images.numpy(), labels.tolist()),
        [images.float() / 255, labels.float()],
        TensorDataset(images, labels),
        TensorDataset(images / 255, labels),
        Pictures(images, labels),
    ]
    made = [dataset("mine", form, form, form) for form in same]
    assert len({data.fingerprint for data in made}) == 1
    colour = Pictures(images, labels, "RGB")
    assert dataset("mine", colour, colour).shape == (3, 4, 4)


def test_without_a_validation_part_a_fifth_of_the_training_images_becomes_one() -> None:
    data = dataset("mine", part(40), part(8))
    assert (len(data.train), len(data.validation)) == (32, 8)
    assert data.validation.labels.bincount().tolist() == [4, 4]
    assert dataset("mine", part(40), part(8)).fingerprint != data.fingerprint  # the images are drawn anew
    assert data.classes == ("0", "1")


def test_another_network_under_the_same_name_is_another_run(data, tmp_path) -> None:
    def wide(width):
        def network(shape, classes):
            return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, classes))

        return network

    for width, runs in ((8, 2), (4, 4), (8, 4)):
        compare(data, ["none"], seeds=2, network=wide(width), out=tmp_path, **QUICK)
        assert len(records.read(tmp_path / "results").runs) == runs


def test_other_data_under_the_same_name_are_other_runs_and_another_search(data, tmp_path) -> None:
    other = dataset("mine", part(24), part(16), validation=part(8))
    for mine, count in ((data, 1), (other, 2), (data, 2)):
        compare(mine, ["none"], seeds=1, out=tmp_path / "runs", **QUICK)
        assert len(records.read(tmp_path / "runs" / "results").runs) == count
        tune(mine, grid="gamma=1:1:1", out=tmp_path / "search", **QUICK)
        assert len(list((tmp_path / "search" / "runs").iterdir())) == count


def test_a_stopped_run_is_saved_and_raises_what_python_raises(data, tmp_path, monkeypatch) -> None:
    def stop(*_):
        raise api.Interrupted("runs/mine")

    monkeypatch.setattr(api, "perform", lambda *args, **more: perform(*args, **more, watcher=Watcher(stepped=stop)))
    with pytest.raises(KeyboardInterrupt, match="is saved: the same call goes on"):
        train(data, out=tmp_path, **QUICK)


def test_what_makes_no_sense_is_said_in_pythons_words(data, tmp_path) -> None:
    images, labels = part(4)
    with pytest.raises(DataError, match=r"fractions from 0 to 1, and here torch.float32 goes from"):
        dataset("mine", (images.float(), labels), part(2))
    with pytest.raises(DataError, match="2 images and labels of shape"):
        dataset("mine", (images[:2], torch.zeros(3)), part(2))
    with pytest.raises(DataError, match="labels must be below 100,000, and one of them is 1099511627776"):
        dataset("mine", (images, torch.full((4,), 2**40)), part(2))
    with pytest.raises(DataError, match="whole numbers from 0 on"):
        dataset("mine", (images, labels - 1), part(2))
    from_one = [(images, labels + 1) for images, labels in (part(4), part(4))]
    with pytest.raises(DataError, match="labels are counted from 0, and the least here is 1"):
        dataset("mine", train=from_one[0], test=from_one[1])
    with pytest.raises(DataError, match="choose another name"):
        dataset("digits", part(4), part(2))
    with pytest.raises(DataError, match="items must be pairs"):
        dataset("mine", TensorDataset(images), part(2))
    with pytest.raises(RecipeError, match=r"called with \(shape, classes, batchnorm=...\), which it does not take"):
        train(data, "batchnorm", network=my_network, out=tmp_path, **QUICK)
    with pytest.raises(RecipeError, match="there is no setting 'rate'"):
        train(data, out=tmp_path, rate=3)
    with pytest.raises(RecipeError, match="no setting 'gamma': write it into the regulariser, as in maxgain=2"):
        train(data, out=tmp_path, gamma=3)
    with pytest.raises(RecipeError, match="needs folds or seeds"):
        compare(data, ["none"], out=tmp_path)
    with pytest.raises(RecipeError, match="makes a new one for every run"):
        train(data, network=nn.Linear(2, 2), out=tmp_path)
    with pytest.raises(RecipeError, match="there is no recipe 'digit': did you mean 'digits'"):
        train("digit", out=tmp_path)
    for wrong, said in {
        nn.Identity(): "has no parameters",
        nn.Linear(3, 2): r"cannot take images of .*: RuntimeError",
        nn.Sequential(nn.Flatten(), nn.LazyLinear(1)): r"numbers of the shape \(2, 2\), and not \(2, 1\)",
        nn.Sequential(nn.Flatten(), nn.LazyLinear(2), nn.LSTM(2, 2)): "and not tuple",
    }.items():
        with pytest.raises(RecipeError, match=said):
            train(data, network=lambda shape, classes, wrong=wrong: wrong, out=tmp_path, **QUICK)
    assert not list(tmp_path.iterdir())


def test_the_commands_do_not_wait_for_what_python_needs() -> None:
    code = "import sys, maxgain.study; assert 'maxgain.study.api' not in sys.modules and 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert np.array_equal(sorted(dir(sys.modules["maxgain.study"])), sorted(api.__all__))
