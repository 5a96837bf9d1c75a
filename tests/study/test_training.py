"""Training and evaluation against a plain loop."""

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from maxgain.study import evaluate
from maxgain.study.data import table as datasets
from maxgain.study.data.splits import Dataset, Split
from maxgain.study.models import NETWORKS
from maxgain.study.recipes import RECIPES
from maxgain.study.training import PADDING, DivergedError, Training, augmented, train

CPU = torch.device("cpu")
RECIPE = replace(RECIPES["digits"], network="mlp", epochs=2, fold=0)


def pictures(count: int, classes: int = 10) -> Dataset:
    """A data set of noise in CIFAR's shape."""
    split = Split(
        torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8), torch.arange(count, dtype=torch.int64) % classes
    )
    return Dataset("noise", split, split, split, tuple(map(str, range(classes))))


# The step, against a loop that anybody would write.


@pytest.mark.parametrize("network", ["mlp", "cnn"])
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_training_is_the_plain_loop(digits: Dataset, network: str, optimiser: str) -> None:
    recipe = replace(RECIPE, network=network, optimiser=optimiser, learning_rate=0.005, weight_decay=0.01, seed=7)
    recipe = replace(recipe, epochs=3, milestones=(1, 2), decay=0.5)
    training = Training(recipe, digits, CPU)
    orders, rates, scores = [], [], []

    torch.manual_seed(7)
    model = NETWORKS[network]((1, 8, 8), 10)
    decayed = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    others = [p for p in model.parameters() if not any(p is q for q in decayed)]
    groups = [{"params": part, "weight_decay": decay} for part, decay in ((others, 0.0), (decayed, 0.01)) if part]
    optimisers = {
        "adam": lambda: torch.optim.Adam(groups, lr=0.005, foreach=False),
        "sgd": lambda: torch.optim.SGD(groups, lr=0.005, momentum=0.9, nesterov=True, foreach=False),
    }
    plain = optimisers[optimiser]()
    for epoch in train(training):
        orders.append(training.order.tolist())
        rates.append(epoch.learning_rate)
        losses, hits = [], 0
        for group in plain.param_groups:
            group["lr"] = 0.005 * 0.5 ** (epoch.number - 1)
        for start in range(0, len(digits.train) - 15, 16):
            index = orders[-1][start : start + 16]
            images, labels = digits.train.images[index] / 127.5 - 1, digits.train.labels[index]
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            plain.zero_grad()
            loss.backward()
            plain.step()
            losses.append(loss.item())
            hits += int((logits.argmax(1) == labels).sum())
        scores.append((sum(losses) / len(losses), hits / (16 * len(losses))))
        assert epoch.train.loss == pytest.approx(scores[-1][0], rel=1e-5)
        assert epoch.train.accuracy == scores[-1][1]
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(training.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert rates == [0.005, 0.0025, 0.00125]
    assert scores[-1][0] < 0.7 * scores[0][0], "the plain loop learned nothing, so it proves nothing"


def test_the_order_is_a_permutation_that_follows_from_seed_and_epoch(digits: Dataset) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        training = Training(replace(RECIPE, seed=seed), digits, CPU)
        torch.rand(epoch + 1)  # whatever else uses random numbers does not matter
        training.epoch = epoch
        training.begin_epoch()
        return training.order.tolist()

    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1, 2**32 - 1) for epoch in (0, 1, 2)}
    assert all(sorted(indices) == list(range(len(digits.train))) for indices in orders.values())
    assert len(set(map(tuple, orders.values()))) == len(orders)
    assert order(1, 2) == orders[1, 2]


def test_weights_start_as_the_network_makes_them(digits: Dataset) -> None:
    recipe = replace(RECIPE, network="cnn", regulariser="maxgain=0.1+batchnorm+dropout", seed=3)
    training = Training(recipe, digits, CPU)
    torch.manual_seed(3)
    built = NETWORKS["cnn"]((1, 8, 8), 10, batchnorm=True, dropout=nn.Dropout).state_dict()
    assert training.model.state_dict().keys() == built.keys()
    assert all(torch.equal(training.model.state_dict()[name], tensor) for name, tensor in built.items())


@pytest.mark.parametrize(
    ("name", "regulariser", "decays"),
    [
        ("cifar100", "batchnorm", {"conv": 2e-4}),
        ("cifar100", "batchnorm+weightdecay=0.5", {"conv": 0.5002, "dense": 0.5}),
        ("cifar100", "weightnorm", {"conv": 2e-4}),
        ("svhn", "batchnorm", {}),
    ],
)
def test_weight_decay_is_for_convolutions_alone(name: str, regulariser: str, decays: dict[str, float]) -> None:
    training = Training(replace(RECIPES[name], regulariser=regulariser), pictures(4), CPU)
    decay = {id(p): group["weight_decay"] for group in training.optimiser.param_groups for p in group["params"]}
    for name, parameter in training.model.named_parameters():
        kind = "dense" if "classifier" in name else "conv"
        wanted = decays.get(kind, 0.0) if parameter.dim() > 1 else 0.0
        assert decay.pop(id(parameter)) == pytest.approx(wanted), name
    assert not decay


def test_what_is_left_over_of_an_epoch_is_left_out(digits: Dataset) -> None:
    training = Training(replace(RECIPE, batch_size=50), digits, CPU)
    assert (len(digits.train), training.steps_per_epoch) == (108, 2)
    larger = Training(replace(RECIPE, batch_size=1000), digits, CPU)
    assert (larger.batch_size, larger.steps_per_epoch) == (108, 1)


class Watching(TorchDispatchMode):
    """Sees every operation, and raises at those for which the host would have to wait for a device."""

    waits = frozenset(f"aten::{name}" for name in ("_local_scalar_dense", "equal", "nonzero", "masked_select"))

    def __init__(self) -> None:
        super().__init__()
        self.armed, self.seen = True, set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(function.name().partition(".")[0])
        assert not (self.armed and self.waits & self.seen), f"{function} waits for the device"
        if not self.armed:
            self.seen -= self.waits
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("regulariser", ["none", "batchnorm+dropout", "gradpenalty", "variationaldropout"])
def test_a_step_never_waits_for_the_device(digits: Dataset, regulariser: str) -> None:
    training = Training(replace(RECIPE, network="cnn", augment=True, regulariser=regulariser), digits, CPU)
    training.begin_epoch()
    mode, step = Watching(), training.optimiser.step

    def optimise() -> None:
        # On the CPU, where nobody has to wait, torch's Adam reads the learning rate.
        mode.armed = False
        step()
        mode.armed = True

    training.optimiser.step = optimise
    with mode:
        training.step()
        training.step()
    assert {"aten::convolution", "aten::index"} <= mode.seen, "nothing was watched"
    with mode, pytest.raises(AssertionError, match="waits for the device"):
        training.loss.item()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("regulariser", ["none", "maxgain+batchnorm+dropout"])
def test_no_step_of_an_epoch_waits_for_a_gpu(digits: Dataset, regulariser: str) -> None:
    device = torch.device("cuda")
    training = Training(replace(RECIPE, network="cnn", augment=True, regulariser=regulariser), digits, device)
    training.begin_epoch()
    training.step()  # the constraint looks once whether it has seen everything
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(training.steps_per_epoch - 1):
            training.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(training.end_epoch().train.loss)


# Augmentation.


def test_augmentation_is_a_reflected_pad_a_crop_and_a_flip() -> None:
    height, width = 7, 12
    image = torch.randint(0, 256, (1, 2, height, width), dtype=torch.uint8)
    padded = F.pad(image.double(), (PADDING,) * 4, mode="reflect").to(torch.uint8)[0]
    crops = {}
    for row in range(2 * PADDING + 1):
        for column in range(2 * PADDING + 1):
            crop = padded[:, row : row + height, column : column + width]
            crops[crop.numpy().tobytes()] = row, column, False
            crops[crop.flip(2).contiguous().numpy().tobytes()] = row, column, True
    assert len(crops) == 2 * 81, "the image is too plain to tell its crops apart"

    drawn = [crops[copy.numpy().tobytes()] for copy in augmented(image, torch.zeros(4000, dtype=torch.int64))]
    for place, sides in enumerate((9, 9, 2)):
        counts = torch.tensor([row[place] for row in drawn], dtype=torch.int64).bincount(minlength=sides)
        expected = 4000 / sides
        assert ((counts - expected).abs() < 5 * math.sqrt(expected)).all(), "not every shift is as likely"
    assert len(set(drawn)) == 162, "shifts and flips do not combine freely"


