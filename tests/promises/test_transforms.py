"""Under torch.func, fake tensors, export and tracing a watched model is as a plain one, and nothing is measured."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from maxgain import Lipschitz, MaxGain, measure_gains
from maxgain.errors import MaxGainError, UnsupportedLayerError
from odd_layers import Scaled

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def loss(model: nn.Module, parameters: Any, x: Tensor) -> Tensor:
    out: Tensor = functional_call(model, parameters, (x,))
    return out.square().mean()


def detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: grad(lambda p: loss(m, p, X))(detached(m)),
    "per-sample gradients": lambda m: vmap(grad(lambda p, x: loss(m, p, x[None])), (None, 0))(detached(m), X),
    "vmap": lambda m: vmap(m)(X),
    "vmap in chunks": lambda m: vmap(m, chunk_size=2)(X),
    "jacrev": lambda m: jacrev(m)(X[0]),
    "hessian": lambda m: hessian(lambda x: m(x).sum())(X[0]),
    "jvp": lambda m: jvp(m, (X,), (X,)),
    "make_fx": lambda m: make_fx(m)(X)(X),
    "make_fx of a gradient": lambda m: make_fx(grad(lambda x: m(x).sum()))(X)(X),
    "aot_module": lambda m: aot_module(m, lambda graph, _: graph)(X),
    "fake tensors": lambda m: fake_shape(m),
    "the meta device": lambda m: tuple(functional_call(m, on_meta(m), X.to("meta")).shape),
    "jit.trace": lambda m: torch.jit.trace(m, X)(X),
    "export": lambda m: torch.export.export(m, (X,)).module()(X),
    "symbolic trace": lambda m: torch.fx.symbolic_trace(m)(X),
}


def on_meta(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.to("meta") for name, parameter in model.named_parameters()}


def fake_shape(model: nn.Module) -> tuple[int, ...]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return tuple(model(torch.empty(4, 6)).shape)


def flat(value: Any) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return [torch.as_tensor(leaf) for leaf in leaves]


@pytest.mark.parametrize("make", [MaxGain, lambda model, bound: MaxGain(model, bound, measure="fresh"), Lipschitz])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_promise_12_a_transform_of_a_watched_model_is_that_of_the_plain_one(name: str, make: Any) -> None:
    expected = TRANSFORMS[name](net())
    model = net()
    constraint = make(model, math.inf)
    result = TRANSFORMS[name](model)
    for one, other in zip(flat(result), flat(expected), strict=True):
        torch.testing.assert_close(one, other)
    if isinstance(constraint, MaxGain):
        unmeasured = all(math.isnan(gain) for gain in constraint.gains.values())
        assert unmeasured or name in ("make_fx", "make_fx of a gradient", "jit.trace", "export", "symbolic trace")
    model(X).square().mean().backward()
    constraint.step()
    assert all(gain > 0 for gain in constraint.gains.values()), "and afterwards it measures as before"


@pytest.mark.parametrize("name", ["grad", "per-sample gradients", "vmap", "jacrev", "jvp"])
def test_promise_12_nor_is_anything_measured_where_a_transform_is_compiled(name: str) -> None:
    torch.compiler.reset()
    model = net()
    constraint = MaxGain(model, math.inf)
    result = torch.compile(lambda: TRANSFORMS[name](model), fullgraph=True, backend="eager")()
    for one, other in zip(flat(result), flat(TRANSFORMS[name](net())), strict=True):
        torch.testing.assert_close(one, other)
    assert all(math.isnan(gain) for gain in constraint.gains.values())


def test_promise_12_a_watched_layer_with_a_forward_of_its_own_is_traced_as_a_plain_one() -> None:
    model = nn.Sequential(Scaled(6, 4))
    MaxGain(model, 0.5)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(X), model(X))


def test_a_model_that_is_watched_cannot_be_scripted_and_says_so() -> None:
    model = net()
    constraint = MaxGain(model)
    with pytest.raises(MaxGainError, match=r"cannot be scripted while a constraint watches it: call detach\(\)"):
        torch.jit.script(model)
    constraint.detach()
    torch.jit.script(model)


def test_rows_of_a_jagged_tensor_are_instances_and_other_nested_tensors_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    constraint = MaxGain(model)
    rows = [torch.randn(2, 6), torch.randn(3, 6)]
    model(torch.nested.nested_tensor(rows, layout=torch.jagged))
    x = torch.cat(rows)
    expected = (x @ model[0].weight.T).norm(dim=1) / x.norm(dim=1)
    assert constraint.gains["0"] == pytest.approx(expected.max().item(), rel=1e-5)
    with pytest.raises(UnsupportedLayerError, match=r"^layer '0' \(Linear\) cannot be measured: its input is nested"):
        model(torch.nested.nested_tensor(rows, layout=torch.strided))


def test_whole_samples_of_a_jagged_tensor_are_refused_rather_than_taken_for_rows() -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    jagged = torch.nested.nested_tensor([torch.randn(2, 6), torch.randn(3, 6)], layout=torch.jagged)
    refusal = r"^layer '0' \(Linear\) cannot be measured: its samples are of different lengths"
    MaxGain(model, instance="sample")
    with pytest.raises(UnsupportedLayerError, match=refusal):
        model(jagged)
    with pytest.raises(UnsupportedLayerError, match=refusal):
        measure_gains(nn.Sequential(nn.Linear(6, 5)), [jagged], instance="sample")


def test_a_sparse_input_is_refused_by_name() -> None:
    class Sparse(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return torch.sparse.mm(input, self.weight.T)

    model = nn.Sequential(Sparse(6, 5, bias=False))
    MaxGain(model)
    with pytest.raises(UnsupportedLayerError, match=r"^layer '0' \(Sparse\) cannot be measured: its input is sparse"):
        model(torch.eye(6).to_sparse())


def test_promise_12_a_copy_made_inside_a_transform_stays_a_plain_module() -> None:
    model = net()
    MaxGain(model)
    twin = copy.deepcopy(model)
    assert torch.equal(vmap(twin)(X), vmap(model)(X))
