"""The paper's Algorithm 1 in its own symbols: slow, obvious, and the truth in tests.

Nothing here is shared with the rest of the package, so that the two can be held against each other. It knows the
layers of the paper's networks alone: dense, convolutional with zero padding, and batch norm.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def maxgain_step(
    model: nn.Module, f: Callable[[], Tensor], update: Callable[[], object], gamma: float, p: float = 2.0
) -> dict[str, float]:
    """One turn t of the algorithm's loop, on one minibatch; returns every layer's γ̂ by its dotted name.

    ``f`` computes the objective on the minibatch and ``update`` is the optimizer's step: SGD, Adam, any other.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> minibatch = torch.randn(8, 4)
        >>> gamma_hat = maxgain_step(model, lambda: model(minibatch).square().mean(), optimizer.step, gamma=0.5)
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LAYERS)}
    X: dict[str, list[Tensor]] = {i: [] for i in layers}
    Z: dict[str, list[Tensor]] = {i: [] for i in layers}

    # (g, X, Z) ← ∇ f(W^(t-1)): the inputs and their linear terms are cached.
    handles = [layer.register_forward_hook(_caching(X[i], Z[i])) for i, layer in layers.items()]
    model.zero_grad()
    torch.autograd.backward(f())
    for handle in handles:
        handle.remove()

    # Ŵ^(t) ← update(W^(t-1), g)
    update()

    gamma_hats = {}
    for i, layer in layers.items():
        gamma_hat = 0.0
        for x_j, z_j in zip(_instances(layer, X[i]), _instances(layer, Z[i]), strict=True):
            gamma_hat = max(gamma_hat, gain(z_j, x_j, p))
        with torch.no_grad():
            layer.weight.copy_(pi(layer.weight, gamma_hat, gamma))
        gamma_hats[i] = gamma_hat
    return gamma_hats


def gain(z: np.ndarray, x: np.ndarray, p: float) -> float:
    """``‖Wx‖_p / ‖x‖_p`` with z = Wx; a layer that is given nothing amplifies nothing."""
    norm_x = np.linalg.norm(x, ord=p)
    return float(np.linalg.norm(z, ord=p) / norm_x) if norm_x > 0 else 0.0


def pi(W: Tensor, gamma_hat: float, gamma: float) -> Tensor:
    """The projection ``π(W, γ̂, γ) = W / max(1, γ̂ / γ)``."""
    return W / max(1.0, gamma_hat / gamma)


LAYERS = (nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d)


def linear_term(layer: nn.Module, X: Tensor) -> Tensor:
    """``Z = WX``: what a layer makes of its inputs without its bias, or a batch norm without its mean and shift."""
    match layer:
        case nn.Linear():
            return F.linear(X, layer.weight)
        case nn.Conv2d(padding_mode="zeros"):
            return F.conv2d(X, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
        case nn.BatchNorm1d() | nn.BatchNorm2d() if layer.running_var is not None:
            W = torch.diag(layer.weight / torch.sqrt(layer.running_var + layer.eps))
            return torch.einsum("ck,nk...->nc...", W, X)
    raise NotImplementedError(f"the reference does not know {layer}.")


def _caching(X: list[Tensor], Z: list[Tensor]) -> Callable[..., None]:
    @torch.no_grad()
    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        X.append(inputs[0].clone())
        Z.append(linear_term(layer, inputs[0]))

    return hook


def _instances(layer: nn.Module, batches: Iterable[Tensor]) -> list[np.ndarray]:
    """One vector per instance: a row of the last dimension for a dense layer, else a flattened sample."""
    rows = [X.reshape(-1, X.shape[-1]) if isinstance(layer, nn.Linear) else X.flatten(1) for X in batches]
    return [x_j.numpy(force=True).astype(np.float64) for X in rows for x_j in X]
