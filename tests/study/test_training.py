"""Training and evaluation against a plain loop, and each option against the obvious."""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from maxgain.study import data
from maxgain.study.capture import own_randomness, stream_for
from maxgain.study.networks import NETWORKS
from maxgain.study.recipe import RECIPES
from maxgain.study.training import (
    EVALUATION_BATCH,
    PADDING,
    Adam,
    DivergedError,
    Training,
    augment,
    cut_out,
    evaluate,
    gains,
    parts,
    train,
)

CPU = torch.device("cpu")
RECIPE = replace(RECIPES["digits"], network="mlp", epochs=2, fold=0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# --- The step, against a loop that anybody would write


@pytest.mark.parametrize("network", ["mlp", "cnn"])
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("schedule", ["steps", "cosine", "triangular"])
def test_plain_loop(digits, network, optimiser, schedule):
    recipe = replace(RECIPE, network=network, optimiser=optimiser, learning_rate=0.005, weight_decay=0.01, seed=7)
    recipe = replace(recipe, epochs=3, milestones=(1, 2), decay=0.5, schedule=schedule, label_smoothing=0.1)
    training = Training(recipe, digits, CPU)
    torch.manual_seed(7)
    model = NETWORKS[network]((1, 8, 8), 10)
    decayed = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    others = [p for p in model.parameters() if not any(p is q for q in decayed)]
    groups = [{"params": part, "weight_decay": decay} for part, decay in ((others, 0.0), (decayed, 0.01)) if part]
    plain = (
        torch.optim.Adam(groups, lr=0.005)
        if optimiser == "adam"
        else torch.optim.SGD(groups, lr=0.005, momentum=0.9, nesterov=True)
    )
    means = []
    for epoch, (mean_loss, accuracy) in enumerate(train(training)):
        order, losses, hits = training.order.tolist(), [], 0
        for step in range(6):
            for group in plain.param_groups:
                group["lr"] = recipe.learning_rate_at(epoch + (step + 0.5) / 6)
            index = order[16 * step : 16 * step + 16]
            images, labels = digits.train.images[index] / 127.5 - 1, digits.train.labels[index]
            logits = model(images)
            target = 0.9 * F.one_hot(labels, 10) + 0.1 / 10
            loss = -(target * logits.log_softmax(1)).sum(1).mean()
            plain.zero_grad()
            loss.backward()
            plain.step()
            losses.append(loss.item())
            hits += int((logits.argmax(1) == labels).sum())
        means.append(sum(losses) / 6)
        assert mean_loss == pytest.approx(means[-1], rel=1e-4)
        assert accuracy == hits / 96
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(training.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    assert means[-1] < 0.9 * means[0], "the plain loop learned nothing, so it proves nothing"


def test_adam_is_torchs_to_the_bit():
    layers = [[nn.Linear(7, 5), nn.Linear(5, 3)] for _ in range(2)]
    for one, other in zip(*layers, strict=True):
        other.load_state_dict(one.state_dict())
    kinds, optimizers = (torch.optim.Adam, Adam), []
    for kind, (first, second) in zip(kinds, layers, strict=True):
        groups = [{"params": [*first.parameters()], "weight_decay": 0.01}, {"params": [*second.parameters()]}]
        optimizers.append(kind(groups, lr=torch.tensor(0.003), foreach=False))
    for number in range(30):
        x = torch.randn(4, 7)
        for (first, second), optimizer in zip(layers, optimizers, strict=True):
            z = first(x).relu()
            (z if number % 3 else second(z)).square().sum().backward()  # the second layer takes fewer steps
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(*layers, strict=True):
        for weight, same in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(weight, same)
            states = [optimizer.state[p] for optimizer, p in zip(optimizers, (weight, same), strict=True)]
            assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_order_follows_from_seed_and_epoch(digits):
    def order(seed, epoch):
        training = Training(replace(RECIPE, seed=seed), digits, CPU)
        training.epoch = epoch
        training.begin_epoch()
        return tuple(training.order.tolist())

    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1, 2**32 - 1) for epoch in (0, 1, 2)}
    assert all(sorted(one) == list(range(108)) for one in orders.values())
    assert len(set(orders.values())) == 9
    assert order(1, 2) == orders[1, 2]


