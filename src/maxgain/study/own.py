"""Data and networks of one's own, as the study knows them."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from maxgain.errors import DataError, MaxGainError, RecipeError

from .data.images import levels
from .data.splits import Dataset, Split, cut, shared_images, stratified_order
from .data.table import DATASETS
from .files import is_text
from .models import NETWORKS, Shape
from .wording import clause, counted

Network = str | Callable[..., nn.Module]
"""A name that 'maxgain list networks' shows, or a function from the images' shape and the number of classes.

To be trained with batchnorm or dropout too, the function takes them by these names: `batchnorm`, whether there is to be
any, and `dropout`, None or a function from a rate to a layer.
"""
Part = Any
"""Images with labels: a pair (images, labels), or a data set of torch, whose items are such pairs."""
MOST_CLASSES = 100_000
MOST_CHANNELS = 4
"""That a picture has."""

LONGEST_NAME = 60
HELD_OUT = 0.2
"""The share of the training images that becomes the validation part, where there is none."""


def dataset(
    name: str,
    train: Part,
    test: Part,
    validation: Part | None = None,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """A data set of your own: whole numbers from 0 to 255 or fractions from 0 to 1, and labels from 0 on.

    Each part is a pair of tensors or arrays, images (N, C, H, W) and labels (N), or a `torch.utils.data.Dataset` whose
    items are an image, as a tensor (C, H, W), an array (H, W, C) or from Pillow, and its label. Images are copied, as
    bytes.

    Args:
        name: What it is called in records and on pages.
        train: What networks are trained on.
        test: What runs are scored on, and nothing is chosen on.
        validation: What numbers are chosen on; final runs are trained on it too. Without it, a fifth of `train`.
        classes: The names of the classes; without them they are numbered.
    """
    _expect_name(name)
    parts = {"train": _split("train", train), "test": _split("test", test)}
    if validation is not None:
        parts["validation"] = _split("validation", validation)
    else:
        rest, held_out = cut(stratified_order(parts["train"].labels.numpy(), seed=0), 1 - HELD_OUT)
        parts |= {"train": parts["train"].take(rest), "validation": parts["train"].take(held_out)}
    _expect_alike(parts)
    least = min(int(part.labels.min()) for part in parts.values())
    if least > 0 and classes is None:
        raise DataError(f"labels are counted from 0, and the least here is {least}: subtract it, or name the classes.")
    most = max(int(part.labels.max()) for part in parts.values())
    named = _names(range(most + 1) if classes is None else classes)
    if most >= len(named):
        raise DataError(f"there is a label {most}, but only {len(named)} classes, counted from 0.")
    train, validation, test = parts["train"], parts["validation"], parts["test"]
    return Dataset(name, train, validation, test, named, note=shared_images(train, validation, test))


@contextmanager
def known(network: Network, data: Dataset | None) -> Iterator[str]:
    """The network's name; a function is in the table of networks for as long as it is needed.

    Its name holds what its network is made of, so that no run is taken for one of another network.
    """
    if isinstance(network, str):
        yield network
        return
    if data is None:
        raise RecipeError("a network of your own goes with data of your own: make a `dataset` of them.")
    if not callable(network) or isinstance(network, nn.Module):
        raise RecipeError("a network of your own is a function (shape, classes) that makes a new one for every run.")
    name = f"{_called(network)}-{_made_of(network, data)}"
    NETWORKS[name] = _builder(network)
    try:
        yield name
    finally:
        NETWORKS.pop(name, None)


def _expect_name(name: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not is_text(name) or "/" in name:
        raise DataError(f"a data set's name is a few words without a slash, not {name!r:.60}.")
    if name in DATASETS or name.strip() != name or name.startswith((".", "-")):
        raise DataError(f"a data set of your own cannot be called {name!r}: choose another name.")


def _names(classes: Any) -> tuple[str, ...]:
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        raise DataError(f"classes must be the names of the classes in their order, not {classes!r:.60}.")
    names = tuple(map(str, classes))
    if len(names) < 2:
        raise DataError(f"there is {counted(len(names), 'class', 'es')}, and nothing to tell apart.")
    if strange := [name for name in names if not is_text(name)]:
        raise DataError(f"{strange[0]!a:.60} cannot be the name of a class.")
    return names


def _expect_alike(parts: dict[str, Split]) -> None:
    shapes = {name: tuple(part.images.shape[1:]) for name, part in parts.items()}
    for name, part in parts.items():
        if not len(part):
            raise DataError(f"the {name} part has no images.")
        if shapes[name] != shapes["train"]:
            raise DataError(f"the {name} images are {shapes[name]}, and the training images {shapes['train']}.")
    channels, height, width = shapes["train"]
    if width <= MOST_CHANNELS < min(channels, height):
        warnings.warn(
            f"the images have {channels} channels of {height}×{width} pixels. If they are {channels}×{height} pixels "
            f"with {width} channels, which come last: make them (N, C, H, W), by permute(0, 3, 1, 2).",
            stacklevel=3,
        )


def _split(part: str, given: Part) -> Split:
    """The images and labels of a part, in one of the forms that people have them in."""
    if isinstance(given, tuple | list) and len(given) == 2:
        images, labels = given
    elif hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        images, labels = _items(part, given)
    else:
        raise DataError(
            f"the {part} part must be a pair (images, labels) or a data set of torch, not {type(given).__name__}."
        )
    images, labels = _numbers(f"{part} images", images), _numbers(f"{part} labels", labels)
    if images.dim() != 4 or 0 in images.shape[1:]:
        raise DataError(f"the {part} images must have the shape (N, C, H, W), not {tuple(images.shape)}.")
    if labels.dim() != 1 or len(images) != len(labels):
        raise DataError(
            f"the {part} part has {len(images)} images and labels of shape {tuple(labels.shape)}: every image has one."
        )
    return Split(_bytes(part, images), _whole(part, labels))


def _numbers(what: str, given: Any) -> Tensor:
    """The numbers in memory of their own, so that nobody changes them later: of a tensor, an array or a table."""
    try:
        if isinstance(given, Tensor):
            if given.is_nested or given.layout != torch.strided:
                raise TypeError("a tensor is sparse or nested")
            return given.detach().cpu().clone(memory_format=torch.contiguous_format)
        array = np.asarray(given)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"they are of numpy's type {array.dtype}")
        # Arrays may be turned round, or have the bytes of another machine's numbers, which torch does not take.
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"the {what} are not numbers that can be used: {clause(error)}.") from error


def _items(part: str, given: Any) -> tuple[Tensor, Tensor]:
    """All items of a data set of torch."""
    images, labels = [], []
    for number in range(_length(part, given)):
        try:
            image, label = given[number]
            images.append(_image(image))
            labels.append(float(label))
            if images[-1].shape != images[0].shape:
                raise ValueError(f"its shape is {tuple(images[-1].shape)}, and the first's {tuple(images[0].shape)}")
        except MemoryError:
            raise
        except Exception as error:  # whatever somebody's own code may raise
            raise DataError(
                f"the {part} part's items must be pairs of an image and a label, all images alike, and number {number} "
                f"is not: {type(error).__name__}: {clause(error)}."
            ) from error
    return torch.stack(images) if images else torch.empty(0, 1, 1, 1), torch.tensor(labels, dtype=torch.float64)


def _length(part: str, given: Any) -> int:
    try:
        return len(given)
    except Exception as error:  # whatever somebody's own code may raise
        said = f"the {part} part does not tell how long it is: {type(error).__name__}: {clause(error)}."
        raise DataError(said) from error


def _image(image: Any) -> Tensor:
    """A tensor as it is; a picture of Pillow's, or an array (H, W) or (H, W, C), with the channels first."""
    if isinstance(image, Tensor):
        return image
    pixels = _numbers("pixels", levels(image) if hasattr(image, "getbands") else image)
    if pixels.dim() == 2:
        return pixels[None]
    if pixels.dim() != 3 or (pixels.shape[2] > MOST_CHANNELS >= pixels.shape[0]):
        raise ValueError(f"an array of the shape {tuple(pixels.shape)} is not (H, W, C): make a tensor (C, H, W) of it")
    return pixels.permute(2, 0, 1)