def test_augmentation_takes_the_chosen_images() -> None:
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 1, 8, 8)
    assert augmented(images, torch.tensor([3, 0, 3]))[:, 0, 0, 0].tolist() == [3, 0, 3]


@pytest.mark.parametrize("side", range(1, 7))
def test_images_smaller_than_the_padding_are_reflected_to_and_fro(side) -> None:
    image = torch.arange(side**2, dtype=torch.uint8).view(1, 1, side, side)
    padded = np.pad(image[0, 0].numpy(), PADDING, "reflect")
    crops = {
        padded[row : row + side, column : column + side][:, ::step].tobytes()
        for row in range(2 * PADDING + 1)
        for column in range(2 * PADDING + 1)
        for step in (1, -1)
    }
    drawn = {copy.numpy().tobytes() for copy in augmented(image, torch.zeros(4000, dtype=torch.int64))}
    assert drawn == crops


def test_only_a_recipe_that_says_so_augments(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def forward(self: nn.Sequential, x: Tensor) -> Tensor:
        seen.append(x)
        return torch.zeros(len(x), 10, requires_grad=True)

    monkeypatch.setattr(nn.Sequential, "forward", forward)
    for augment in (False, True):
        training = Training(replace(RECIPE, augment=augment), digits, CPU)
        training.begin_epoch()
        training.step()
    index = training.order[:16]
    plain = digits.train.images[index] / 127.5 - 1
    torch.testing.assert_close(seen[0], plain)
    assert not torch.equal(seen[1], plain)
    assert seen[1].min() >= -1
    assert seen[1].max() <= 1


# Evaluation.


@torch.no_grad()
def test_evaluation_is_the_plain_loop() -> None:
    split = datasets.load("digits").train
    assert len(split) % evaluate.BATCH, "the last batch is to be an incomplete one"
    model = NETWORKS["cnn"]((1, 8, 8), 10, batchnorm=True, dropout=nn.Dropout)
    model(torch.randn(64, 1, 8, 8))  # running statistics that are not what they began as
    model.features.eval()
    score = evaluate.evaluate(model, split)
    assert model.training, "modes are put back"
    assert not model.features.training

    exact = NETWORKS["cnn"]((1, 8, 8), 10, batchnorm=True).double().eval()
    exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    losses, hits = [], 0
    for image, label in zip(split.images, split.labels, strict=True):
        logits = exact(image[None].double() / 127.5 - 1)[0]
        losses.append(float(logits.logsumexp(0) - logits[label]))
        hits += int(logits.argmax() == label)
    assert score.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert score.accuracy == hits / len(split)


# Divergence.


def test_the_loop_itself_raises_when_it_diverges(digits) -> None:
    epochs = train(Training(replace(RECIPE, epochs=5, milestones=(2,), decay=1e30), digits, CPU))
    assert [next(epochs).number, next(epochs).number] == [1, 2]
    with pytest.raises(DivergedError):
        next(epochs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_a_single_number_that_is_not_finite_is_noticed_wherever_the_model_keeps_it(digits, dtype, value) -> None:
    training = Training(RECIPE, digits, CPU)
    training.model.register_buffer("kept", torch.full((5,), torch.finfo(dtype).max, dtype=dtype))
    training.model.register_buffer("empty", torch.empty(0))
    training.model.register_buffer("counted", torch.tensor(3))
    training.expect_finite()
    training.model.kept[3] = value
    with pytest.raises(DivergedError, match="in epoch 1 "):
        training.expect_finite()


# Real data.


@pytest.mark.skipif("MAXGAIN_DATA" not in os.environ, reason="needs MAXGAIN_DATA, a folder with the real data sets")
def test_the_papers_network_steps_on_real_photographs() -> None:
    recipe = replace(RECIPES["cifar10"], regulariser="maxgain+batchnorm", batch_size=8)
    training = Training(recipe, datasets.load("cifar10"), CPU)
    before = {name: parameter.clone() for name, parameter in training.model.named_parameters()}
    training.begin_epoch()
    for _ in range(2):
        training.step()
    training.expect_finite()
    assert training.steps_per_epoch == 5000
    assert not any(torch.equal(parameter, before[name]) for name, parameter in training.model.named_parameters())
    (constraint,) = training.constraints
    assert len(constraint.gains) == 16 + 16 + 3
    assert all(0 < gain < 1e3 for gain in constraint.gains.values())
