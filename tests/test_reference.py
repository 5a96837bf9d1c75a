"""The paper's algorithm, written out slowly, beside the real one: the same weights after a hundred steps."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from maxgain import MaxGain
from maxgain.reference import linear_term, maxgain_step
from nets import OPTIMIZERS

STEPS = 100


class Residual(nn.Module):
    """Pre-activation, with a 1×1 shortcut where the shape changes."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(outputs), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        out = self.conv1(torch.relu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(torch.relu(self.norm2(out)))


def conv_net():
    # Batch norm comes after the ReLU: right after a layer it would leave the layer's bias no gradient but rounding
    # noise, which Adam makes steps of.
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(4), nn.Dropout(0.2),
        nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=2, groups=2), nn.ReLU(inplace=True), nn.BatchNorm2d(6),
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(54, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3),
    )  # fmt: skip


def residual_net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), Residual(4, 4, stride=1), Residual(4, 6, stride=2),
        nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


# Each norm with each network, by one optimizer or the other.
CASES = [
    (conv_net, "adam", 1.0), (conv_net, "nesterov", 2.0), (conv_net, "adam", 3.0), (conv_net, "nesterov", math.inf),
    (residual_net, "nesterov", 1.0), (residual_net, "adam", 2.0), (residual_net, "nesterov", 3.0),
    (residual_net, "adam", math.inf),
]  # fmt: skip


@pytest.mark.parametrize(("network", "optimizer", "p"), CASES)
def test_a_hundred_steps_give_the_gains_and_the_weights_of_the_reference(network, optimizer, p):
    gamma = 0.1 if p == 1 else 0.3
    ours = network().double()
    theirs = copy.deepcopy(ours)
    our_optimizer, their_optimizer = (OPTIMIZERS[optimizer](one.parameters()) for one in (ours, theirs))
    constraint = MaxGain(ours, gamma=gamma, p=p).attach(our_optimizer)
    projected = set()
    for step in range(STEPS):
        images, labels = torch.randn(6, 3, 5, 5, dtype=torch.float64), torch.randint(3, (6,))

        def objective(model, seed=step, images=images, labels=labels):
            torch.manual_seed(seed)  # the same dropout masks on both sides
            return cross_entropy(model(images), labels)

        our_optimizer.zero_grad()
        objective(ours).backward()
        our_optimizer.step()
        gamma_hat = maxgain_step(theirs, lambda: objective(theirs), their_optimizer.step, gamma, p)

        assert constraint.gains == pytest.approx(gamma_hat, rel=1e-7)  # a hundred steps amplify roundings
        projected |= {name for name, scale in constraint.scales.items() if scale < 1}
    assert projected == set(gamma_hat), "every layer should have been over its bound at some time"
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-7, atol=1e-9)


def test_the_reference_projects_with_the_gains_of_the_forward_and_the_running_variance_after_it():
    """By hand: one weight each, one instance each, and every number of the step written down."""
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, eps=0.5, momentum=0.5)).double()
    with torch.no_grad():
        model[0].weight.fill_(3.0)
        model[0].bias.fill_(5.0)
    x = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    gamma_hat = maxgain_step(model, lambda: model(x).sum(), lambda: model[0].weight.data.fill_(8.0), gamma=2.0)
    # The hidden activations are 8 and 2, of unbiased variance 18: the running variance is (1 + 18) / 2, plus ε 10.
    assert gamma_hat == pytest.approx({"0": 3.0, "1": 10.0**-0.5})
    assert model[0].weight.item() == pytest.approx(8.0 / 1.5)
    assert model[0].bias.item() == 5.0
    assert model[1].weight.item() == 1.0


def test_the_reference_knows_what_it_does_not_know():
    with pytest.raises(NotImplementedError, match="reflect"):
        linear_term(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), torch.ones(1, 1, 4, 4))
