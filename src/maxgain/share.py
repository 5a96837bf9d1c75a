"""What a step works on: the layers whose measurements it uses up, and the weights that it divides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import kernels
from .layers import FoundLayer


@dataclass(frozen=True)
class Share:
    """The layers whose measurements a step uses up, and the weights that it divides.

    Those are all layers but those whose weights only other optimisers hold. Divided are the weights that the stepping
    optimiser holds, unless they are frozen or no bound on them can ever bind.
    """

    signature: Any
    all_layers: Sequence[FoundLayer]
    weights: Sequence[nn.Parameter]
    all_bounds: Mapping[str, float]
    held: set[int]
    left_to_others: set[int]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def _covered(self) -> list[int]:
        return [i for i, weight in enumerate(self.weights) if id(weight) not in self.left_to_others]

    @cached_property
    def layers(self) -> list[FoundLayer]:
        """The layers that the step is about."""
        return [self.all_layers[i] for i in self._covered]

    @cached_property
    def index(self) -> Tensor | None:
        """Which of all layers these are; None if all."""
        if len(self._covered) == len(self.weights):
            return None
        return torch.tensor(self._covered, device=self.device)

    @cached_property
    def bounds(self) -> Tensor:
        """The bounds of the layers, packed."""
        bounds = [self.all_bounds[layer.name] for layer in self.layers]
        return torch.tensor(bounds, dtype=self.dtype, device=self.device)

    @cached_property
    def users(self) -> list[list[int]]:
        """For each divided weight, the positions of the layers that use it: most often one."""
        by_weight: dict[int, list[int]] = {}
        for position, i in enumerate(self._covered):
            by_weight.setdefault(id(self.weights[i]), []).append(position)
        binding = [self.all_bounds[layer.name] != float("inf") for layer in self.layers]
        return [
            users
            for identity, users in by_weight.items()
            if identity in self.held
            and self.weights[self._covered[users[0]]].requires_grad
            and any(binding[user] for user in users)
        ]

    @cached_property
    def divided(self) -> list[nn.Parameter]:
        """The weights to divide, each once."""
        return [self.weights[self._covered[users[0]]] for users in self.users]

    @cached_property
    def divided_by(self) -> Tensor:
        """For each divided weight, the position of its factor."""
        return torch.tensor([users[0] for users in self.users], dtype=torch.int64, device=self.device)

    @cached_property
    def _owners(self) -> Tensor:
        """For each layer, the first layer with the same weight; one past the last for a weight that is not divided."""
        owners = [len(self.layers)] * len(self.layers)
        for users in self.users:
            for user in users:
                owners[user] = users[0]
        return torch.tensor(owners, dtype=torch.int64, device=self.device)

    def combined(self, factors: Tensor) -> Tensor:
        """The factors as they take effect: the largest for layers that share a weight, 1 for what is not divided."""
        room = torch.ones(len(factors) + 1, dtype=factors.dtype, device=factors.device)
        room.scatter_reduce_(0, self._owners, factors, "amax")
        room[-1:] = 1.0
        return room[self._owners]

    @property
    def fused(self) -> kernels.FusedProjection | None:
        """The whole projection in two launches, where that can be done."""
        made: kernels.FusedProjection | None = self.__dict__.get("_fused")
        if made is not None and made.fits(self.divided):
            return made
        if all(len(users) == 1 for users in self.users) and kernels.can_fuse(self.divided, self.bounds):
            made = kernels.FusedProjection(self.divided, [users[0] for users in self.users], len(self.layers))
            self.__dict__["_fused"] = made
            return made
        return None


def parameters_of(optimizer: Optimizer) -> set[int]:
    """The identities of the parameters that an optimiser holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
