"""Your own images, your own network: measure, choose a bound from what was measured, train under it, compare.

    python examples/own_images.py PHOTOS          # a folder with one folder of images per class
    python examples/own_images.py                 # none at hand: handwritten digits are written out as PNG files first

The same from the command line, with repeats and a significance test:

    maxgain compare folder --data PHOTOS --regularisers none maxgain=2 --seeds 5
"""

import argparse
import math
import statistics
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from maxgain import MaxGain
from maxgain.study.data import table as data_sets

SIDE = 16
BATCH = 32


def network(classes: int) -> nn.Module:
    """Put your own here; nothing below knows what it is made of."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (SIDE // 4) ** 2, classes),
    )


def train(images: Tensor, labels: Tensor, gamma: float, epochs: int) -> tuple[nn.Module, dict[str, float]]:
    """A plain training loop with the two lines in it; the network, and the largest gains of its last batch."""
    torch.manual_seed(0)
    model = network(int(labels.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    constraint = MaxGain(model, gamma)
    constraint.attach(optimizer)
    for _ in range(epochs):
        for index in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[index]), labels[index]).backward()
            optimizer.step()
    return model, constraint.gains


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return (model.eval()(images).argmax(1) == labels).double().mean().item()


def scaled(images: Tensor) -> Tensor:
    """Bytes as numbers from -1 to 1."""
    return images.float() / 127.5 - 1


def write_digits(folder: Path, images: int = 600) -> None:
    """Scanned digits that come with scikit-learn, as PNG files: what a folder of your own would look like."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images[:images], digits.target, strict=False)):
        place = folder / f"class{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype("uint8")).save(place / f"{number}.png")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="one folder of images per class")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        if options.folder is None:
            write_digits(Path(made))
        data = data_sets.load("folder", root=options.folder or Path(made), size=SIDE)
    images, labels = scaled(data.train.images), data.train.labels
    held_out = scaled(data.validation.images), data.validation.labels

    free, gains = train(images, labels, math.inf, options.epochs)
    gamma = statistics.median(gains.values())  # holds about half of the layers
    held, bounded = train(images, labels, gamma, options.epochs)

    print(f"{len(labels)} images of {len(data.classes)} classes")
    print(f"γ = {gamma:.3g}, the median of the free network's gains")
    print(f"{'layer':12}{'free':>10}{'bounded':>10}")
    for name in gains:
        print(f"{name:12}{gains[name]:10.2f}{bounded[name]:10.2f}")
    print(f"{'held out':12}{accuracy(free, *held_out):10.1%}{accuracy(held, *held_out):10.1%}")


if __name__ == "__main__":
    main()
