"""The training loop, once, for every recipe and device.

All that changes from step to step lives in tensors on the device: the epoch's order, the position in it, the learning
rate, the running loss and hits. ``step()`` never waits for the host and depends on no other changing state, so that it
can be captured as it is, and what must be saved to go on is those tensors, the weights, the optimiser and the RNG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from maxgain.errors import RunError

from . import capture
from .data.splits import Dataset, Split
from .models import NETWORKS, SHIPPED
from .ranks import ALONE, Ranks
from .recipes import Recipe
from .regularisers import PenaltyInputs, noise_for

PADDING = 4
MOMENTUM = 0.9
MEMORY_FORMATS = {("cuda", network): torch.channels_last for network in SHIPPED}
"""How images and kernels lie in memory on a device: as its convolutions like it best. Those of a network of one's own
lie as usual, because it may contain ``x.view(len(x), -1)``."""
OPTIMISER_STATE = {"adam": ("step", "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""What torch's optimisers keep of every parameter."""


class DivergedError(RunError):
    """The loss or a weight is no longer a number, and nothing that follows will be."""


@dataclass(frozen=True)
class Score:
    """Mean loss in nats, and accuracy as a fraction."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Epoch:
    """What an epoch of training came to: scores in training mode, on the batches as they were trained on."""

    number: int
    """Counted from 1: how many epochs are done."""
    learning_rate: float
    train: Score


class Training:
    """A model in training: everything there is between two steps."""

    def __init__(self, recipe: Recipe, dataset: Dataset, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.recipe = recipe
        self.fingerprint, self.folds = dataset.fingerprint, recipe.cross_validation or dataset.folds
        self.device = device
        split = trained_on(recipe, dataset)
        self.images, self.labels = split.images.to(device), split.labels.to(device)
        self.batch_size = min(recipe.batch_size, len(self.labels))
        self.steps_per_epoch = len(self.labels) // self.batch_size
        """Whole batches only: a captured step has one shape, and the next epoch has another order."""
        self.ranks = ranks
        self.share = slice(None) if ranks.count == 1 else ranks.share_of(self.batch_size)
        with capture.setting_up:
            torch.manual_seed(recipe.seed)
            self.model = build_model(recipe, dataset, device)
        self.forward: Callable[[Tensor], Tensor] = self.model
        """The model, or what was compiled of it."""
        self.generator = torch.Generator(device).manual_seed(recipe.seed) if device.type == "cuda" else None
        """The random numbers of a GPU, which other trainings do not draw from."""
        chosen = recipe.chosen
        self.constraints = [
            choice.row.constrain(self.model, choice.number, recipe) for choice in chosen if choice.row.constrain
        ]
        self.learning_rate = torch.tensor(recipe.learning_rate, device=device)
        self.optimiser = self._make_optimiser()
        for constraint in self.constraints:
            constraint.attach(self.optimiser)
        self.penalties = [(choice.row.penalty, choice.number) for choice in chosen if choice.row.penalty]
        self.differentiates_images = any(choice.row.needs_input_gradient for choice in chosen)
        # Not where bfloat16 is emulated, as on a T4: that is slower than float32, and cannot be compiled.
        self.autocast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        self.memory_format = MEMORY_FORMATS.get((device.type, recipe.network), torch.contiguous_format)

        self.epoch = 0
        self.order = torch.zeros(len(self.labels), dtype=torch.int64, device=device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.hits = torch.zeros((), dtype=torch.int64, device=device)
        self._within_batch = torch.arange(self.batch_size, device=device)

    def step(self) -> None:
        """Trains on the next batch of the epoch's order."""
        with nullcontext() if self.generator is None else capture.own_randomness(self.generator):
            self.bare_step()

    def bare_step(self) -> None:
        """The step itself, with whatever random numbers are the current ones."""
        index = self.order[self.position + self._within_batch]
        labels = self.labels[index]
        images = to_float(augmented(self.images, index) if self.recipe.augment else self.images[index])
        images, labels = images[self.share], labels[self.share]
        images.requires_grad_(self.differentiates_images)
        autocast = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast)
        is_shared = self.ranks.count > 1
        with autocast, self.ranks.as_whole(self.batch_size) if is_shared else nullcontext():
            logits = self.forward(images.contiguous(memory_format=self.memory_format))
        logits = logits.float()
        loss = F.cross_entropy(logits, labels)
        inputs = PenaltyInputs(self.model, images, logits, labels, len(self.labels))
        objective = loss
        for penalty, number in self.penalties:
            objective = objective + penalty(inputs, number)
        loss = loss.detach()
        if is_shared:
            loss, objective = (self.ranks.part_of(mean, self.batch_size) for mean in (loss, objective))
        objective.backward()  # type: ignore[no-untyped-call]
        hits = (logits.argmax(dim=1) == labels).sum()
        if is_shared:
            self.ranks.add_up([*(p.grad for p in self.model.parameters() if p.grad is not None), loss, hits])
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.loss += loss
        self.hits += hits
        self.position += self.batch_size

    def begin_epoch(self) -> None:
        """A new order, which follows from the seed and the epoch alone, and the epoch's learning rate."""
        generator = torch.Generator().manual_seed((self.recipe.seed * 1_000_003 + self.epoch) % 2**63)
        self.order.copy_(torch.randperm(len(self.labels), generator=generator))
        self.learning_rate.fill_(self.recipe.learning_rate_at(self.epoch))
        for tensor in (self.position, self.loss, self.hits):
            tensor.zero_()

    def end_epoch(self) -> Epoch:
        """The epoch's scores; the one moment at which the host waits for the device."""
        steps, learning_rate = self.steps_per_epoch, self.recipe.learning_rate_at(self.epoch)
        score = Score(self.loss.item() / steps, self.hits.item() / (steps * self.batch_size))
        self.epoch += 1
        self.position.zero_()
        return Epoch(self.epoch, learning_rate, score)

    def expect_finite(self) -> None:
        """Raises where the epoch's loss, or what the model has learned, is no longer a number; waits for the device."""
        kept = [tensor for tensor in (self.loss, *self.model.state_dict().values()) if tensor.numel()]
        kept = [tensor for tensor in kept if tensor.is_floating_point() or tensor.is_complex()]
        if not get_total_norm(kept, math.inf).isfinite():
            raise DivergedError(f"in epoch {self.epoch + 1} the loss or a weight stopped being a finite number.")

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name, the random numbers included."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, values in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{index}.{name}": value for name, value in values.items() if value is not None}
        for number, constraint in enumerate(self.constraints):
            tensors |= {f"constraint.{number}.{name}": tensor for name, tensor in constraint.state_dict().items()}
        tensors |= {f"loop.{name}": tensor for name, tensor in self._loop().items()}
        tensors["loop.epoch"] = torch.tensor(self.epoch)
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.generator is not None:
            tensors["rng.cuda"] = self.generator.get_state()
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts a fresh training of the same recipe and data where the one was whose `state` this is.

        `KeyError`, `ValueError` or `RuntimeError` where it is that of another training, or of none.
        """
        self._expect_own(tensors)
        self.model.load_state_dict(_under("model.", tensors))
        states: dict[int, dict[str, Tensor]] = {}
        parameters = self._optimised
        for name, tensor in _under("optimiser.", tensors).items():
            index, _, field = name.partition(".")
            if field != "step":  # a GPU's optimisers want it to lie in memory as the parameter does
                tensor = torch.empty_like(parameters[int(index)]).copy_(tensor)
            states.setdefault(int(index), {})[field] = tensor
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": states, "param_groups": groups})
        for number, constraint in enumerate(self.constraints):
            constraint.load_state_dict(_under(f"constraint.{number}.", tensors))
        for name, tensor in self._loop().items():
            tensor.copy_(tensors[f"loop.{name}"])
        self.epoch = int(tensors["loop.epoch"])
        # The optimiser has its own copy of the learning rate now; the loop's tensor is the one that changes.
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate
        with capture.setting_up:  # beside runs whose weights are just being drawn
            torch.set_rng_state(tensors["rng.cpu"])
        if self.generator is not None:
            self.generator.set_state(tensors["rng.cuda"])

    def _expect_own(self, tensors: Mapping[str, Tensor]) -> None:
        """`KeyError` or `ValueError` where tensors are not those of a training like this one, or nowhere in it."""
        own = {name: tensor for name, tensor in self.state().items() if name.startswith(("model.", "loop.", "rng."))}
        parameters = dict(enumerate(self._optimised))
        for index in {name.partition(".")[0] for name in _under("optimiser.", tensors)}:
            for field in OPTIMISER_STATE[self.recipe.optimiser]:
                # A count of steps is one number, and all else is as large as what is optimised.
                own[f"optimiser.{index}.{field}"] = self.loss.float() if field == "step" else parameters[int(index)]
        if strange := [name for name in tensors.keys() - own.keys() if not name.startswith("constraint.")]:
            raise ValueError(f"there is no {min(strange)}")
        for name, tensor in own.items():
            if (tensors[name].shape, tensors[name].dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(f"{name} is another tensor")
        order, position, epoch = (tensors[f"loop.{name}"] for name in ("order", "position", "epoch"))
        is_within = order.min() >= 0 and order.max() < len(order) and 0 <= epoch <= self.recipe.epochs
        if not is_within or not 0 <= position <= self.steps_per_epoch * self.batch_size:
            raise ValueError("it is nowhere in a training")

    @property
    def _optimised(self) -> list[nn.Parameter]:
        """The parameters, in the order in which the optimiser counts them."""
        return [parameter for group in self.optimiser.param_groups for parameter in group["params"]]

    def _loop(self) -> dict[str, Tensor]:
        """What the steps of an epoch change, apart from the model."""
        return {
            "order": self.order,
            "position": self.position,
            "learning_rate": self.learning_rate,
            "loss": self.loss,
            "hits": self.hits,
        }

    def _make_optimiser(self) -> torch.optim.Optimizer:
        on_gpu = self.device.type == "cuda"
        # The recipe's decay is for convolutions alone, with all that is inside them: a reparametrised one keeps its
        # parameters there. A regulariser's decay is for every weight, biases and scales excepted.
        extra = sum(choice.number for choice in self.recipe.chosen if choice.row.weight_decay)
        convolutions = [module for module in self.model.modules() if isinstance(module, nn.Conv2d)]
        convolved = {id(parameter) for module in convolutions for parameter in module.parameters()}
        decays: dict[float, list[nn.Parameter]] = {}
        for parameter in self.model.parameters():
            own = self.recipe.weight_decay if id(parameter) in convolved else 0.0
            decays.setdefault(own + extra if parameter.dim() > 1 else 0.0, []).append(parameter)
        groups = [{"params": parameters, "weight_decay": decay} for decay, parameters in decays.items()]
        if self.recipe.optimiser == "adam":
            return torch.optim.Adam(groups, lr=self.learning_rate, fused=on_gpu, foreach=False, capturable=on_gpu)
        return torch.optim.SGD(
            groups, lr=self.learning_rate, momentum=MOMENTUM, nesterov=True, fused=on_gpu, foreach=False
        )


def build_model(recipe: Recipe, dataset: Dataset, device: torch.device) -> nn.Module:
    """The recipe's network with what its regularisers build into it, freshly initialised; nothing watches it yet."""
    channels, height, width = dataset.train.images.shape[1:]
    model = NETWORKS[recipe.network](
        (channels, height, width),
        len(dataset.classes),
        batchnorm=any(choice.row.batchnorm for choice in recipe.chosen),
        dropout=noise_for(recipe.chosen),
    )
    layout = MEMORY_FORMATS.get((device.type, recipe.network), torch.contiguous_format)
    model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    for choice in recipe.chosen:
        if choice.row.prepare:
            choice.row.prepare(model)
    return model


