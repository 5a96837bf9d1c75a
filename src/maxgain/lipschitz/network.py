"""A bound for a whole network, where there is one: the network must be a chain of parts whose constants are known.

The Lipschitz constant of ``f_n ∘ ... ∘ f_1`` is at most the product of the parts' constants. Sums, branches, attention
and normalisation by the input are not such chains, and nothing is claimed for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.utils import _ntuple

from .. import _torch


class NotAChainError(Exception):
    """Says why nothing can be claimed of a network."""


def chain_constant(model: nn.Module, norms: Mapping[nn.Module, float], p: float) -> float:
    """Return the product of the constants of a chain's parts, in eval mode; raise ``NotAChainError`` if it is none.

    ``norms`` has the operator norms of the parts that are linear.
    """
    model = getattr(model, "_orig_mod", model)
    for name, module in model.named_modules():
        what = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            is_ours = isinstance(hook, _torch.ForwardHook) or isinstance(getattr(hook, "__self__", None), nullcontext)
            if not is_ours and not type(hook).__module__.startswith("torch.nn.utils."):  # pruning, weight norm
                raise NotAChainError(f"{what} has a forward hook, which may change what passes")
        if "forward" in vars(module):
            raise NotAChainError(f"the forward of {what} was replaced")
    if model in norms:
        return norms[model]
    return math.prod(_constant(link, model, norms, p) for link in _links(model, norms))


class _Tracer(fx.Tracer):
    """Traces into every module but torch's own and the given ones."""

    leaves: Collection[nn.Module] = ()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.leaves or super().is_leaf_module(m, module_qualified_name)


def _links(model: nn.Module, leaves: Collection[nn.Module]) -> list[fx.Node]:
    """Return the operations of a forward, each of which takes the result of the one before it, and nothing else."""
    tracer = _Tracer()
    tracer.leaves = leaves
    try:
        graph = tracer.trace(model)
    except Exception as error:  # a forward is arbitrary code
        raise NotAChainError(f"the forward of {type(model).__name__} cannot be traced") from error
    nodes = [node for node in graph.nodes if not _is_shape(node)]
    for before, node in zip([None, *nodes[:-1]], nodes, strict=True):
        if [n for n in node.all_input_nodes if not _is_shape(n)] != ([] if before is None else [before]):
            raise NotAChainError(f"the graph branches or joins at {_title(node)!r}")
    if nodes[-1].args[0] is not nodes[-2]:
        raise NotAChainError("the forward returns something other than one tensor")
    return nodes[1:-1]


def _is_shape(node: fx.Node) -> bool:
    """Whether a node is about the shape of what passes, as in ``x.view(x.size(0), -1)``."""
    if node.target is getattr:
        return node.args[1] == "shape"
    return node.target == "size" or (node.target is getitem and _is_shape(node.all_input_nodes[0]))


def _title(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _constant(node: fx.Node, model: nn.Module, norms: Mapping[nn.Module, float], p: float) -> float:
    """Return the constant of one operation."""
    what, constant = f"the operation {_title(node)!r}", None
    if node.op == "call_module":
        module = model.get_submodule(_title(node))
        what = f"{_title(node)!r} ({type(module).__name__})"
        constant = norms[module] if module in norms else part_constant(module, p)
    elif node.target in FUNCTIONS:
        with suppress(TypeError):  # arguments that the module does not take, or sizes that the forward computes
            constant = part_constant(FUNCTIONS[node.target](*node.args[1:], **node.kwargs), p)
    if constant is None:
        raise NotAChainError(f"no Lipschitz constant is known for {what}")
    return constant


def part_constant(module: nn.Module, p: float) -> float | None:
    """Return an upper bound of the Lipschitz constant of a part without linear weights; None if none is known."""
    constant = PARTS.get(type(module))
    return constant(module, p) if callable(constant) else constant


def _pool(module: Any, p: float) -> float | None:
    """Return the constant of a pooling layer: an entry counts in each window that it lies in.

    A maximum moves by no more than one entry of its window. By Jensen's inequality ``|mean|^p ≤ mean(|.|^p)``.
    """
    along = _ntuple(int(type(module).__name__[-2]), "along")  # type: ignore[no-untyped-call]
    kernel, stride, padding, dilation = (
        along(getattr(module, name, 1)) for name in ("kernel_size", "stride", "padding", "dilation")
    )
    windows = math.prod(math.ceil(k * math.gcd(s, d) / s) for k, s, d in zip(kernel, stride, dilation, strict=True))
    if isinstance(module, nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d):
        if getattr(module, "divisor_override", None) is not None:
            return None
        if not module.ceil_mode and (module.count_include_pad or not any(padding)):  # no window is cut at a border
            return float((windows / math.prod(kernel)) ** (1 / p))
    return float(windows ** (1 / p))


def _global_pool(module: Any, p: float) -> float | None:
    return 1.0 if module.output_size in (1, (1,), (1, 1)) else None  # several windows may overlap


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module:
    return nn.Module() if training else nn.Identity()  # one that drops in eval mode too is not the identity


_IDENTITIES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_SLOPES_UP_TO_1 = (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Softsign, nn.Tanh, nn.LogSigmoid)
_GLOBAL_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d)
# The largest slope of an activation is its constant for every p; those that are no fraction are rounded up.
PARTS: dict[type[nn.Module], float | Callable[[Any, float], float | None]] = {
    **dict.fromkeys((*_IDENTITIES, *_SLOPES_UP_TO_1), 1.0),
    nn.LeakyReLU: lambda module, p: max(1.0, abs(module.negative_slope)),
    nn.ELU: lambda module, p: max(1.0, abs(module.alpha)),
    nn.Softplus: lambda module, p: 1.0 if module.threshold >= 20 else None,  # it jumps to x there: by 2e-9 for 20
    nn.SELU: 1.7582,
    nn.GELU: 1.1290,
    nn.SiLU: 1.0999,
    nn.Mish: 1.0885,
    nn.Hardswish: 1.5,
    nn.Sigmoid: 0.25,
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), _pool),
    **dict.fromkeys(_GLOBAL_POOLS, _global_pool),
}
# A function of torch and a method of a tensor take what the module of their name does: ``F.leaky_relu``, ``x.tanh_()``.
MODULES: dict[str, Callable[..., nn.Module]] = {
    **{part.__name__.lower(): part for part in PARTS},
    **dict.fromkeys(("view", "reshape", "contiguous"), nn.Identity),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _dropout),
}
FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    name if home is torch.Tensor else getattr(home, name): MODULES[name.replace("_", "")]
    for home in (F, torch, torch.Tensor)
    for name in dir(home)
    if name.replace("_", "") in MODULES
}
