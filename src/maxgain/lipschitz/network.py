"""A bound for a whole network, where there is one: the network must be a chain of parts whose constants are known.

The Lipschitz constant of ``f_n ∘ ... ∘ f_1`` is at most the product of the parts' constants. Sums, branches, attention
and normalisation by the input are not such chains, and nothing is claimed for them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..layers import kind_of
from ..torch_quirks import only_looks


class NotAChainError(Exception):
    """Says why nothing can be claimed of a network."""


def chain_constant(model: nn.Module, norms: Mapping[nn.Module, float], p: float) -> float:
    """The product of the constants of a chain's parts, in evaluation mode; raises ``NotAChainError`` if it is none.

    ``norms`` has the operator norms of the parts that are linear.
    """
    model = getattr(model, "_orig_mod", model)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        _check_unchanged(name, module)
    if model in norms:
        return norms[model]
    return math.prod(_constant(link, modules, norms, p) for link in _links(model, norms))


def _check_unchanged(name: str, module: nn.Module) -> None:
    """Makes sure that nothing changes what goes into a module or comes out of it."""
    what = f"{name!r} ({type(module).__name__})" if name else f"the {type(module).__name__} itself"
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    # Ours only look, and those of torch.nn.utils (pruning, weight norm) compute the weight that is in effect.
    if any(not only_looks(hook) and not type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks):
        raise NotAChainError(f"{what} has a forward hook, which may change what passes; remove it to get a bound")
    if "forward" in vars(module):
        raise NotAChainError(f"the forward of {what} was replaced, so what it computes is not known")
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        raise NotAChainError("a forward hook for all modules was registered, which may change what passes")


def _links(model: nn.Module, leaves: Iterable[nn.Module]) -> list[fx.Node]:
    """The operations of a forward, each of which takes what the one before it gave, and nothing else."""
    try:
        with _one_at_a_time:
            graph = _Tracer(leaves).trace(model)
    except Exception as error:  # a forward is arbitrary code, and may raise anything when it is given a stand-in
        raise NotAChainError(f"the forward of {type(model).__name__} cannot be traced") from error
    nodes = [node for node in graph.nodes if not _is_shape(node)]
    for before, node in zip([None, *nodes[:-1]], nodes, strict=True):
        inputs = [n for n in node.all_input_nodes if not _is_shape(n)]
        if inputs != ([] if before is None else [before]):
            raise NotAChainError(f"the graph branches or joins at {_title(node)!r}")
    if nodes[-1].args[0] is not nodes[-2]:
        raise NotAChainError("the forward returns something other than one tensor")
    return nodes[1:-1]


_one_at_a_time = threading.Lock()


class _Tracer(fx.Tracer):
    """Looks into every module but torch's own and the given ones.

    While torch.fx traces, it hears of the calls of all modules in the process. Those in other threads go on as usual.
    """

    def __init__(self, leaves: Iterable[nn.Module]) -> None:
        super().__init__()
        self.leaves = set(leaves)
        self.thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.leaves or super().is_leaf_module(m, module_qualified_name)


def _is_shape(node: fx.Node) -> bool:
    """Whether a node is about the shape of what passes, as in ``x.view(x.size(0), -1)``."""
    if node.target is getattr:
        return node.args[1] == "shape"
    return node.target == "size" or (node.target is getitem and _is_shape(node.all_input_nodes[0]))


def _title(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _constant(node: fx.Node, modules: Mapping[str, nn.Module], norms: Mapping[nn.Module, float], p: float) -> float:
    constant: float | None
    if node.op == "call_module":
        module = modules[str(node.target)]
        what = f"{_title(node)!r} ({type(module).__name__})"
        kind = kind_of(module)
        if kind is not None and kind.divides_by_its_input:
            raise NotAChainError(f"{what} divides by the size of its input, which is no linear map")
        constant = norms[module] if module in norms else part_constant(module, p)
    else:
        what = f"the operation {_title(node)!r}"
        constant = _function_constant(node, p)
    if constant is None:
        raise NotAChainError(f"no Lipschitz constant is known for {what}")
    return constant


def _function_constant(node: fx.Node, p: float) -> float | None:
    """The constant of the module that does what the function does."""
    if node.target in REARRANGEMENTS:
        return 1.0
    if node.target not in FUNCTIONS:
        return None
    try:
        return part_constant(FUNCTIONS[node.target](*node.args[1:], **node.kwargs), p)
    except TypeError:  # called in a way that the module does not know
        return None


def part_constant(module: nn.Module, p: float) -> float | None:
    """The Lipschitz constant of a part without linear weights, or an upper bound of it; None if it is not known."""
    constant = PARTS.get(type(module))
    return constant(module, p) if callable(constant) else constant


def _max_pool(module: Any, p: float) -> float | None:
    # |max x - max y| is at most the largest |x_i - y_i| of the window, and each i lies in this many windows.
    return float(math.prod(_windows_per_entry(module)) ** (1 / p))


def _average_pool(module: Any, p: float) -> float | None:
    # By Jensen's inequality |mean|^p ≤ mean(|.|^p) over the window's entries, of which there may be fewer at a border.
    if getattr(module, "divisor_override", None) is not None:
        return None
    whole_windows = not module.ceil_mode and (module.count_include_pad or not any(_each(module, module.padding)))
    entries = math.prod(_each(module, module.kernel_size)) if whole_windows else 1
    return float((math.prod(_windows_per_entry(module)) / entries) ** (1 / p))


def _windows_per_entry(module: Any) -> list[int]:
    """In how many windows an entry lies at most, along each dimension."""
    kernel, stride = _each(module, module.kernel_size), _each(module, module.stride)
    dilation = _each(module, getattr(module, "dilation", 1))
    return [math.ceil(k * math.gcd(s, d) / s) for k, s, d in zip(kernel, stride, dilation, strict=True)]


def _each(module: nn.Module, value: int | tuple[int, ...]) -> tuple[int, ...]:
    """A setting of a pooling layer along each dimension: as many as the layer's name says, as in MaxPool2d."""
    return (value,) * int(type(module).__name__[-2]) if isinstance(value, int) else value


