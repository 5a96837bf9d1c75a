"""Fine-tune a timm model so that no layer amplifies your data more than it did before.

    pip install '.[study,examples]'
    python examples/finetune_timm.py                     # random weights: nothing is fetched; a minute on two cores
    python examples/finetune_timm.py --pretrained        # the published weights, fetched by timm

Every layer gets its own bound: the largest gain that it shows on the new data before the first step. A layer can
change, but not grow.
"""

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from maxgain import MaxGain, measure_gains


def images_and_labels(count: int, side: int = 32) -> tuple[Tensor, Tensor]:
    """Scanned digits as colour images: put your own data here."""
    digits = load_digits()
    images = torch.tensor(digits.images[:count], dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = nn.functional.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)
    return images.expand(-1, 3, -1, -1).contiguous(), torch.tensor(digits.target[:count])


def largest_gains(model: nn.Module, images: Tensor) -> dict[str, float]:
    """The largest gain of every layer; not of those whose output is zero, as a new ResNet's last batch norms are."""
    report = measure_gains(model, images.split(64))
    return {name: float(gains.max()) for name, gains in report.gains.items() if gains.max() > 0}


def fine_tune(model: nn.Module, images: Tensor, labels: Tensor, gamma: dict[str, float], epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    constraint = MaxGain(model, gamma).attach(optimizer)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    constraint.detach()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print the layers that grew most without bounds; return the growth of each layer with bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=512)
    options = parser.parse_args(arguments)
    import timm

    images, labels = images_and_labels(options.images)
    growth = {}
    for is_bounded in (False, True):
        torch.manual_seed(0)
        model = timm.create_model(options.network, pretrained=options.pretrained, num_classes=10)
        before = largest_gains(model, images)
        fine_tune(model, images, labels, (before if is_bounded else {}) | {"*": math.inf}, options.epochs)
        after = largest_gains(model, images)
        growth[is_bounded] = {name: after[name] / gain for name, gain in before.items()}
    print(f"growth of the largest gain of each layer of {options.network} in {options.epochs} epochs")
    print(f"{'layer':28}{'free':>10}{'bounded':>10}")
    for name in sorted(growth[False], key=lambda name: -growth[False][name])[:8]:
        print(f"{name:28}{growth[False][name]:10.2f}{growth[True][name]:10.2f}")
    return growth[True]


if __name__ == "__main__":
    main()