@pytest.mark.parametrize(
    ("regulariser", "conv", "dense"),
    [("batchnorm", 2e-4, 0), ("batchnorm+weightdecay=0.5", 0.5002, 0.5), ("weightnorm", 2e-4, 0)],
)
def test_weight_decay_of_the_recipe_is_for_convolutions(digits, regulariser, conv, dense):
    training = Training(replace(RECIPES["cifar100"], regulariser=regulariser), digits, CPU)
    decay = {id(p): group["weight_decay"] for group in training.optimizer.param_groups for p in group["params"]}
    for name, parameter in training.model.named_parameters():
        expected = 0 if parameter.dim() == 1 else dense if "classifier" in name else conv
        assert decay[id(parameter)] == pytest.approx(expected), name


def test_incomplete_batches_are_dropped(digits):
    assert Training(replace(RECIPE, batch_size=50), digits, CPU).steps_per_epoch == 2
    larger = Training(replace(RECIPE, batch_size=1000), digits, CPU)
    assert (larger.batch_size, larger.steps_per_epoch) == (108, 1)


class NoWaiting(TorchDispatchMode):
    """Raises at operations for which the host would wait for a device."""

    waits = frozenset(f"aten::{name}" for name in ("_local_scalar_dense", "equal", "nonzero", "masked_select"))

    def __init__(self):
        super().__init__()
        self.armed, self.seen = True, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().partition(".")[0]
        self.seen.add(name)
        assert not (self.armed and name in self.waits), f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("regulariser", ["none", "batchnorm+dropout", "gradpenalty", "variationaldropout"])
@pytest.mark.parametrize("schedule", ["steps", "cosine"])
def test_step_never_waits_for_the_device(digits, regulariser, schedule):
    recipe = replace(RECIPE, network="cnn", augment=True, cutout=3, label_smoothing=0.1, schedule=schedule)
    training = Training(replace(recipe, regulariser=regulariser), digits, CPU)
    training.begin_epoch()
    mode, step = NoWaiting(), training.optimizer.step

    def optimize():  # on the CPU torch's Adam reads the learning rate
        mode.armed = False
        step()
        mode.armed = True

    training.optimizer.step = optimize
    with mode:
        training.step()
        training.step()
    assert {"aten::convolution", "aten::index"} <= mode.seen, "nothing was watched"
    with mode, pytest.raises(AssertionError, match="waits for the device"):
        training.loss.item()


# --- Options


def test_label_noise(digits):
    recipe = replace(RECIPE, label_noise=0.5)
    noisy, held_out = parts(recipe, digits)
    for part, clean in ((noisy, digits.train), (held_out, digits.validation)):
        changed = (part.labels != clean.labels).float().mean().item()
        assert changed == pytest.approx(0.5 * 0.9, abs=0.1)  # a random label is the right one in 1 of 10
        assert torch.equal(part.images, clean.images)
        assert part.labels.unique().tolist() == list(range(10))
    assert torch.equal(parts(recipe, digits)[0].labels, noisy.labels)
    assert not torch.equal(parts(replace(recipe, seed=1), digits)[0].labels, noisy.labels)
    both, nothing = parts(replace(recipe, train_on="train+validation"), digits)
    assert nothing is None
    assert torch.equal(both.labels, torch.cat([noisy.labels, held_out.labels]))
    assert parts(RECIPE, digits) == (digits.train, digits.validation)


@pytest.mark.parametrize("side", [1, 2, 3, 20])
def test_cutout_erases_one_square(side):
    images = torch.ones(500, 2, 6, 9)
    erased = cut_out(images, side) == 0
    assert torch.equal(erased[:, 0], erased[:, 1])
    rows, columns = erased[:, 0].any(2), erased[:, 0].any(1)
    assert torch.equal(erased[:, 0], rows[:, :, None] & columns[:, None, :])
    for cut, size in ((rows, 6), (columns, 9)):
        count = cut.sum(1)
        assert count.min() >= 1
        assert count.max() == min(side, size)
        assert ((cut.int().diff(dim=1) == 1).sum(1) <= 1).all(), "not one stretch"
        assert cut.float().mean(0).min() > 0, "some pixel is never erased"