def _whole_pool(module: Any, p: float) -> float | None:
    # One window that holds everything; with more they may overlap.
    sizes = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,)
    return 1.0 if set(sizes) == {1} else None


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module:
    # A call that drops in evaluation mode too is not the identity.
    return nn.Module() if training else nn.Identity()


Constant = float | Callable[[Any, float], float | None]
_IDENTITIES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_SLOPES_UP_TO_1 = (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Softsign, nn.Tanh, nn.LogSigmoid)
_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_WHOLE_POOLS = (
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
# The largest slope of an activation is its constant for every p; those that are no fraction are rounded up.
PARTS: dict[type[nn.Module], Constant] = {
    **dict.fromkeys(_IDENTITIES, 1.0),
    **dict.fromkeys(_SLOPES_UP_TO_1, 1.0),
    nn.LeakyReLU: lambda module, p: max(1.0, abs(module.negative_slope)),
    nn.CELU: lambda module, p: 1.0 if module.alpha > 0 else None,
    nn.ELU: lambda module, p: max(1.0, abs(module.alpha)),
    nn.Softplus: lambda module, p: 1.0 if module.threshold >= 20 else None,  # it jumps to x there: by 2e-9 for 20
    nn.SELU: 1.7582,
    nn.GELU: 1.1290,
    nn.SiLU: 1.0999,
    nn.Mish: 1.0885,
    nn.Hardswish: 1.5,
    nn.Sigmoid: 0.25,
    **dict.fromkeys(_MAX_POOLS, _max_pool),
    **dict.fromkeys(_AVERAGE_POOLS, _average_pool),
    **dict.fromkeys(_WHOLE_POOLS, _whole_pool),
}
REARRANGEMENTS = ("flatten", "view", "reshape", "contiguous", torch.flatten, torch.reshape)
FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    **dict.fromkeys(("relu", "relu_", torch.relu, torch.relu_, F.relu), nn.ReLU),
    **dict.fromkeys(("tanh", torch.tanh, F.tanh), nn.Tanh),
    **dict.fromkeys(("sigmoid", torch.sigmoid, F.sigmoid), nn.Sigmoid),
    F.leaky_relu: nn.LeakyReLU,
    F.elu: nn.ELU,
    F.gelu: nn.GELU,
    F.silu: nn.SiLU,
    F.softplus: nn.Softplus,
    F.max_pool1d: nn.MaxPool1d,
    F.max_pool2d: nn.MaxPool2d,
    F.max_pool3d: nn.MaxPool3d,
    F.avg_pool1d: nn.AvgPool1d,
    F.avg_pool2d: nn.AvgPool2d,
    F.avg_pool3d: nn.AvgPool3d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.dropout: _dropout,
}