def _bytes(part: str, images: Tensor) -> Tensor:
    if images.dtype == torch.uint8 or not len(images):
        return images.to(torch.uint8)
    comparable = images if images.is_floating_point() else images.long()  # torch cannot compare all kinds of integers
    least, most = comparable.amin().item(), comparable.amax().item()
    if images.is_floating_point() and least >= 0 and most <= 1:
        return (images * 255).round().to(torch.uint8)
    if not images.is_floating_point() and images.dtype != torch.bool and least >= 0 and most <= 255:
        return images.to(torch.uint8)
    raise DataError(
        f"the {part} images must be whole numbers from 0 to 255 or fractions from 0 to 1, and here {images.dtype} goes "
        f"from {least} to {most}."
    )


def _whole(part: str, labels: Tensor) -> Tensor:
    whole = labels.long()
    if labels.is_complex() or not torch.equal(whole.to(labels.dtype), labels) or bool((whole < 0).any()):
        raise DataError(f"the {part} labels must be whole numbers from 0 on.")
    if bool((whole >= MOST_CLASSES).any()):
        raise DataError(f"the {part} labels must be below {MOST_CLASSES:,}, and one of them is {int(whole.max())}.")
    return whole


def _called(network: Any) -> str:
    name = getattr(network, "__name__", type(network).__name__)
    return "".join(character if character.isalnum() or character == "_" else "_" for character in name)


def _made_of(network: Any, data: Dataset) -> str:
    """A few letters for the layers and the sizes of the network that a function makes."""
    name, build = _called(network), _builder(network)
    with torch.random.fork_rng(devices=[]):
        made = build(data.shape, len(data.classes))
        letters = _letters(name, made)  # before it is tried, which may change it
        _expect_scores(name, made, data)
        again = build(data.shape, len(data.classes))
    learned = {id(parameter) for parameter in made.parameters() if parameter.requires_grad}
    if any(id(parameter) in learned for parameter in again.parameters()):
        raise RecipeError(f"the function {name} returns the same network again: it must make a new one for every run.")
    if _letters(name, again) != letters:
        raise RecipeError(f"the function {name} makes another network each time: all runs must train the same one.")
    return letters


def _letters(name: str, made: nn.Module) -> str:
    state = made.state_dict()
    if strange := [key for key, value in state.items() if not isinstance(value, Tensor)]:
        raise RecipeError(f"the network {name} has {strange[0]} in its state, which is no tensor and cannot be saved.")
    sizes = [f"{key} {tuple(value.shape)} {value.dtype}" for key, value in state.items()]
    return hashlib.sha256("\n".join([str(made), *sizes]).encode()).hexdigest()[:6]


def _expect_scores(name: str, made: nn.Module, data: Dataset) -> None:
    """`RecipeError` unless the network can be trained and has a number to say about every class."""
    parameters, wanted = list(made.parameters()), (2, len(data.classes))
    if not parameters:
        raise RecipeError(f"the network {name} has no parameters to train.")
    if any(parameter.is_meta for parameter in parameters):
        raise RecipeError(f"the network {name} has weights on the device meta, which have no numbers.")
    for when in ("in evaluation", "in training"):
        scores = _tried(name, made.train(when == "in training"), data.shape)
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        if got != wanted:
            raise RecipeError(
                f"the network {name} must make of two images numbers of the shape {wanted}, and not {got}, {when}."
            )
        if not scores.is_floating_point():
            raise RecipeError(f"the network {name} must make numbers with fractions, and not {scores.dtype}.")
    if not scores.requires_grad:
        raise RecipeError(f"nothing of the network {name} can be trained: what it makes depends on no free parameter.")


def _tried(name: str, made: nn.Module, shape: Shape) -> Any:
    """What the network makes of two images."""
    try:
        return made(torch.zeros(2, *shape, device=next(made.parameters()).device))
    except Exception as error:  # whatever somebody's own code may raise
        said = f"the network {name} cannot take images of {shape}: {type(error).__name__}: {clause(error)}."
        raise RecipeError(said) from error


def _builder(network: Any) -> Any:
    """The function as a row of the table of networks."""

    def build(shape: Shape, classes: int, *, batchnorm: bool = False, dropout: Any = None) -> nn.Module:
        wanted = ({"batchnorm": True} if batchnorm else {}) | ({"dropout": dropout} if dropout else {})
        try:
            inspect.signature(network).bind(shape, classes, **wanted)
        except TypeError as error:
            raise RecipeError(
                f"the network {_called(network)} is called with (shape, classes"
                f"{''.join(f', {name}=...' for name in wanted)}), which it does not take: {clause(error)}."
            ) from error
        try:
            made = network(shape, classes, **wanted)
        except MaxGainError:
            raise
        except Exception as error:  # whatever somebody's own code may raise
            raise RecipeError(
                f"the network {_called(network)} cannot be made for images of {shape} and {classes} classes: "
                f"{type(error).__name__}: {clause(error)}."
            ) from error
        if not isinstance(made, nn.Module):
            raise RecipeError(f"the function {_called(network)} makes a {type(made).__name__}, and not a network.")
        if any(map(is_lazy, (*made.parameters(), *made.buffers()))):
            with torch.no_grad():
                _tried(_called(network), made.eval(), shape)  # which gives lazy layers their sizes
        return made if made.training else made.train()  # a pretrained network comes in evaluation mode

    return build