def trained_on(recipe: Recipe, dataset: Dataset) -> Split:
    """The part of the data that the recipe trains on."""
    return dataset.train if recipe.train_on == "train" else dataset.train.join(dataset.validation)


def train(
    training: Training, after_step: Callable[[], None] = lambda: None, speed: capture.Speed | None = None
) -> Iterator[Epoch]:
    """Trains to the end of the recipe, from wherever the training stands, and yields after each epoch."""
    step = training.step
    # Ranks talk to each other within a step, and a network of one's own may do anything on the host.
    if training.device.type == "cuda" and training.ranks.count == 1 and training.recipe.network in SHIPPED:
        step = capture.step_of(training, speed or capture.Speed())
    while training.epoch < training.recipe.epochs:
        done = int(training.position) // training.batch_size
        if done == 0:
            training.begin_epoch()
        for _ in range(done, training.steps_per_epoch):
            step()
            after_step()
        training.expect_finite()
        yield training.end_epoch()


def to_float(images: Tensor) -> Tensor:
    """Bytes to the interval [-1, 1] that the networks take."""
    return images.float().div_(127.5).sub_(1)


def augmented(images: Tensor, index: Tensor) -> Tensor:
    """The chosen images, each flipped and shifted at random, as if padded by reflection and cropped.

    One gather does it all: a flip, a shift and a reflection are only other places to read a pixel from.
    """
    _, channels, height, width = images.shape
    count, device = len(index), images.device
    rows = torch.arange(height, device=device) + torch.randint(-PADDING, PADDING + 1, (count, 1), device=device)
    columns = torch.arange(width, device=device) + torch.randint(-PADDING, PADDING + 1, (count, 1), device=device)
    flipped = torch.rand(count, 1, device=device) < 0.5
    columns = _reflected(columns, width)
    columns = torch.where(flipped, width - 1 - columns, columns)
    channel = torch.arange(channels, device=device)
    return images[
        index[:, None, None, None],
        channel[None, :, None, None],
        _reflected(rows, height)[:, None, :, None],
        columns[:, None, None, :],
    ]


def _reflected(index: Tensor, size: int) -> Tensor:
    """An index beyond an edge, folded back at the edge's pixel."""
    there_and_back = max(1, 2 * (size - 1))
    index = index.abs()
    if size <= PADDING:  # the way leads to and fro more than once
        index = index % there_and_back
    return torch.where(index >= size, there_and_back - index, index)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
