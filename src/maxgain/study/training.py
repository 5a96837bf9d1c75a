"""The training loop, once, for every recipe and device.

All that changes from step to step lives in tensors on the device: the epoch's order, the position in it, the learning
rate, the running loss and hits. ``step()`` never waits for the host and depends on no other changing state, so that it
can be captured as it is; a checkpoint is those tensors, the weights, the optimizer and the random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from maxgain import measure_gains
from maxgain.errors import NothingToConstrainError, RunError
from maxgain.measure import evaluating

from .capture import STEPS_WORTH_COMPILING, CapturedStep, compile_network, own_randomness, setting_up
from .data import Dataset, Split
from .data.splits import Shape
from .networks import NETWORKS, Noise, own_network
from .recipe import Recipe
from .regularisers import Batch

PADDING = 4
MOMENTUM = 0.9
EVALUATION_BATCH = 500


class DivergedError(RunError):
    """The loss or a weight is no longer a finite number."""


class Training:
    """A model in training: everything there is between two steps."""

    def __init__(
        self, recipe: Recipe, dataset: Dataset, device: torch.device, network: Callable[..., Any] | None = None
    ) -> None:
        self.recipe, self.device, self.network = recipe, device, network
        self.folds = recipe.cross_validation or dataset.folds
        train, held_out = parts(recipe, dataset)
        self.images, self.labels = train.images.to(device), train.labels.to(device)
        self.held_out = None if held_out is None else held_out.to(device)
        """What every epoch is scored on."""
        self.batch_size = min(recipe.batch_size, len(train))
        self.steps_per_epoch = len(train) // self.batch_size
        """Whole batches only: a captured step has one shape."""
        self.learning_rate = torch.tensor(recipe.learning_rate, device=device)
        on_gpu = device.type == "cuda"
        self.precision = recipe.precision
        if recipe.precision == "auto":  # GPUs that only emulate bfloat16, as a T4 does, lose by it
            has_bfloat16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
            self.precision = "bfloat16" if has_bfloat16 else "float32"
        self.memory_format = torch.channels_last if on_gpu and network is None else torch.contiguous_format
        """Channels last on a GPU, except for a user's network, which may contain ``x.view(len(x), -1)``."""
        # On a GPU the default generators are afterwards as they were. On a CPU the training goes on drawing from the
        # default generator, which whoever trains has to save and restore.
        with setting_up, torch.random.fork_rng([device], enabled=on_gpu):
            torch.default_generator.manual_seed(recipe.seed)
            if on_gpu:
                torch.cuda.manual_seed(recipe.seed)
            place = {"device": device, "memory_format": self.memory_format}
            self.model = build_model(recipe, dataset.shape, len(dataset.classes), network, **place)
            self.constraints = [
                choice.row.constrain(self.model, choice.number, p=recipe.p, include=recipe.include)
                for choice in recipe.chosen
                if choice.row.constrain
            ]
            self.optimizer = _make_optimizer(recipe, self.model, self.learning_rate)
            for constraint in self.constraints:
                constraint.attach(self.optimizer)
        self.stateful = [(number, one) for number, one in enumerate(self.constraints) if hasattr(one, "state_dict")]
        self.forward: Callable[[Tensor], Tensor] = self.model
        """The model, or what was compiled of it."""
        self.generator = torch.Generator(device).manual_seed(recipe.seed) if on_gpu else None
        """The random numbers of a GPU, which other trainings do not draw from."""
        self.penalties = [(choice.row.penalty, choice.number) for choice in recipe.chosen if choice.row.penalty]
        self.differentiates_images = any(choice.row.needs_input_gradient for choice in recipe.chosen)

        self.epoch = 0
        self.order = torch.zeros(len(self.labels), dtype=torch.int64, device=device)
        self.rates = torch.zeros(self.steps_per_epoch, device=device)
        """The epoch's learning rates, where each step has its own."""
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.hits = torch.zeros((), dtype=torch.int64, device=device)
        names = ("order", "rates", "position", "learning_rate", "loss", "hits")
        self.loop: dict[str, Tensor] = {name: getattr(self, name) for name in names}
        """What the steps of an epoch change or read in place, apart from the model."""
        self._within_batch = torch.arange(self.batch_size, device=device)

    def step(self) -> None:
        """Train on the next batch of the epoch's order, with whatever random numbers are the current ones."""
        if self.recipe.schedule != "steps":
            self.learning_rate.copy_(self.rates.take(self.position // self.batch_size))
        index = self.order[self.position + self._within_batch]
        labels = self.labels[index]
        images = to_float(augment(self.images, index) if self.recipe.augment else self.images[index])
        if self.recipe.cutout:
            images = cut_out(images, self.recipe.cutout)
        images.requires_grad_(self.differentiates_images)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bfloat16"):
            logits = self.forward(images.contiguous(memory_format=self.memory_format))
        logits = logits.float()
        loss = F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
        batch = Batch(self.model, images, logits, labels, len(self.labels))
        objective = loss
        for penalty, number in self.penalties:
            objective = objective + penalty(batch, number)
        objective.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss += loss.detach()
        self.hits += (logits.argmax(dim=1) == labels).sum()
        self.position += self.batch_size

    def begin_epoch(self) -> None:
        """Draw the epoch's order, which follows from the seed and the epoch alone, and set its learning rates."""
        generator = torch.Generator().manual_seed((self.recipe.seed * 1_000_003 + self.epoch) % 2**63)
        self.order.copy_(torch.randperm(len(self.labels), generator=generator))
        self.learning_rate.fill_(self.recipe.learning_rate_at(self.epoch))
        if self.recipe.schedule != "steps":
            steps = range(self.steps_per_epoch)
            times = [self.epoch + (step + 0.5) / self.steps_per_epoch for step in steps]
            self.rates.copy_(torch.tensor([self.recipe.learning_rate_at(time) for time in times]))
        for tensor in (self.position, self.loss, self.hits):
            tensor.zero_()

    def expect_finite(self) -> None:
        """Raise where the epoch's loss or the model's state is no longer finite; waits for the device."""
        tensors = [tensor for tensor in (self.loss, *self.model.state_dict().values()) if tensor.numel()]
        tensors = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        if not get_total_norm(tensors, math.inf).isfinite():
            raise DivergedError(f"the loss or a weight stopped being finite in epoch {self.epoch + 1}.")

    def state(self) -> dict[str, Tensor]:
        """Copies of everything that the next step depends on, by name, the random numbers included."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in values.items() if value is not None}
        for number, constraint in self.stateful:
            tensors |= {f"constraint.{number}.{name}": tensor for name, tensor in constraint.state_dict().items()}
        tensors |= {f"loop.{name}": tensor for name, tensor in self.loop.items()}
        tensors["loop.epoch"] = torch.tensor(self.epoch)
        tensors["rng"] = torch.get_rng_state() if self.generator is None else self.generator.get_state()
        return copies(tensors)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a fresh training of the same recipe and data where the one was whose `state` this is.

        `KeyError`, `ValueError` or `RuntimeError` where it is the state of another training.
        """
        self.model.load_state_dict(_under("model.", tensors))
        states: dict[int, dict[str, Tensor]] = {}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for name, tensor in _under("optimizer.", tensors).items():
            index, _, field = name.partition(".")
            if field != "step":  # a GPU's optimizers want it to lie in memory as the parameter does
                tensor = torch.empty_like(parameters[int(index)]).copy_(tensor)
            states.setdefault(int(index), {})[field] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        for group in self.optimizer.param_groups:  # which now has a copy of the learning rate
            group["lr"] = self.learning_rate
        for number, constraint in self.stateful:
            constraint.load_state_dict(_under(f"constraint.{number}.", tensors))
        for name, tensor in self.loop.items():
            tensor.copy_(tensors[f"loop.{name}"])
        self.epoch = int(tensors["loop.epoch"])
        if self.generator is None:
            torch.set_rng_state(tensors["rng"])
        else:
            self.generator.set_state(tensors["rng"])

    def fast_step(self) -> Callable[[], None]:
        """What trains on the next batch, as fast as the device allows."""
        if self.generator is None:
            return self.step
        if self.network is not None:  # which may do anything on the host
            return own_randomness(self.generator)(self.step)
        # Decided by recipe and data alone, so that a resumed run does the same. Whoever trains on one fold trains on
        # all of them, with the same compiled code. Compiled code has no second derivative.
        steps = self.recipe.epochs * self.steps_per_epoch * self.folds
        if steps >= STEPS_WORTH_COMPILING and not self.differentiates_images:
            self.forward = compile_network(self.model)
        return CapturedStep(self.step, self.generator)


def train(training: Training, after_step: Callable[[], None] = lambda: None) -> Iterator[tuple[float, float]]:
    """Train to the end of the recipe, from wherever the training stands; yield each epoch's mean loss and accuracy.

    They are of training mode. The end of an epoch is the one moment at which the host waits for the device.
    """
    step = training.fast_step()
    while training.epoch < training.recipe.epochs:
        done = int(training.position) // training.batch_size
        if done == 0:
            training.begin_epoch()
        for _ in range(done, training.steps_per_epoch):
            step()
            after_step()
        training.expect_finite()
        steps = training.steps_per_epoch
        loss, accuracy = training.loss.item() / steps, training.hits.item() / (steps * training.batch_size)
        training.epoch += 1
        training.position.zero_()
        yield loss, accuracy


def parts(recipe: Recipe, dataset: Dataset) -> tuple[Split, Split | None]:
    """What the recipe trains on, and what it holds out for validation."""
    train, validation = dataset.train, dataset.validation
    if recipe.label_noise:
        generator = torch.Generator().manual_seed(recipe.seed)
        classes = len(dataset.classes)
        train = train.with_noise(recipe.label_noise, classes, generator)
        validation = validation.with_noise(recipe.label_noise, classes, generator)
    return (train, validation) if recipe.train_on == "train" else (train.join(validation), None)


def build_model(
    recipe: Recipe, shape: Shape, classes: int, network: Callable[..., Any] | None = None, **place: Any
) -> nn.Module:
    """The recipe's network with what its regularisers build into it, freshly initialised in its `place`."""
    build = NETWORKS[recipe.network] if network is None else partial(own_network, network)
    batchnorm, dropout = any(choice.row.batchnorm for choice in recipe.chosen), None
    for noise, factor in [(choice.row.noise, choice.number) for choice in recipe.chosen if choice.row.noise]:
        dropout = partial(_scaled, noise, factor)
    model: nn.Module = build(shape, classes, batchnorm=batchnorm, dropout=dropout).to(**place)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    for reparametrise in [choice.row.reparametrise for choice in recipe.chosen if choice.row.reparametrise]:
        for layer in layers:
            reparametrise(layer)
    return model


def _scaled(noise: Noise, factor: float, rate: float) -> nn.Module:
    """The noise layer of a place, from the paper's rate there."""
    return noise(factor * rate)


def _make_optimizer(recipe: Recipe, model: nn.Module, learning_rate: Tensor) -> torch.optim.Optimizer:
    on_gpu = learning_rate.device.type == "cuda"
    # The recipe's decay is for convolutions alone, with all that is inside them: a reparametrised one keeps its
    # parameters there. A regulariser's decay is for every weight, biases and scales excepted.
    extra = sum(choice.number for choice in recipe.chosen if choice.row.weight_decay)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    convolved = {id(parameter) for module in convolutions for parameter in module.parameters()}
    decays: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        own = recipe.weight_decay if id(parameter) in convolved else 0.0
        decays.setdefault(own + extra if parameter.dim() > 1 else 0.0, []).append(parameter)
    groups = [{"params": parameters, "weight_decay": decay} for decay, parameters in decays.items()]
    if recipe.optimiser == "adam":
        is_plain = not on_gpu and not any(parameter.is_complex() for parameter in model.parameters())
        kind = Adam if is_plain else torch.optim.Adam
        return kind(groups, lr=learning_rate, fused=on_gpu, foreach=False, capturable=on_gpu)
    return torch.optim.SGD(groups, lr=learning_rate, momentum=MOMENTUM, nesterov=True, fused=on_gpu, foreach=False)


class Adam(torch.optim.Adam):
    """Torch's own to the bit, in three quarters of its time on a CPU: one call per operation, not one per parameter."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(5)]
            weights, gradients, means, squares, steps = lists
            self._init_group(group, weights, gradients, means, squares, [], steps)  # type: ignore[no-untyped-call]
            if not weights:
                continue
            beta1, beta2 = group["betas"]
            torch._foreach_add_(steps, 1)
            if group["weight_decay"]:
                gradients = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
            torch._foreach_lerp_(means, gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
            divisors = torch._foreach_sqrt(squares)
            counts = [step.item() for step in steps]
            sizes = {count: -(group["lr"] / (1 - beta1**count)).item() for count in {*counts}}
            torch._foreach_div_(divisors, [(1 - beta2**count) ** 0.5 for count in counts])
            torch._foreach_add_(divisors, group["eps"])
            torch._foreach_addcdiv_(weights, means, divisors, [sizes[count] for count in counts])


def to_float(images: Tensor) -> Tensor:
    """Bytes to the interval [-1, 1] that the networks take."""
    return images.float().div_(127.5).sub_(1)


def augment(images: Tensor, index: Tensor) -> Tensor:
    """The chosen images, each flipped and shifted at random, as if padded by reflection and cropped.

    One gather does it all: a flip, a shift and a reflection are only other places to read a pixel from.
    """
    _, channels, height, width = images.shape
    count, device = len(index), images.device
    rows = torch.arange(height, device=device) + torch.randint(-PADDING, PADDING + 1, (count, 1), device=device)
    columns = torch.arange(width, device=device) + torch.randint(-PADDING, PADDING + 1, (count, 1), device=device)
    flipped = torch.rand(count, 1, device=device) < 0.5
    columns = _reflect(columns, width)
    columns = torch.where(flipped, width - 1 - columns, columns)
    channel = torch.arange(channels, device=device)
    return images[
        index[:, None, None, None],
        channel[None, :, None, None],
        _reflect(rows, height)[:, None, :, None],
        columns[:, None, None, :],
    ]


def _reflect(index: Tensor, size: int) -> Tensor:
    """An index beyond an edge, reflected at the edge's pixel."""
    period = max(1, 2 * (size - 1))
    index = index.abs()
    if size <= PADDING:  # reflected more than once
        index = index % period
    return torch.where(index >= size, period - index, index)


def cut_out(images: Tensor, side: int) -> Tensor:
    """The images, each with a square around a random pixel set to 0, which is grey.

    DeVries, Taylor: Improved regularization of convolutional neural networks with cutout. 2017.
    """
    count, _, height, width = images.shape
    inside = []
    for size in (height, width):
        first = torch.randint(size, (count, 1), device=images.device) - side // 2
        pixel = torch.arange(size, device=images.device)
        inside.append((pixel >= first) & (pixel < first + side))
    return images.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)


# --- Evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: nn.Module, split: Split) -> tuple[float, float, Tensor]:
    """Mean loss in nats, accuracy as a fraction, and which images the model classifies right, in evaluation mode."""
    correct, losses = [], []
    with evaluating(model):
        batches = (torch.split(part, EVALUATION_BATCH) for part in (split.images, split.labels))
        for images, labels in zip(*batches, strict=True):
            logits = model(to_float(images)).float()
            correct.append(logits.argmax(dim=1) == labels)
            losses.append(F.cross_entropy(logits, labels, reduction="none"))
    right = torch.cat(correct)
    return torch.cat(losses).double().mean().item(), right.sum().item() / len(right), right


def gains(model: nn.Module, images: Tensor, p: float) -> dict[str, tuple[float, float, float, float, float]]:
    """Minimum, quartiles and maximum of every layer's gain over the images; empty where no layer has a gain."""
    batches = (to_float(part) for part in torch.split(images, EVALUATION_BATCH))
    try:
        # Measuring switches torch's compiler off for the whole process. In evaluation mode, looking at a weight does
        # not step spectral norm's power iteration.
        with setting_up, evaluating(model):
            return measure_gains(model, batches, p).quantiles()
    except NothingToConstrainError:
        return {}


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor in memory of its own: safetensors refuses those that share it, as tied weights do."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
