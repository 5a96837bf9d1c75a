"""The networks of the study, one function each, and the table by which recipes name them.

Batch norm and dropout are arguments. Neither changes the names of the other layers, nor the weights that a seed gives
them, so that runs with and without can be compared layer by layer. All networks take float images in [-1, 1] and start
from He-normal weights (fan-in) and zero biases.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from maxgain.errors import MaxGainError, RecipeError

from ._names import Table
from .data import Dataset
from .data.splits import Shape

Noise = Callable[[float], nn.Module]
"""Makes the noise layer for a place in a network from the paper's dropout rate for that place."""

CONV_RATE = 0.2
DENSE_RATE = 0.5
BLOCK_RATE = 0.3


class Builder(Protocol):
    """What makes a network; one's own may leave out the arguments that it does not support."""

    def __call__(self, shape: Shape, classes: int, *, batchnorm: bool = ..., dropout: Noise | None = ...) -> nn.Module:
        """A freshly initialised network that maps images of ``shape`` to one logit per class."""


def vgg(
    shape: Shape,
    classes: int,
    *,
    stages: Sequence[tuple[int, int]],
    dense: Sequence[int],
    batchnorm: bool = False,
    dropout: Noise | None = None,
) -> nn.Module:
    """A VGG for small images: stages of 3×3 convolutions, each ended by a 2×2 max-pool, then dense layers.

    vgg19 has five stages of 2, 2, 4, 4 and 4 convolutions, svhn_vgg (the paper's for SVHN) four of 2, and both hidden
    dense layers of 512 units; cnn has two stages of 2, and one of 128. Batch norm follows convolutions only, and their
    biases are kept beside it. Dropout comes before each convolution after the first pool and before each hidden dense
    layer.
    """
    channels, height, width = shape
    scale = 2 ** len(stages)
    if min(height, width) < scale:
        raise RecipeError(
            f"this network needs images of at least {scale}×{scale} pixels, not {height}×{width}: use cnn or mlp.",
            field="network",
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for stage, (convolutions, outputs) in enumerate(stages, start=1):
        for number in range(1, convolutions + 1):
            place = f"{stage}_{number}"
            if dropout and stage > 1:
                layers[f"drop{place}"] = dropout(CONV_RATE)
            layers[f"conv{place}"] = nn.Conv2d(channels, outputs, 3, padding=1)
            if batchnorm:
                layers[f"norm{place}"] = nn.BatchNorm2d(outputs)
            layers[f"relu{place}"] = nn.ReLU()
            channels = outputs
        layers[f"pool{stage}"] = nn.MaxPool2d(2)
    widths = (channels * (height // scale) * (width // scale), *dense, classes)
    classifier = _dense(widths, [*[DENSE_RATE] * len(dense), 0.0], False, dropout)
    parts = OrderedDict(features=nn.Sequential(layers), flatten=nn.Flatten(), classifier=classifier)
    return _initialise(nn.Sequential(parts))


def mlp(shape: Shape, classes: int, *, batchnorm: bool = False, dropout: Noise | None = None) -> nn.Module:
    """Two hidden layers of 256 units, each followed by batch norm and dropout."""
    channels, height, width = shape
    widths = (channels * height * width, 256, 256, classes)
    classifier = _dense(widths, (0.0, DENSE_RATE, DENSE_RATE), batchnorm, dropout)
    return _initialise(nn.Sequential(OrderedDict(flatten=nn.Flatten(), classifier=classifier)))


def wrn(
    shape: Shape,
    classes: int,
    *,
    batchnorm: bool = False,
    dropout: Noise | None = None,
    depth: int = 16,
    width: int = 4,
) -> nn.Module:
    """A wide residual network, WRN-depth-width (Zagoruyko and Komodakis 2016), for images of any size.

    A stem of 16 channels; three groups of (depth - 4) / 6 pre-activation blocks with 16, 32 and 64 times ``width``
    channels, the second and third starting with stride 2; the mean over all positions at the end. No convolution has a
    bias. The paper always uses batch norm; without it nothing takes its place.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Conv2d(shape[0], 16, 3, padding=1, bias=False))
    inputs = 16
    for group, outputs in enumerate((16 * width, 32 * width, 64 * width), start=1):
        layers[f"group{group}"] = nn.Sequential(
            _Block(inputs, outputs, 1 if group == 1 else 2, batchnorm, dropout),
            *(_Block(outputs, outputs, 1, batchnorm, dropout) for _ in range((depth - 4) // 6 - 1)),
        )
        inputs = outputs
    layers["norm"] = _norm(inputs, batchnorm)
    layers["relu"] = nn.ReLU()
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["classifier"] = nn.Linear(inputs, classes)
    return _initialise(nn.Sequential(layers))


NETWORKS: Table[Builder] = Table(
    "network",
    RecipeError,
    {
        "vgg19": partial(vgg, stages=((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)), dense=(512, 512)),
        "svhn_vgg": partial(vgg, stages=((2, 64), (2, 128), (2, 192), (2, 256)), dense=(512, 512)),
        "wrn16_4": partial(wrn, depth=16, width=4),
        "cnn": partial(vgg, stages=((2, 32), (2, 64)), dense=(128,)),
        "mlp": mlp,
    },
)


def _dense(widths: Sequence[int], rates: Sequence[float], batchnorm: bool, dropout: Noise | None) -> nn.Sequential:
    """Dense layers from ``widths[0]`` inputs to ``widths[-1]`` logits, with noise before those with a rate."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, ((inputs, outputs), rate) in enumerate(zip(pairwise(widths), rates, strict=True), start=1):
        if dropout and rate:
            layers[f"drop{number}"] = dropout(rate)
        layers[f"fc{number}"] = nn.Linear(inputs, outputs)
        if number < len(rates):
            if batchnorm:
                layers[f"norm{number}"] = nn.BatchNorm1d(outputs)
            layers[f"relu{number}"] = nn.ReLU()
    return nn.Sequential(layers)


class _Block(nn.Module):
    """A pre-activation block: x plus conv(relu(norm(·))) twice, with noise before the second convolution.

    Where the channels change, a 1×1 convolution of the raw x takes its place, as in the authors' code.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, batchnorm: bool, dropout: Noise | None) -> None:
        super().__init__()
        self.norm1 = _norm(inputs, batchnorm)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = _norm(outputs, batchnorm)
        self.drop = dropout(BLOCK_RATE) if dropout else nn.Identity()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y: Tensor = self.conv1(self.norm1(x).relu())
        y = self.conv2(self.drop(self.norm2(y).relu()))
        return y.add(self.shortcut(x))


def _norm(channels: int, batchnorm: bool) -> nn.Module:
    return nn.BatchNorm2d(channels) if batchnorm else nn.Identity()


def _initialise(network: nn.Module) -> nn.Module:
    """The network with He-normal weights and zero biases; torch's batch norm starts at scale 1, shift 0."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network


# --- Networks of one's own --------------------------------------------------------------------------------------------


def own_network(
    network: Callable[..., Any], shape: Shape, classes: int, *, batchnorm: bool = False, dropout: Noise | None = None
) -> nn.Module:
    """What a user's function makes; `batchnorm` and `dropout` are passed where they are asked for."""
    wanted = ({"batchnorm": True} if batchnorm else {}) | ({"dropout": dropout} if dropout else {})
    try:
        made = network(shape, classes, **wanted)
        if not isinstance(made, nn.Module):
            raise TypeError(f"it returned a {type(made).__name__}, not a module")
        if any(map(is_lazy, (*made.parameters(), *made.buffers()))):
            with torch.no_grad():
                made.eval()(torch.zeros(2, *shape))  # which gives lazy layers their sizes
    except MaxGainError:
        raise
    except Exception as error:  # whatever a user's code may raise
        call = f"{_called(network)}({', '.join(['shape', 'classes', *(f'{name}=...' for name in wanted)])})"
        raise RecipeError(
            f"{call} with shape {shape} and {classes} classes failed: {type(error).__name__}: {error}", field="network"
        ) from error
    return made.train()


def name_network(network: Callable[..., Any], dataset: Dataset) -> str:
    """A name for a user's function that holds a hash of its layers; refuses one that cannot be trained on the data."""
    name, shape, classes = _called(network), dataset.shape, len(dataset.classes)
    if isinstance(network, nn.Module):
        raise RecipeError("pass a function (shape, classes) that makes a new module for every run.", field="network")
    with torch.random.fork_rng(devices=[]):
        made, again = (own_network(network, shape, classes) for _ in range(2))
        layers, others = (
            "\n".join([str(each), *(f"{key} {tuple(v.shape)} {v.dtype}" for key, v in each.state_dict().items())])
            for each in (made, again)
        )
        try:
            logits = made(torch.zeros(2, *shape))
            if logits.shape != (2, classes):
                raise ValueError(f"it gave {tuple(logits.shape)}")
        except Exception as error:  # whatever a user's code may raise
            raise RecipeError(
                f"{name} must map two images of {shape} to logits (2, {classes}): {type(error).__name__}: {error}.",
                field="network",
            ) from error
    for is_wrong, why in (
        (not logits.requires_grad, "has nothing to train: its logits depend on no parameter"),
        ({*made.parameters()} & {*again.parameters()}, "must make a new module for every run, not return the same one"),
        (layers != others, "must make the same layers each time"),
    ):
        if is_wrong:
            raise RecipeError(f"{name} {why}.", field="network")
    return f"{name}-{hashlib.sha256(layers.encode()).hexdigest()[:6]}"


def _called(network: Any) -> str:
    name = getattr(network, "__name__", type(network).__name__)
    return "".join(character if character.isalnum() or character == "_" else "_" for character in name)