@pytest.mark.parametrize("cutout", [0, 3])
def test_cutout_is_off_by_default(digits, cutout, monkeypatch):
    seen = []
    training = Training(replace(RECIPE, cutout=cutout), digits, CPU)
    training.forward = lambda images: seen.append(images) or training.model(images)
    training.begin_epoch()
    training.step()
    plain = digits.train.images[training.order[:16]] / 127.5 - 1
    assert torch.allclose(seen[0], plain) == (not cutout)


def test_precision(digits):
    assert Training(RECIPE, digits, CPU).precision == "float32"
    dtypes = {}
    for precision in ("float32", "bfloat16"):
        training = Training(replace(RECIPE, precision=precision), digits, CPU)
        training.model.classifier.fc1.register_forward_hook(
            lambda module, inputs, output, precision=precision: dtypes.update({precision: output.dtype})
        )
        training.begin_epoch()
        training.step()
        assert all(parameter.dtype == torch.float32 for parameter in training.model.parameters())
    assert dtypes == {"float32": torch.float32, "bfloat16": torch.bfloat16}


def test_augmentation_is_a_reflected_pad_a_crop_and_a_flip():
    height, width = 7, 12
    image = torch.randint(0, 256, (1, 2, height, width), dtype=torch.uint8)
    padded = F.pad(image.double(), (PADDING,) * 4, mode="reflect").to(torch.uint8)[0]
    crops = {}
    for row in range(2 * PADDING + 1):
        for column in range(2 * PADDING + 1):
            crop = padded[:, row : row + height, column : column + width]
            crops[crop.numpy().tobytes()] = row, column, False
            crops[crop.flip(2).contiguous().numpy().tobytes()] = row, column, True
    drawn = [crops[copy.numpy().tobytes()] for copy in augment(image, torch.zeros(4000, dtype=torch.int64))]
    for place, sides in enumerate((9, 9, 2)):
        counts = torch.tensor([row[place] for row in drawn], dtype=torch.int64).bincount(minlength=sides)
        assert ((counts - 4000 / sides).abs() < 5 * math.sqrt(4000 / sides)).all(), "not every shift is as likely"
    assert len(set(drawn)) == 162, "shifts and flips do not combine freely"


@pytest.mark.parametrize("side", range(1, 7))
def test_small_images_are_reflected_more_than_once(side):
    image = torch.arange(side**2, dtype=torch.uint8).view(1, 1, side, side)
    padded = np.pad(image[0, 0].numpy(), PADDING, "reflect")
    crops = {
        padded[row : row + side, column : column + side][:, ::step].tobytes()
        for row in range(2 * PADDING + 1)
        for column in range(2 * PADDING + 1)
        for step in (1, -1)
    }
    assert {copy.numpy().tobytes() for copy in augment(image, torch.zeros(4000, dtype=torch.int64))} == crops


# --- Evaluation and divergence


@torch.no_grad()
def test_evaluation_is_the_plain_loop():
    split = data.load("digits").train
    assert len(split) % EVALUATION_BATCH, "the last batch is to be an incomplete one"
    model = NETWORKS["cnn"]((1, 8, 8), 10, batchnorm=True, dropout=nn.Dropout)
    model(torch.randn(64, 1, 8, 8))
    model.features.eval()
    loss, accuracy, _ = evaluate(model, split)
    assert (model.training, model.features.training) == (True, False), "modes are not put back"
    exact = NETWORKS["cnn"]((1, 8, 8), 10, batchnorm=True).double().eval()
    exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    logits = exact(split.images.double() / 127.5 - 1)
    assert loss == pytest.approx(F.cross_entropy(logits, split.labels).item(), rel=1e-5)
    assert accuracy == (logits.argmax(1) == split.labels).double().mean().item()


