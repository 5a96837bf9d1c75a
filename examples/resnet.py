"""Fine-tune a ResNet of timm so that no layer amplifies your data more than it did before.

    pip install -c constraints.txt '.[study,examples]'
    python examples/resnet.py                     # random weights, so that nothing is fetched
    python examples/resnet.py --pretrained        # the published weights, fetched by timm

Every layer gets a bound of its own: the largest gain that it shows on the new data before the first step. Without it,
fine-tuning at a high learning rate can blow up single layers; with it, a layer can change but not grow.
"""

import argparse
import math
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from maxgain import MaxGain, measure_gains

CLASSES = 10


def images_and_labels(count: int, side: int = 32) -> tuple[Tensor, Tensor]:
    """Scanned digits as colour images: stand-ins for your own data."""
    digits = load_digits()
    images = torch.tensor(digits.images[:count], dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = nn.functional.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)
    return images.expand(-1, 3, -1, -1).contiguous(), torch.tensor(digits.target[:count])


def largest(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Every layer's largest gain, but of those that put out nothing: a new ResNet's last batch norms start at zero."""
    gains = {name: float(gains.max()) for name, gains in measure_gains(model, images.split(64)).gains.items()}
    return {name: gain for name, gain in gains.items() if gain > 0}


def fine_tune(model: nn.Module, images: Tensor, labels: Tensor, gamma: Any, epochs: int) -> MaxGain:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    constraint = MaxGain(model, gamma).attach(optimizer)
    for _ in range(epochs):
        for index in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.train()(images[index]), labels[index]).backward()
            optimizer.step()
    return constraint


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Prints the layers that grew most without the bounds, and returns how far each layer grew with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=512)
    options = parser.parse_args(arguments)
    try:
        import timm
    except ImportError as error:
        raise SystemExit(f"this example needs {error.name}: pip install '.[examples]' in a clone.") from error

    images, labels = images_and_labels(options.images)
    growth = {}
    for bounded in (False, True):
        torch.manual_seed(0)
        model = timm.create_model(options.network, pretrained=options.pretrained, num_classes=CLASSES)
        before = largest(model, images)
        gamma = before | {"*": math.inf} if bounded else math.inf
        fine_tune(model, images, labels, gamma, options.epochs).detach()
        after = largest(model, images)
        growth[bounded] = {name: after[name] / gain for name, gain in before.items()}
    print(f"how much the largest gain of a layer of {options.network} grew in {options.epochs} epochs")
    print(f"{'layer':28}{'free':>10}{'bounded':>10}")
    for name in sorted(growth[False], key=lambda name: -growth[False][name])[:8]:
        print(f"{name:28}{growth[False][name]:10.2f}{growth[True][name]:10.2f}")
    return growth[True]


if __name__ == "__main__":
    main()
