"""Promise 12: apart from measuring, torch.compile makes the same of a constrained model as of a plain one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.compilers import nop

from maxgain import MaxGain
from promises.common import compiling

pytestmark = compiling


def kept_for_backward(layers: list[nn.Module], *, constrained: bool) -> int:
    """How many bytes a compiled forward under autocast keeps."""
    model = nn.Sequential(*layers)
    if constrained:
        MaxGain(model, gamma=2.0)
    compiled = torch.compile(model, fullgraph=True, backend="inductor")
    kept: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    saving = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with saving, torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(torch.ones(4, 16, 16, requires_grad=True))
    return sum(kept)


@pytest.mark.parametrize("activation", [nn.GELU, partial(nn.SiLU, inplace=True)])
def test_promise_12_a_compiled_forward_keeps_no_more_for_the_backward_than_without(
    activation: Callable[[], nn.Module],
) -> None:
    def layers() -> list[nn.Module]:
        return [nn.Linear(16, 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, 16)]

    without = kept_for_backward(layers(), constrained=False)
    assert 0 < kept_for_backward(layers(), constrained=True) <= without


def test_promise_12_a_compiled_call_checks_little_of_the_hook_of_each_layer() -> None:
    checked: list[tuple[str, str]] = []

    def look(guards: Any) -> list[bool]:
        checked.extend((guard.guard_type, guard.name) for guard in guards)
        return [True] * len(guards)

    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    constraint = MaxGain(model)
    torch.compile(model, fullgraph=True, backend="eager", options={"guard_filter_fn": look})(torch.ones(2, 3, 4, 4))
    assert all(gain > 0 for gain in constraint.gains.values())
    for layer in ("2", "3"):  # what is the same for all was seen in the first ones
        of_hook = [kind for kind, name in checked if f"_modules['{layer}']._forward_hooks[" in name]
        assert of_hook, "torch has other names for them now"
        assert of_hook.count("DUPLICATE_INPUT") <= 3, "the module, the layer's row, and what all maxima share"
        assert "NOT_PRESENT_IN_GENERIC_DICT" not in of_hook, "where there are slots, nothing can hide a method"


class Broken(nn.Module):
    """What is called in its loop is not compiled as a part of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu_()
            torch._dynamo.graph_break()
        return x


def test_promise_12_hooks_are_not_compiled_by_themselves_behind_a_graph_break() -> None:
    model, plain, x = Broken(), Broken(), torch.randn(4, 6)
    constraint, expected, seen = MaxGain(model), MaxGain(plain), list[str]()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        seen.append(graph.code)
        return graph

    torch.testing.assert_close(torch.compile(model, backend=backend)(x), plain(x))
    assert constraint.gains == pytest.approx(expected.gains, rel=1e-5)
    assert not [code for code in seen if "maxgain" in code], "as often as there are layers, until torch gives up"


class Residual(nn.Module):
    """Two convolutions whose outputs are added, so that they get the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.last(torch.relu(self.first(x) + self.second(x)))
        return added


def test_promise_12_the_compiled_backward_of_a_residual_network_is_the_one_without() -> None:
    def backward_of(*, constrained: bool) -> list[str]:
        torch._dynamo.reset()
        model, seen = Residual(), list[str]()
        if constrained:
            MaxGain(model, gamma=2.0)

        def look(graph: torch.fx.GraphModule, _: Any) -> Any:
            seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return make_boxed_func(graph.forward)

        compiled = torch.compile(model, backend=aot_autograd(fw_compiler=nop, bw_compiler=look))
        compiled(torch.ones(2, 3, 8, 8)).sum().backward()
        return seen

    assert backward_of(constrained=True) == backward_of(constrained=False)