def test_measuring_in_threads_leaves_the_compiler_on():
    class Measured(nn.Sequential):
        def forward(self, images):
            self.inside()
            return super().forward(images)

    images = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    first, second = (Measured(nn.Flatten(), nn.Linear(4, 2)) for _ in range(2))
    first_is_inside, second_is_inside, first_ended = threading.Event(), threading.Event(), threading.Event()
    first.inside = lambda: (first_is_inside.set(), second_is_inside.wait(1))  # which it may not enter meanwhile
    second.inside = lambda: (second_is_inside.set(), first_ended.wait())

    def compiled():
        graphs = []
        torch.compile(lambda x: x + 1, backend=lambda graph, _: graphs.append(graph) or graph.forward)(torch.ones(1))
        return len(graphs)

    assert compiled() == 1
    with ThreadPoolExecutor() as pool:
        one = pool.submit(gains, first, images, 2.0)
        one.add_done_callback(lambda _: first_ended.set())
        first_is_inside.wait()
        pool.submit(gains, second, images, 2.0).result()
    assert compiled() == 1


def test_divergence_is_raised(digits):
    epochs = train(Training(replace(RECIPE, epochs=5, milestones=(2,), decay=1e30), digits, CPU))
    assert len([next(epochs), next(epochs)]) == 2
    with pytest.raises(DivergedError):
        next(epochs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64])
def test_one_number_that_is_not_finite(digits, dtype, value):
    training = Training(RECIPE, digits, CPU)
    training.model.register_buffer("kept", torch.full((5,), torch.finfo(dtype).max, dtype=dtype))
    training.model.register_buffer("empty", torch.empty(0))
    training.model.register_buffer("counted", torch.tensor(3))
    training.expect_finite()
    training.model.kept[3] = value
    with pytest.raises(DivergedError, match="epoch 1"):
        training.expect_finite()


# --- Devices


def test_cpu_steps_are_eager(digits):
    training = Training(RECIPE, digits, CPU)
    assert training.fast_step() == training.step
    assert training.generator is None


@pytest.mark.parametrize(
    ("changes", "own", "kind"),
    [
        ({"epochs": 250}, None, "compiled"),  # 6 steps in each of 250 epochs and 10 folds
        ({"epochs": 249}, None, "captured"),
        ({"epochs": 500, "regulariser": "gradpenalty"}, None, "captured"),
        ({"epochs": 500}, lambda shape, classes: NETWORKS["mlp"](shape, classes), "eager"),
    ],
)
def test_what_is_compiled_and_captured(digits, monkeypatch, changes, own, kind):
    training = Training(replace(RECIPE, **changes), digits, CPU, own)
    training.generator = torch.Generator()  # as on a GPU
    monkeypatch.setattr("maxgain.study.training.compile_network", lambda model: "compiled")
    monkeypatch.setattr("maxgain.study.training.CapturedStep", lambda *arguments: "captured")
    step = training.fast_step()
    assert (training.forward == "compiled") == (kind == "compiled")
    assert (step == "captured") == (kind != "eager")


@needs_gpu
@pytest.mark.parametrize("regulariser", ["none", "maxgain+batchnorm+dropout"])
@pytest.mark.parametrize("is_captured", [True, False])
def test_gpu_learns_and_leaves_the_default_generator_alone(digits, monkeypatch, regulariser, is_captured):
    if not is_captured:
        monkeypatch.setattr(Training, "fast_step", lambda self: own_randomness(self.generator)(self.step))
    device = torch.device("cuda")
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    recipe = replace(RECIPE, network="cnn", augment=True, cutout=2, schedule="triangular", regulariser=regulariser)
    with stream_for(device):
        scores = list(train(Training(replace(recipe, epochs=8), digits, device)))
    assert scores[-1][0] < scores[0][0]
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.skipif("MAXGAIN_DATA" not in os.environ, reason="needs MAXGAIN_DATA, a folder with the real data sets")
def test_the_papers_network_steps_on_photographs():
    recipe = replace(RECIPES["cifar10"], regulariser="maxgain+batchnorm", batch_size=8)
    training = Training(recipe, data.load("cifar10"), CPU)
    before = {name: parameter.clone() for name, parameter in training.model.named_parameters()}
    training.begin_epoch()
    training.step()
    training.step()
    training.expect_finite()
    assert training.steps_per_epoch == 5000
    assert not any(torch.equal(parameter, before[name]) for name, parameter in training.model.named_parameters())
