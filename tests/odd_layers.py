"""Layers with forwards of their own: linear in their weights, or not."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- Half the weight does not have half the output. -------------------------------------------------------------------


class Standardised(nn.Conv2d):
    """As NFNet's and BiT's: the same Wx, however small the weight is."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(input, weight / (weight.std((1, 2, 3), keepdim=True) + 1e-8), self.bias)


class StandardisedInside(nn.Conv2d):
    """The same, by what the usual forward calls."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight / weight.std((1, 2, 3), keepdim=True), bias)


class Cosine(nn.Linear):
    """As a cosine classifier."""

    def forward(self, input: Tensor) -> Tensor:
        return 16 * F.linear(F.normalize(input, dim=-1), F.normalize(self.weight, dim=-1), self.bias)


class Noisy(nn.Linear):
    """As NoisyLinear of Rainbow: noise of its own size is added to the weight."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.sigma = nn.Parameter(torch.full_like(self.weight, 0.5))

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight + self.sigma * torch.randn_like(self.sigma), self.bias)


class Activated(nn.Linear):
    """An activation inside."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(3 * super().forward(input))


class Squared(nn.Linear):
    """Quadratic in its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.square(), self.bias)


class BiasInside(nn.Linear):
    """Its bias is scaled with its output."""

    def forward(self, input: Tensor) -> Tensor:
        return 3 * super().forward(input)


WRONG = {
    Standardised: (3, 4, 3), StandardisedInside: (3, 4, 3), Cosine: (6, 4), Noisy: (6, 4), Activated: (6, 4),
    Squared: (6, 4), BiasInside: (6, 4),
}  # fmt: skip

# --- It has. ----------------------------------------------------------------------------------------------------------


class Same(nn.Conv2d):
    """As timm's Conv2dSame: it pads for itself."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(F.pad(input, (0, 1, 0, 1)), self.weight, self.bias)


class Scaled(nn.Linear):
    """As equalised learning rates."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight / self.in_features**0.5, self.bias)


class InPlace(nn.Linear):
    """It counts its calls and draws random numbers."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return F.linear(input + 0 * torch.rand(()), self.weight, self.bias)


class Gated(nn.Linear):
    """Its forward takes more than an input."""

    def forward(self, input: Tensor, gate: float = 0.5) -> Tensor:
        return gate * F.linear(input, self.weight) + self.bias


RIGHT = {Same: (3, 4, 3), Scaled: (6, 4), InPlace: (6, 4), Gated: (6, 4)}

# --- Others -----------------------------------------------------------------------------------------------------------


class GatedByInput(nn.Linear):
    """It cannot be run on its input alone."""

    def forward(self, input: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return gate * F.linear(input, self.weight)


class Calling(nn.Sequential):
    """Calls it."""

    def __init__(self) -> None:
        super().__init__(GatedByInput(5, 5, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self[0](x, gate=x)
        return out


class Router(nn.Linear):
    """As routers of some transformers: its Wx is a part of what it returns."""

    def forward(self, input: Tensor) -> Any:
        scores = super().forward(input)
        return scores.topk(1).indices, scores


class Routed(nn.Sequential):
    """Takes the scores of one."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(Router(*sizes))

    def forward(self, x: Tensor) -> Any:
        return self[0](x)[1]


class Scale(nn.Module):
    """A type of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((3,), 4.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor
