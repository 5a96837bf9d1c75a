"""The packed experts of transformers' models as dense layers, so that each expert's matrices have gains of their own.

Mixtral, GPT-OSS, Qwen-MoE and some sixty other models of transformers (from 5.0) keep all experts of a layer in two
parameters with three dimensions, and describe their layout (``is_transposed``, ``has_bias``, ``has_gate``). A hook sees
neither which tokens an expert was given nor what lies between its two matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import dense
from .errors import UnsupportedLayerError

LAYOUT = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj")
"""The attributes of a module of packed experts."""


def is_packed(module: nn.Module) -> bool:
    """Whether a module is one of packed experts in the layout that is known."""
    return all(hasattr(module, one) for one in LAYOUT) and "down_proj" in module._parameters


class SplitExperts(nn.Module):
    """Takes and returns what a module of packed experts does, and runs one expert after the other."""

    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.num_experts: int = packed.num_experts
        self.up = _unpacked(packed, "gate_up_proj" if packed.has_gate else "up_proj")
        self.down = _unpacked(packed, "down_proj")
        self.between: Any = packed
        """What the module does between its two projections; its weights are gone."""
        self.train(packed.training)

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts for each token; the last two are (tokens, choices)."""
        total, between = torch.zeros_like(hidden_states), self.between
        for number in range(self.num_experts):
            token, choice = torch.where(chosen == number)
            if len(token):
                x = self.up[number](hidden_states[token])
                x = self.down[number](between._apply_gate(x) if between.has_gate else between.act_fn(x))
                if getattr(between, "has_post_expert_norm", False):
                    x = between.post_expert_norm(x)
                total.index_add_(0, token, (x * weights[token, choice, None]).to(total.dtype))
        return total


def _unpacked(packed: Any, name: str) -> nn.ModuleList:
    """Return one dense layer per expert, and take the weights from the module."""
    weights, biases = packed._parameters.pop(name), packed._parameters.pop(f"{name}_bias", None)
    matrices = weights.transpose(1, 2) if packed.is_transposed else weights
    return nn.ModuleList(map(dense, matrices, [None] * len(matrices) if biases is None else biases))


def split_experts(model: nn.Module) -> nn.Module:
    """Replace the packed experts of a model of transformers by two dense layers each, in place, and return the model.

    The model computes the same, but for rounding, and constraints and reports see every expert's ``up`` and ``down``.
    The weights are copied into new parameters: load a checkpoint before, and make the optimizer afterwards. The experts
    run one after the other, which is slower than transformers' grouped kernels.

    Args:
        model: The model to change.
    """
    for path, module in list(model.named_modules()):
        for name, child in list(module._modules.items()):
            if child is not None and is_packed(child):
                if getattr(child, "_is_expert_parallel", False):
                    what = f"layer {f'{path}.{name}'.lstrip('.')!r} ({type(child).__name__})"
                    raise UnsupportedLayerError(f"{what} cannot be split: its experts lie on several devices.")
                module._modules[name] = SplitExperts(child)
    return model
