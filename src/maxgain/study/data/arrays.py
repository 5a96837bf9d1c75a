"""A data set made from one's own arrays or torch data sets."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxgain.errors import DataError

from .folder import to_bytes
from .sources import DATASETS
from .splits import Dataset, Split, checked, stratified

HELD_OUT = 0.2
"""The share of the training images that becomes the validation part, where there is none."""
MOST_CHANNELS = 4


def dataset(
    name: str, train: Any, test: Any, validation: Any | None = None, classes: Sequence[str] | None = None
) -> Dataset:
    """A data set of your own.

    Each part is a pair of arrays or tensors, images (N, C, H, W) and labels (N) from 0, or a `torch.utils.data.Dataset`
    of images and labels. Images are whole numbers from 0 to 255 or fractions from 0 to 1; they are copied as bytes.

    Args:
        name: Its name in results.
        train: What networks are trained on.
        test: What runs are scored on, and nothing is chosen on.
        validation: What numbers are chosen on; final runs are trained on it too. Default: a fifth of `train`.
        classes: The names of the classes; numbers by default.
    """
    is_text = isinstance(name, str) and name.strip() == name and "/" not in name
    if not is_text or name in DATASETS or name[:1] in ("", ".", "-"):
        raise DataError(f"{name!r} cannot be the name of your data set: choose another.", field="name")
    parts = {"train": _split("train", train), "test": _split("test", test)}
    if validation is not None:
        parts["validation"] = _split("validation", validation)
    else:
        rest, held_out = stratified(parts["train"].labels.numpy(), 1 - HELD_OUT)
        parts |= {"train": parts["train"][rest], "validation": parts["train"][held_out]}
    channels, height, width = shape = tuple(parts["train"].images.shape[1:])
    for part, split in parts.items():
        if not len(split):
            raise DataError(f"the {part} part has no images.")
        if split.images.shape[1:] != shape:
            raise DataError(f"{part} images are {tuple(split.images.shape[1:])}, but training images are {shape}.")
    if width <= MOST_CHANNELS < min(channels, height):
        warnings.warn(
            f"the images have {channels} channels of {height}×{width} pixels; if the channels come last, pass "
            "images.permute(0, 3, 1, 2).",
            stacklevel=2,
        )
    labels = torch.cat([part.labels for part in parts.values()])
    least, most = int(labels.min()), int(labels.max())
    names = tuple(map(str, range(most + 1) if classes is None else classes))
    if least > 0 and classes is None:
        raise DataError(f"labels count from 0, but the least here is {least}: subtract it, or pass classes.")
    if len(names) < 2:
        raise DataError(f"need at least 2 classes, got {len(names)}.")
    if most >= len(names):
        raise DataError(f"label {most} is beyond the {len(names)} classes, counted from 0.")
    return checked(Dataset(name, parts["train"], parts["validation"], parts["test"], names, source="arrays"))


def _split(part: str, given: Any) -> Split:
    """A pair of images and labels, or a torch data set, as bytes and whole numbers."""
    if isinstance(given, tuple | list) and len(given) == 2:
        images, labels = _tensor(f"{part} images", given[0]), _tensor(f"{part} labels", given[1])
    elif hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, Tensor | np.ndarray):
        images, labels = _items(part, given)
    else:
        raise DataError(f"{part} must be a pair (images, labels) or a torch data set, not {type(given).__name__}.")
    if images.dim() != 4:
        raise DataError(f"{part} images must have the shape (N, C, H, W), not {tuple(images.shape)}.")
    if labels.dim() != 1 or len(images) != len(labels):
        raise DataError(f"{part} has {len(images)} images but labels of shape {tuple(labels.shape)}.")
    whole = labels.long()
    if not torch.equal(whole.to(labels.dtype), labels) or bool((whole < 0).any()):
        raise DataError(f"{part} labels must be whole numbers from 0.")
    if images.dtype != torch.uint8 and len(images):
        values, white = (images, 1) if images.is_floating_point() else (images.long(), 255)
        least, most = values.amin().item(), values.amax().item()
        if not 0 <= least <= most <= white or images.dtype == torch.bool:
            wanted = "whole numbers from 0 to 255 or fractions from 0 to 1"
            raise DataError(f"{part} images must be {wanted}, not {images.dtype} from {least} to {most}.")
        images = (values * (255 // white)).round()
    return Split(images.to(torch.uint8), whole)


def _items(part: str, given: Any) -> tuple[Tensor, Tensor]:
    """All items of a torch data set."""
    images, labels = [], []
    for number in range(len(given)):
        image, label = given[number]
        images.append(_image(image))
        labels.append(int(label))
        if images[-1].shape != images[0].shape:
            shapes = f"{tuple(images[-1].shape)} and {tuple(images[0].shape)}"
            raise DataError(f"{part} images must be alike, but number {number} and the first one are {shapes}.")
    return torch.stack(images) if images else torch.empty(0, 1, 1, 1), torch.tensor(labels, dtype=torch.int64)


def _image(image: Any) -> Tensor:
    """A tensor as it is; a Pillow image or an array (H, W) or (H, W, C) with the channels first."""
    if isinstance(image, Tensor):
        return image
    pixels = _tensor("pixels", to_bytes(image) if hasattr(image, "getbands") else image)
    if pixels.dim() == 2:
        return pixels[None]
    if pixels.dim() != 3 or pixels.shape[2] > MOST_CHANNELS:
        raise DataError(f"an array of shape {tuple(pixels.shape)} is not (H, W, C): make a tensor (C, H, W) of it.")
    return pixels.permute(2, 0, 1)


def _tensor(what: str, given: Any) -> Tensor:
    """A copy of the numbers, so that nobody changes them later."""
    if isinstance(given, Tensor):
        return given.detach().cpu().clone(memory_format=torch.contiguous_format)
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise DataError(f"{what} must be numbers in one array.") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what} must be numbers, not {array.dtype}.")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
